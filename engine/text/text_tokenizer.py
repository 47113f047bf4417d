"""Converts between text and token ids."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType

from tokenizers import Encoding, Tokenizer, decoders

from loramux.adapter_store.formats.version_files.added_vocabulary import AddedVocabulary
from loramux.adapter_store.formats.version_files.tokenizer_files import BaseVocabulary, vocabulary_sha256
from loramux.engine.protocol.errors import ModelNotSupported
from loramux.engine.text.extended_tokenizer import extended_tokenizer, next_token_id, renamed_ids
from loramux.engine.text.truncation import Truncation

MAX_TOKENISED_AT_ONCE = 4 * 1024
"""Longest text, in characters, tokenised on the event loop, which takes under a millisecond. Longer texts are tokenised
on a thread.
"""

_BYTE_FALLBACK = re.compile(r"<0x([0-9A-F]{2})>")


def load_tokenizer(path: Path) -> Tokenizer:
    """Load a `tokenizer.json`. Raises ModelNotSupported with the path and the reason."""
    if not path.is_file():
        raise ModelNotSupported(
            f"{path} is missing: a fast tokenizer is required, which AutoTokenizer.from_pretrained(directory)"
            ".save_pretrained(directory) of transformers makes of most others"
        )
    try:
        return Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises no narrower exception
        raise ModelNotSupported(f"{path} is not a tokenizer: {error}") from error


class TextTokenizer:
    """A tokenizer of the tokenizers library, and the bytes of its tokens. Thread-safe."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        base: TextTokenizer | None = None,
        renamed: Mapping[int, int] = MappingProxyType({}),
    ) -> None:
        """Take ownership of `tokenizer`. If it extends the tokenizer of `base`, the common part is reused.

        `renamed` maps IDs that only `tokenizer` knows to those of the model.
        """
        tokenizer.no_padding()
        tokenizer.no_truncation()
        self._tokenizer = tokenizer
        self._renamed = renamed
        self._library_ids = {token_id: given for given, token_id in renamed.items()}
        self._bytes: TokenBytes = TokenBytes(tokenizer, None if base is None else base._bytes, renamed)
        # A token's spelling, in bytes or in characters, is at least as long as its text.
        if base is None:
            self.longest_token = max(map(len, tokenizer.get_vocab()), default=1)
            """No token stands for more characters."""
        else:
            self.longest_token = max([base.longest_token, *map(len, self._bytes.contents.values())])

    def with_vocabulary(self, vocabulary: AddedVocabulary) -> TextTokenizer:
        """Return a tokenizer that also knows a version's own tokens.

        The two tokenizers share their model, so this takes a few milliseconds and little memory. Raises AdapterRejected
        if the tokens cannot be added to this tokenizer.
        """
        extended = extended_tokenizer(self._tokenizer, vocabulary)
        return TextTokenizer(extended, self, renamed_ids(extended, vocabulary))

    def base_vocabulary(self, vocab_size: int, special_tokens: Mapping[str, str]) -> BaseVocabulary:
        """Return the facts with which adapters' tokenizers are compared. Takes 0.3 s for 256,000 tokens."""
        added = {token.content: token_id for token_id, token in self._tokenizer.get_added_tokens_decoder().items()}
        known = frozenset(added.values())
        ordinary = self._tokenizer.get_vocab(with_added_tokens=False)
        contents = {token_id: content for content, token_id in ordinary.items() if token_id not in known}
        return BaseVocabulary(self.num_tokens, vocab_size, added, special_tokens, vocabulary_sha256(contents))

    @property
    def num_tokens(self) -> int:
        """The ID of the first token that an adapter can add. It is the number of tokens if the IDs have no gaps."""
        return next_token_id(self._tokenizer)

    def encode(
        self, text: str, *, add_special_tokens: bool = True, truncation: Truncation | None = None
    ) -> tuple[int, ...]:
        """Encode a text, by default with the special tokens that the model expects around it."""
        if len(text) <= MAX_TOKENISED_AT_ONCE:
            encoding = self._tokenizer.encode(text, add_special_tokens=add_special_tokens)
        else:
            # Use a batch of one. The event loop needs the interpreter lock, and the library releases it only for
            # batches.
            [encoding] = self._tokenizer.encode_batch_fast([text], add_special_tokens=add_special_tokens)
        return self._ids(encoding, truncation)

    def joined(
        self, first: str, second: str, *, add_special_tokens: bool = True, truncation: Truncation | None = None
    ) -> tuple[int, ...]:
        """Encode a pair of texts, joined as the tokenizer's post-processor says."""
        [encoding] = self._tokenizer.encode_batch_fast([(first, second)], add_special_tokens=add_special_tokens)
        return self._ids(encoding, truncation)

    def _ids(self, encoding: Encoding, truncation: Truncation | None) -> tuple[int, ...]:
        ids: Sequence[int] = encoding.ids
        if truncation is not None:
            ids = truncation.kept(ids, encoding.special_tokens_mask)
        if self._renamed:
            return tuple(self._renamed.get(one, one) for one in ids)
        return tuple(ids)

    def shortened(self, text: str, max_tokens: int) -> str:
        """Return as much of the beginning of a text as has at most `max_tokens` tokens, without special tokens.

        `max_tokens` is at least 1. At least the first character is returned, even if it alone has more tokens.
        """
        while len(text) > 1:
            [encoding] = self._tokenizer.encode_batch([text], add_special_tokens=False)
            if len(encoding) <= max_tokens:
                break
            # The tokens of a beginning can differ from those of the whole text, so it is encoded again.
            end = encoding.offsets[max_tokens - 1][1]
            text = text[: max(1, min(end, len(text) - 1))]
        return text

    def spellings(self, words: Sequence[str]) -> tuple[tuple[int, ...], ...]:
        """Return the token IDs of each word, both at the start of a text and after a space, without duplicates."""
        texts = [text for word in words for text in (word.lstrip(), f" {word.lstrip()}")]
        found = (TextTokenizer.encode(self, text, add_special_tokens=False) for text in texts)
        return tuple(dict.fromkeys(ids for ids in found if ids))

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Decode the IDs. An incomplete character at either end becomes U+FFFD."""
        ids = list(token_ids)
        if self._renamed:
            ids = [self._library_ids.get(one, one) for one in ids]
        return self._tokenizer.decode(ids, skip_special_tokens=skip_special_tokens)

    def token_strings(self, token_ids: Sequence[int]) -> list[str]:
        """Return each token's spelling in the vocabulary."""
        known = self._library_ids
        return [self._tokenizer.id_to_token(known.get(token_id, token_id)) or "" for token_id in token_ids]

    def token_bytes(self, token_id: int) -> bytes:
        """Return the bytes of one token. For a special token, return the bytes of its name."""
        return self._bytes.of(token_id)

    @property
    def joins_bytes(self) -> bool:
        """True if a text is the concatenation of its tokens' bytes."""
        return self._bytes.are_joined

    def text_bytes(self, token_id: int) -> bytes:
        """Return the bytes that one token adds to a text. A special token adds none."""
        return self._bytes.in_text(token_id)

    def special_token_id(self, text: str) -> int | None:
        """Return the ID of a special token with this name, or None if ordinary tokens spell the text."""
        token_id = self.token_id(text)
        return token_id if token_id is not None and self._bytes.is_hidden(token_id) else None

    def token_id(self, content: str) -> int | None:
        """Return the ID of the token with this spelling in the vocabulary, or None if there is none."""
        token_id: int | None = self._tokenizer.token_to_id(content)
        return token_id if token_id is None else self._renamed.get(token_id, token_id)

    def marker_ids(self, text: str) -> dict[str, int]:
        """Return the tokens in this text that a grammar must name by their IDs. It can spell the rest out.

        Like llguidance, this treats each added token of the form `<...>` as special, even if it is shown in texts, as
        Qwen's `<tool_call>` is. Gemma 4's `<|channel>thought` is such a token and ordinary text.
        """
        whole = self.token_id(text)
        ids = TextTokenizer.encode(self, text, add_special_tokens=False) if whole is None else (whole,)
        return {self._bytes.contents[one]: one for one in ids if self._bytes.is_marker(one)}


class TokenBytes:
    """The bytes of single tokens. A token can be only a part of a character, so it may have no text of its own.

    Decodes the spellings of byte-level (GPT-2) and sentencepiece vocabularies.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        base: TokenBytes | None = None,
        renamed: Mapping[int, int] = MappingProxyType({}),
    ) -> None:
        """`base` contains the token bytes of the tokenizer that `tokenizer` extends, if it extends one. `renamed` maps
        IDs that only `tokenizer` knows to those of the model.
        """
        self._tokenizer = tokenizer
        self._base = base
        # A renamed token comes after the token that has its ID in the base.
        listed = sorted(tokenizer.get_added_tokens_decoder().items())
        added = {renamed.get(token_id, token_id): token for token_id, token in listed}
        self.contents = {token_id: token.content for token_id, token in added.items()}
        """The contents of the added tokens by ID."""
        shared = frozenset() if base is None else base.contents.items()
        self._own_ids = frozenset(token_id for token_id, _ in self.contents.items() - shared)
        """The IDs of the tokens that the base lacks or calls otherwise."""
        self._hidden = {token_id for token_id, token in added.items() if token.special}
        self._markers = {
            token_id
            for token_id, token in added.items()
            if token.special or (token.content.startswith("<") and token.content.endswith(">"))
        }
        self._spelled: dict[str, int] | None
        if base is not None:
            self._spelled = base._spelled
        else:
            self._spelled = _byte_level_alphabet() if '"ByteLevel"' in tokenizer.to_str() else None
        self.are_joined = isinstance(tokenizer.decoder, decoders.ByteLevel)
        self._known: dict[int, bytes] = {}

    def of(self, token_id: int) -> bytes:
        if self._base is not None and token_id not in self._own_ids:
            return self._base.of(token_id)
        known = self._known.get(token_id)
        if known is None:
            known = self._known[token_id] = self._read(token_id)
        return known

    def _read(self, token_id: int) -> bytes:
        if token_id in self.contents:
            return self.contents[token_id].encode()
        token = self._tokenizer.id_to_token(token_id)
        if token is None:
            return b""
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
        if token_id in self._hidden:
            return b""
        known = self._known.get(token_id)
        return self.of(token_id) if known is None else known

    def is_marker(self, token_id: int) -> bool:
        return token_id in self._markers

    def is_hidden(self, token_id: int) -> bool:
        return token_id in self._hidden


def _byte_level_alphabet() -> dict[str, int]:
    """Return the GPT-2 alphabet, in which printable Latin-1 characters stand for themselves and other bytes map to
    U+0100 and above, in order.
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    alphabet = {chr(byte): byte for byte in printable}
    others = [byte for byte in range(256) if byte not in set(printable)]
    alphabet.update({chr(0x100 + i): byte for i, byte in enumerate(others)})
    return alphabet
