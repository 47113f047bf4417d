from __future__ import annotations

from functools import cache

from llguidance import LLTokenizer, TokenizerWrapper

EOS, VOCAB_SIZE = 256, 1000
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
    b'"]',
    b'{"a',
    b'":{"',
    b'a"}',
    b"],[",
    b"\xc3\xa9",
    b'"\xc3',
    b'\xa9"',
)
"""Tokens with IDs 257 and up."""
BYTES = [*(bytes([byte]) for byte in range(256)), b"<eos>"]
TOKENS = [*BYTES, *WORDS]


class _Tokenizer:
    eos_token_id = EOS
    bos_token_id = None

    def __init__(self, tokens: list[bytes], special_token_ids: tuple[int, ...] = (EOS,)) -> None:
        self.tokens = tokens
        self.special_token_ids = special_token_ids

    def __call__(self, text: bytes | str) -> list[int]:
        return tokenized(text.encode() if isinstance(text, str) else text, self.tokens)


def tokenized(text: bytes, tokens: list[bytes]) -> list[int]:
    """Divide a text into the longest tokens. `tokens` contains every byte."""
    numbers, longest = _numbers_of(tuple(tokens))
    ids, at = [], 0
    while at < len(text):
        length = next(length for length in range(longest, 0, -1) if text[at : at + length] in numbers)
        ids.append(numbers[text[at : at + length]])
        at += length
    return ids


@cache
def _numbers_of(tokens: tuple[bytes, ...]) -> tuple[dict[bytes, int], int]:
    """The number of each token, and the length of the longest one."""
    numbers: dict[bytes, int] = {}
    for number, token in enumerate(tokens):
        numbers.setdefault(token, number)
    return numbers, max(map(len, tokens))


@cache
def byte_vocabulary(*, has_words: bool = True) -> LLTokenizer:
    return LLTokenizer(TokenizerWrapper(_Tokenizer(TOKENS if has_words else BYTES)), n_vocab=VOCAB_SIZE, eos_token=EOS)


@cache
def vocabulary_with_markers(markers: tuple[str, ...]) -> LLTokenizer:
    """The bytes, and the markers as special tokens with IDs from EOS + 1."""
    special = tuple(range(EOS, EOS + 1 + len(markers)))
    tokenizer = _Tokenizer([*BYTES, *(marker.encode() for marker in markers)], special)
    return LLTokenizer(TokenizerWrapper(tokenizer), n_vocab=VOCAB_SIZE, eos_token=EOS)


def ids(text: str) -> list[int]:
    return list(text.encode())


def text(token_ids: list[int]) -> str:
    return b"".join(TOKENS[one] for one in token_ids if one != EOS).decode(errors="replace")
