"""Small vocabularies as llama.cpp's converters write them into a GGUF file's metadata."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from typing import Any

from tokenizers import Tokenizer, pre_tokenizers, trainers

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)
SPACE = "\u2581"

TEXTS = (
    "The quick brown fox jumps over the lazy dog; it's RAINING and we'll see THAT.\n\n",
    "def f(x: int) -> str:\n    return f'{x:>10}' if x != 0 else \"\\n\"\n\t\t# 12345 1/3\r\n",
    "Zażółć gęślą jaźń, naïve façade, Straße. Привет, мир! Γειά σου Κόσμε\n",
    "快速的棕色狐狸跳过了懒狗，1314151天～ 素早い茶色の狐。 빠른 갈색 여우   안녕\n",
    "مرحبا بالعالم ١٢٣ नमस्ते दुनिया १२३ สวัสดีชาวโลก e\u0301té ½²Ⅻ 🦊👩‍👩‍👧 \u00a0\u3000 x\n",
    "   lead  and trail   \t\n \n\n\n{'a': [1, 2.5e-10]} http://a.b/c?d=e&f=%20 camelCase HTTPServer   ",
)


def byte_level_metadata(original: Tokenizer, pre: str, controls: Sequence[str] = ("<|end|>",)) -> dict[str, Any]:
    """Train `original` on the texts, and return the metadata with its vocabulary."""
    trainer = trainers.BpeTrainer(
        vocab_size=600,
        special_tokens=list(controls),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    original.train_from_iterator([*TEXTS] * 3, trainer)
    model = json.loads(original.to_str())["model"]
    tokens = sorted(model["vocab"], key=model["vocab"].__getitem__)
    return {
        "general.architecture": "llama",
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [CONTROL if token in controls else NORMAL for token in tokens],
        "tokenizer.ggml.merges": [" ".join(merge) for merge in model["merges"]],
        "tokenizer.ggml.add_bos_token": False,
        "tokenizer.ggml.eos_token_id": tokens.index(controls[0]),
    }


def sentencepiece_metadata(pieces: Mapping[str, float], controls: Sequence[str] = ()) -> dict[str, Any]:
    """Return the metadata of a SentencePiece vocabulary: `<unk>`, `<s>`, `</s>`, controls, bytes, then pieces."""
    tokens = ["<unk>", "<s>", "</s>", *controls, *(f"<0x{byte:02X}>" for byte in range(256)), *pieces]
    types = [UNKNOWN, CONTROL, CONTROL, *[CONTROL] * len(controls), *[BYTE] * 256, *[NORMAL] * len(pieces)]
    return {
        "general.architecture": "llama",
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.pre": "default",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.scores": [0.0] * (len(tokens) - len(pieces)) + list(pieces.values()),
        "tokenizer.ggml.token_type": types,
        "tokenizer.ggml.add_bos_token": False,
    }


@cache
def trained_pieces(num_pieces: int = 400) -> dict[str, float]:
    """Return pieces as SentencePiece trains them: merges by frequency, then single characters, each with a score."""
    words = [list(SPACE + word) for text in TEXTS for word in text.split()]
    characters = sorted({character for word in words for character in word})
    pieces: dict[str, float] = {}
    while len(pieces) < num_pieces:
        counts: dict[tuple[str, str], int] = {}
        for word in words:
            for pair in itertools.pairwise(word):
                counts[pair] = counts.get(pair, 0) + 1
        if not counts:
            break
        left, right = max(counts, key=lambda pair: (counts[pair], pair))
        pieces.setdefault(left + right, -float(len(pieces)))
        words = [list(_merged(word, left, right)) for word in words]
    # Characters have the worst scores, as in SentencePiece.
    pieces.update({one: -float(num_pieces + index) for index, one in enumerate(characters)})
    return pieces


def _merged(word: Sequence[str], left: str, right: str) -> Iterator[str]:
    index = 0
    while index < len(word):
        if tuple(word[index : index + 2]) == (left, right):
            yield left + right
            index += 2
        else:
            yield word[index]
            index += 1


def sentencepiece_tokens(metadata: Mapping[str, Any], text: str) -> list[str]:
    """Divide a text as SentencePiece does: merge the leftmost pair with the best score until no pair is a piece."""
    scores = dict(zip(metadata["tokenizer.ggml.tokens"], metadata["tokenizer.ggml.scores"], strict=True))
    parts = list((SPACE + text).replace(" ", SPACE))
    while True:
        pairs = [(scores[a + b], -index) for index, (a, b) in enumerate(itertools.pairwise(parts)) if a + b in scores]
        if not pairs:
            break
        index = -max(pairs)[1]
        parts[index : index + 2] = [parts[index] + parts[index + 1]]
    return [token for part in parts for token in ([part] if part in scores else _byte_tokens(part))]


def _byte_tokens(part: str) -> list[str]:
    return [f"<0x{byte:02X}>" for byte in part.encode()]
