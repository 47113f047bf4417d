"""A tokenizer for random models. Every system accepts it, and each token has a unique spelling.

Its format is Llama 2's: BPE without merges, with byte fallback. llama.cpp's converter recognises this format by the
structure of `tokenizer.json`. It accepts other tokenizers only if their hash is in its list.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers

SPECIAL_TOKENS = ("<unk>", "<s>", "</s>")
FIRST_BYTE = len(SPECIAL_TOKENS)
FIRST_WORD = FIRST_BYTE + 256
"""First id of a word. Lower ids are special tokens and bytes."""


def write_tokenizer(directory: Path, vocab_size: int) -> None:
    """Write `tokenizer.json` and `tokenizer_config.json` for token ids in [0, vocab_size)."""
    bpe = models.BPE(
        vocab={token: token_id for token_id, token in enumerate(token_texts(vocab_size))},
        merges=[],
        unk_token=SPECIAL_TOKENS[0],
        fuse_unk=True,
        byte_fallback=True,
    )
    tokenizer = Tokenizer(bpe)
    tokenizer.normalizer = normalizers.Replace(" ", "\u2581")
    tokenizer.decoder = decoders.Sequence([decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()])
    tokenizer.add_special_tokens([AddedToken(token, normalized=False, special=True) for token in SPECIAL_TOKENS])
    tokenizer.save(str(directory / "tokenizer.json"))
    unknown, begin, end = SPECIAL_TOKENS
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": begin,
        "eos_token": end,
        "unk_token": unknown,
        "clean_up_tokenization_spaces": False,
    }
    (directory / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n")


def token_texts(vocab_size: int) -> list[str]:
    """The spelling of each token id."""
    tokens = [*SPECIAL_TOKENS, *(f"<0x{byte:02X}>" for byte in range(256))]
    return tokens + [f"\u2581w{number}" for number in range(FIRST_WORD, vocab_size)]


def token_id_of(spelled: str) -> int:
    """The id of an item in an OpenAI answer's `logprobs.tokens`, where a byte above 0x7F is `bytes:\\xNN`."""
    if spelled in SPECIAL_TOKENS:
        return SPECIAL_TOKENS.index(spelled)
    if spelled.startswith(" w"):
        return int(spelled[2:])
    if spelled.startswith("bytes:\\x"):
        return FIRST_BYTE + int(spelled.removeprefix("bytes:\\x"), 16)
    if len(spelled) != 1:
        raise ValueError(f"{spelled!r} is not a token of this vocabulary")
    return FIRST_BYTE + ord(spelled)


def token_ids_of(spelled: Sequence[str]) -> list[int]:
    return [token_id_of(one) for one in spelled]
