"""Tokenizers in GGUF metadata give the same tokens as the originals, and load as those of any model directory."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import pytest
from tokenizers import Regex, Tokenizer, models, normalizers, pre_tokenizers

from loramux.adapter_store.gguf.gguf_file import GgufFile
from loramux.adapter_store.gguf.pre_tokenizers import PRE_TOKENIZERS
from loramux.adapter_store.gguf.tokenizer_files import tokenizer_files
from loramux.engine.text.detokenizer import new_detokenizer
from loramux.platform.tokenizer.model_tokenizer import ModelTokenizer
from tests.adapter_store.gguf.vocabularies import (
    CONTROL,
    NORMAL,
    SPACE,
    TEXTS,
    UNKNOWN,
    UNUSED,
    USER_DEFINED,
    byte_level_metadata,
    sentencepiece_metadata,
    sentencepiece_tokens,
    trained_pieces,
)

CL100K = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
TEKKEN = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def original(*steps: pre_tokenizers.PreTokenizer | str, nfc: bool = False) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.NFC() if nfc else None  # type: ignore[assignment]
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(Regex(step), "isolated") if isinstance(step, str) else step for step in steps]
    )
    return tokenizer


def byte_level(use_regex: bool = False) -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=use_regex)


ORIGINALS: dict[str, Callable[[], Tokenizer]] = {
    "gpt-2": lambda: original(byte_level(use_regex=True)),
    "smollm": lambda: original(pre_tokenizers.Digits(True), byte_level(use_regex=True)),
    "llama-bpe": lambda: original(CL100K, byte_level()),
    "qwen2": lambda: original(CL100K.replace("{1,3}", ""), byte_level(), nfc=True),
    "deepseek-r1-qwen": lambda: original(CL100K.replace("{1,3}", ""), byte_level()),
    "tekken": lambda: original(TEKKEN, byte_level()),
    "deepseek-coder": lambda: original(
        "[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", "[一-龥ࠀ-一가-퟿]+", pre_tokenizers.Digits(True), byte_level()
    ),
}


def built(metadata: dict[str, Any]) -> Tokenizer:
    return Tokenizer.from_str(tokenizer_files(metadata)["tokenizer.json"].decode())


@pytest.mark.parametrize("pre", ORIGINALS)
def test_byte_level_vocabulary_gives_the_original_tokens(pre: str) -> None:
    first = ORIGINALS[pre]()
    ours = built(byte_level_metadata(first, pre))
    texts = [*TEXTS, "".join(TEXTS), *(text.upper() for text in TEXTS), "<|end|>".join(TEXTS), ""]
    for text in texts:
        ids = ours.encode(text).ids
        assert ids == first.encode(text).ids
        expected = first.normalizer.normalize_str(text) if first.normalizer is not None else text
        assert ours.decode(ids, skip_special_tokens=False) == expected


SAMPLE = "I'LL see O'Neil's 12345 naïve½ cafés\n\n  HTTPServer  你好ab, (x=1);;/\n\t\tय's"


@pytest.mark.parametrize("pre", PRE_TOKENIZERS)
def test_every_pre_tokenizer_loads_and_loses_nothing(pre: str) -> None:
    metadata = byte_level_metadata(original(byte_level(use_regex=True)), pre)
    metadata["tokenizer.ggml.bos_token_id"] = metadata["tokenizer.ggml.eos_token_id"]
    ours = built(metadata)
    for text in (*TEXTS[:4], SAMPLE):
        assert ours.decode(ours.encode(text).ids) == text


@pytest.mark.parametrize("text", [*TEXTS, " two  spaces", "", " ", "a" * 50, "".join(TEXTS), "▁▁ a"])
def test_sentencepiece_vocabulary_gives_the_tokens_of_its_algorithm(text: str) -> None:
    metadata = sentencepiece_metadata(trained_pieces())
    ours = built(metadata)
    encoded = ours.encode(text)
    assert encoded.tokens == (sentencepiece_tokens(metadata, text) if text else [])
    assert ours.decode(encoded.ids) == text.replace(SPACE, " ")


def test_runs_of_spaces_are_built_first_and_longest_first() -> None:
    """They are user-defined, with a placeholder as score."""
    runs = {" " * count: -1000.0 for count in range(2, 6)}
    metadata = sentencepiece_metadata({**runs, SPACE + "a": -1.0, SPACE: -2.0, "a": -3.0})
    metadata["tokenizer.ggml.add_space_prefix"] = False
    types, tokens = metadata["tokenizer.ggml.token_type"], metadata["tokenizer.ggml.tokens"]
    metadata["tokenizer.ggml.token_type"] = [
        USER_DEFINED if token in runs else kind for token, kind in zip(tokens, types, strict=True)
    ]
    ours = built(metadata)
    assert ours.encode(" " * 4 + "a").tokens == [SPACE * 4, "a"]
    assert ours.encode(" " * 7 + "a").tokens == [SPACE * 5, SPACE * 2, "a"]
    assert ours.decode(ours.encode(" " * 7 + "a").ids) == " " * 7 + "a"


def test_special_tokens_around_and_in_a_text() -> None:
    metadata = sentencepiece_metadata({SPACE + "a": -1.0, SPACE: -2.0, "a": -3.0}, controls=("<|user|>",))
    metadata |= {"tokenizer.ggml.add_bos_token": True, "tokenizer.ggml.add_eos_token": True}
    ours = built(metadata)
    assert ours.encode("a<|user|>a").tokens == ["<s>", SPACE + "a", "<|user|>", SPACE + "a", "</s>"]
    assert ours.encode("a", "a").tokens == ["<s>", SPACE + "a", "</s>", "<s>", SPACE + "a", "</s>"]
    assert ours.encode("a<|user|>", add_special_tokens=False).tokens == [SPACE + "a", "<|user|>"]
    assert ours.decode(ours.encode("a<|user|>a").ids) == "a a"


def test_a_sentencepiece_file_without_flags_adds_bos_and_a_space() -> None:
    metadata = sentencepiece_metadata({SPACE + "a": -1.0, SPACE: -2.0, "a": -3.0})
    del metadata["tokenizer.ggml.add_bos_token"]
    assert built(metadata).encode("a").tokens == ["<s>", SPACE + "a"]
    assert built({**metadata, "tokenizer.ggml.add_space_prefix": False}).encode("a").tokens == ["<s>", "a"]
    stripped = built({**metadata, "tokenizer.ggml.remove_extra_whitespaces": True})
    assert stripped.encode("  a   a ").tokens == ["<s>", SPACE + "a", SPACE + "a"]
    assert stripped.encode("  \n  a\n").tokens == ["<s>", SPACE, "<0x0A>", SPACE + "a", "<0x0A>"]


def test_documented_pre_tokenizers_are_those_that_are_read() -> None:
    page = (Path(__file__).parents[3] / "docs" / "gguf.md").read_text()
    listed = page.partition("The pre-tokenizers are ")[2].partition(".\n")[0]
    assert set(re.findall(r"`([^`]+)`", listed)) == PRE_TOKENIZERS.keys()


def test_bos_is_added_by_default_only_where_llama_cpp_adds_it() -> None:
    for pre, is_added in (("llama-bpe", True), ("tekken", True), ("qwen2", False), ("gpt-2", False)):
        metadata = byte_level_metadata(original(byte_level(use_regex=True)), pre)
        del metadata["tokenizer.ggml.add_bos_token"]
        assert built(metadata).encode("").ids == []
        assert bool(built({**metadata, "tokenizer.ggml.bos_token_id": 0}).encode("").ids) is is_added


def test_phi3_ignores_spaces_after_its_control_tokens() -> None:
    metadata = sentencepiece_metadata({SPACE + "a": -1.0, SPACE: -2.0, "a": -3.0}, controls=("<|user|>",))
    plain, phi3 = built(metadata), built({**metadata, "general.architecture": "phi3"})
    ids = {token: index for index, token in enumerate(metadata["tokenizer.ggml.tokens"])}
    break_and_a = [ids[SPACE], ids["<0x0A>"], ids["a"]]
    assert plain.encode("<|user|>\na").ids == [ids["<|user|>"], *break_and_a]
    assert phi3.encode("<|user|>\na").ids == [ids["<|user|>"], ids[SPACE + "a"]]
    assert phi3.encode("<s>\na").ids == [ids["<s>"], *break_and_a]


def test_tokens_that_only_fill_the_embedding_are_left_out() -> None:
    metadata = byte_level_metadata(original(byte_level(use_regex=True)), "gpt-2")
    count = len(metadata["tokenizer.ggml.tokens"])
    for index, kind in enumerate((USER_DEFINED, UNKNOWN, UNUSED), start=count):
        metadata["tokenizer.ggml.tokens"].append(f"[PAD{index}]")
        metadata["tokenizer.ggml.token_type"].append(kind)
    assert built(metadata).get_vocab_size() == count
    assert len(built(metadata).encode(f"[PAD{count}]").ids) > 1
    metadata["tokenizer.ggml.padding_token_id"] = count + 1
    assert built(metadata).get_vocab_size() == count + 2


def test_user_defined_tokens_are_shown_and_control_tokens_are_not() -> None:
    metadata = byte_level_metadata(original(byte_level(use_regex=True)), "gpt-2", ("<|end|>", "<tool_call>"))
    tokens = metadata["tokenizer.ggml.tokens"]
    metadata["tokenizer.ggml.token_type"] = [
        {"<|end|>": CONTROL, "<tool_call>": USER_DEFINED}.get(token, NORMAL) for token in tokens
    ]
    ours = built(metadata)
    ids = ours.encode("a<tool_call>b<|end|>").ids
    assert len(ids) == 4
    assert ours.decode(ids) == "a<tool_call>b"


@pytest.mark.parametrize(
    ("controls", "roles", "ends"),
    [
        (("</s>",), {"eos": "</s>"}, ["</s>"]),
        (("<|eot_id|>", "<|end_of_text|>"), {"eos": "<|end_of_text|>"}, ["<|end_of_text|>", "<|eot_id|>"]),
        (("a|", "b|", "c|"), {"eos": "a|", "eot": "b|", "eom": "c|"}, ["a|", "b|", "c|"]),
        (("<|end|>", "<|return|>", "<|call|>"), {"eos": "<|return|>"}, ["<|return|>", "<|call|>"]),
        (("<|end|>", "x|"), {"eos": "x|"}, ["x|", "<|end|>"]),
        (("<|x|>",), {}, None),
    ],
)
def test_tokens_that_end_an_answer(controls: tuple[str, ...], roles: dict[str, str], ends: list[str] | None) -> None:
    metadata = byte_level_metadata(original(byte_level(use_regex=True)), "gpt-2", controls)
    del metadata["tokenizer.ggml.eos_token_id"]
    tokens = metadata["tokenizer.ggml.tokens"]
    metadata |= {f"tokenizer.ggml.{role}_token_id": tokens.index(token) for role, token in roles.items()}
    written = json.loads(tokenizer_files(metadata)["generation_config.json"])
    found = written.get("eos_token_id")
    assert (found and [tokens[token_id] for token_id in found]) == ends


TEMPLATE = "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}<|end|>{% endfor %}{{ bos_token }}assistant:"


def test_the_files_load_as_a_model_directory(tmp_path: Path) -> None:
    """From a file that the `gguf` package has written to the prompt, the answer and the streamed text."""
    metadata = byte_level_metadata(original(CL100K, byte_level()), "llama-bpe", ("<|end|>", "<|begin|>"))
    path = tmp_path / "tokenizer.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("llama-bpe")
    writer.add_token_list(metadata["tokenizer.ggml.tokens"])
    writer.add_token_types(metadata["tokenizer.ggml.token_type"])
    writer.add_token_merges(metadata["tokenizer.ggml.merges"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(0)
    writer.add_chat_template([{"name": "default", "template": TEMPLATE}, {"name": "tool_use", "template": "tools"}])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with GgufFile(path) as file:
        files = tokenizer_files(file.metadata)
    for name, content in files.items():
        (tmp_path / name).write_bytes(content)
    loaded = ModelTokenizer.load(tmp_path)
    assert loaded.chat_template is not None
    messages = [{"role": "user", "content": "it's 12345"}]
    assert loaded.chat_template.render(messages) == "user: it's 12345<|end|><|begin|>assistant:"
    tool = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
    assert loaded.chat_template.render(messages, tools=[tool]) == "tools"
    # llama.cpp adds BOS for this pre-tokenizer if the file does not say so.
    assert loaded.encode("a")[0] == 1
    for text in TEXTS:
        ids = loaded.encode(text)
        detokenizer = new_detokenizer(loaded, ids[:1], skip_special_tokens=True)
        assert "".join(map(detokenizer.feed, ids[1:])) + detokenizer.finish() == text


def test_sentencepiece_text_is_streamed_whole(tmp_path: Path) -> None:
    metadata = sentencepiece_metadata(trained_pieces())
    metadata["tokenizer.chat_template"] = TEMPLATE
    for name, content in tokenizer_files(metadata).items():
        (tmp_path / name).write_bytes(content)
    loaded = ModelTokenizer.load(tmp_path)
    assert (tmp_path / "chat_template.jinja").read_text() == TEMPLATE
    for text in TEXTS:
        ids = loaded.encode("x" + text)
        detokenizer = new_detokenizer(loaded, ids[:2], skip_special_tokens=True)
        assert loaded.decode(ids[:2]) + "".join(map(detokenizer.feed, ids[2:])) + detokenizer.finish() == "x" + text
