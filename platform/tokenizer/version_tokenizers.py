"""Tokenizers for adapter versions that add tokens to the base's tokenizer, or rename its tokens."""

from __future__ import annotations

import threading
from collections import OrderedDict

from loramux.adapter_store.errors import AdapterRejected
from loramux.adapter_store.formats.version_files.added_vocabulary import AddedVocabulary
from loramux.platform.errors import Unavailable
from loramux.platform.tokenizer.model_tokenizer import ModelTokenizer

MAX_KEPT = 64
"""Maximum number of tokenizers kept. Each has an index of all added tokens: up to 1 MB if there are thousands."""


class VersionTokenizers:
    """Extends the base's tokenizer with the own tokens of a version. Thread-safe."""

    def __init__(self, base: ModelTokenizer) -> None:
        self._base = base
        self._lock = threading.Lock()
        # Least recently used first.
        self._recent: OrderedDict[AddedVocabulary, ModelTokenizer] = OrderedDict()

    def find(self, vocabulary: AddedVocabulary | None) -> ModelTokenizer:
        """Return the tokenizer for a vocabulary. Raises Unavailable if it does not extend this base's tokenizer."""
        if vocabulary is None or not (vocabulary.tokens or vocabulary.renamed):
            return self._base
        with self._lock:
            found = self._recent.get(vocabulary)
            if found is not None:
                self._recent.move_to_end(vocabulary)
                return found
        try:
            found = self._base.with_vocabulary(vocabulary)
        except AdapterRejected as error:
            # The version was accepted for a base with another tokenizer.
            raise Unavailable(
                f"the adapter's tokens do not fit this server's tokenizer: {error.message}", code="adapter_unavailable"
            ) from error
        with self._lock:
            self._recent[vocabulary] = found
            if len(self._recent) > MAX_KEPT:
                self._recent.popitem(last=False)
        return found

    def check_upload(self, vocabulary: AddedVocabulary) -> None:
        """Raise AdapterRejected if the tokens do not extend the base's tokenizer, or if they have no embedding rows."""
        self._base.with_vocabulary(vocabulary)
        num_tokens = self._base.num_tokens + len(vocabulary.tokens)
        if vocabulary.vocab_size < num_tokens:
            raise AdapterRejected(
                "token_mismatch",
                f"the tokenizer has {num_tokens} tokens, but the embedding and the head have {vocabulary.vocab_size}",
                "vocab_size",
            )
