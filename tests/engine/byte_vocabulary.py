"""A vocabulary whose tokens are bytes, and some words across quotes and braces."""

from __future__ import annotations

from functools import cache

from llguidance import LLTokenizer, TokenizerWrapper

EOS = 256
WORDS = (
    b'{"',
    b'":',
    b'",',
    b'"}',
    b'": "',
    b'", "',
    b"true",
    b"false",
    b"null",
    b"}]",
    b"[{",
    b"\n",
    b"  ",
    b"ab",
    b"abc",
)
"""Tokens from 257 on."""
TOKENS = [*(bytes([byte]) for byte in range(256)), b"<eos>", *WORDS]


class _Bytes:
    """What llguidance asks of a tokenizer."""

    eos_token_id = EOS
    bos_token_id = None
    tokens = TOKENS
    special_token_ids = (EOS,)

    def __call__(self, text: bytes | str) -> list[int]:
        return list(text.encode() if isinstance(text, str) else text)


@cache
def byte_vocabulary() -> LLTokenizer:
    return LLTokenizer(TokenizerWrapper(_Bytes()), n_vocab=1000, eos_token=EOS)


def ids(text: str) -> list[int]:
    return list(text.encode())


def text(token_ids: list[int]) -> str:
    """The text of tokens without the end of sequence."""
    return b"".join(TOKENS[one] for one in token_ids if one != EOS).decode(errors="replace")
