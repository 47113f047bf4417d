"""The bytes behind one token, which may be a part of a character and then have no text of their own."""

from __future__ import annotations

import re

from tokenizers import Tokenizer

_BYTE_FALLBACK = re.compile(r"<0x([0-9A-F]{2})>")


class TokenBytes:
    """Undoes the spelling of byte-level (GPT-2) and of sentencepiece vocabularies."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        added = tokenizer.get_added_tokens_decoder()
        self._special = {token.content for token in added.values()}
        self._hidden = {token_id for token_id, token in added.items() if token.special}
        is_byte_level = '"ByteLevel"' in tokenizer.to_str()
        self._spelled = _byte_level_alphabet() if is_byte_level else None

    def of(self, token_id: int) -> bytes:
        token = self._tokenizer.id_to_token(token_id)
        if token is None:
            return b""
        if token in self._special:
            return token.encode()
        if self._spelled is not None:
            spelled = self._spelled
            if all(character in spelled for character in token):
                return bytes(spelled[character] for character in token)
            return token.encode()
        fallback = _BYTE_FALLBACK.fullmatch(token)
        if fallback is not None:
            return bytes.fromhex(fallback.group(1))
        return token.replace("\u2581", " ").encode()

    def in_text(self, token_id: int) -> bytes:
        return b"" if token_id in self._hidden else self.of(token_id)


def _byte_level_alphabet() -> dict[str, int]:
    """GPT-2's spelling: printable Latin-1 stands for itself, the other bytes follow from U+0100 in order."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    alphabet = {chr(byte): byte for byte in printable}
    others = [byte for byte in range(256) if byte not in set(printable)]
    alphabet.update({chr(0x100 + i): byte for i, byte in enumerate(others)})
    return alphabet
