"""The pages of running sequences: shared pages from the prefix cache, followed by each sequence's own pages."""

from __future__ import annotations

import sys

from loramux.engine.cached_page import CachedPage
from loramux.engine.pages.eviction import Reclaimer
from loramux.engine.pages.page_pool import PageOwner, PagePool
from loramux.engine.pages.prefix_cache import PrefixCache
from loramux.engine.sequence import Sequence, page_list

RUNNING = -1
"""Queue position of running sequences: ahead of all waiting sequences."""


class KvPages:
    def __init__(self, pages: PagePool, reclaimer: Reclaimer, cache: PrefixCache, page_tokens: int) -> None:
        self._pages = pages
        self._reclaimer = reclaimer
        self._cache = cache
        self._page_tokens = page_tokens

    def find_prefix(self, sequence: Sequence) -> list[CachedPage]:
        """Find the longest cached prefix that leaves at least one token to compute, without changing any state.

        A sequence whose prompt is not scored yet has no cached prefix, because its prompt's logits are needed.
        """
        found: list[CachedPage] = []
        if sequence.num_unscored:
            return found
        for index in range((len(sequence.tokens) - 1) // self._page_tokens):
            key = self._key(sequence, index)
            cached = None if key is None else self._cache.find(key)
            if cached is None:
                break
            found.append(cached)
        return found

    def num_tokens_in(self, prefix: list[CachedPage]) -> int:
        return len(prefix) * self._page_tokens

    def num_pages_to_begin(self, prefix: list[CachedPage], num_tokens: int) -> int:
        """Free or evictable pages needed to start a sequence with a cached prefix and `num_tokens` more tokens."""
        num_idle = sum(cached.num_users == 0 for cached in prefix)
        return -(-(self.num_tokens_in(prefix) + num_tokens) // self._page_tokens) - len(prefix) + num_idle

    def attach(self, sequence: Sequence, prefix: list[CachedPage]) -> None:
        """Start the sequence on the prefix that `find_prefix` has just found."""
        assert not sequence.pages
        assert not sequence.num_in_flight
        for cached in prefix:
            sequence.pages.append(self._cache.acquire(cached))
            sequence.shared_pages.append(cached)
        sequence.num_computed = sequence.num_room = self.num_tokens_in(prefix)
        sequence.next_offer = 0

    def max_tokens(self, num_other_pages: int) -> int:
        """Number of tokens that fit into the pool if `num_other_pages` pages have other uses."""
        return (self._pages.num_pages - num_other_pages) * self._page_tokens

    def grow(self, sequence: Sequence, num_tokens: int, position: int = RUNNING) -> bool:
        """Allocate pages for `num_tokens` more tokens. Return False if queue position `position` has no room."""
        end = sequence.num_computed + num_tokens
        if end <= sequence.num_room:
            return True
        needed = -(-end // self._page_tokens) - len(sequence.pages)
        if not self._reclaimer.make_room(needed, position):
            return False
        sequence.pages.extend(self._pages.alloc(needed, PageOwner.KV))
        sequence.num_room += needed * self._page_tokens
        return True

    def offer(self, sequence: Sequence) -> None:
        """Add to the prefix cache the pages that this sequence has filled since the last call.

        A page can be added as soon as the step that fills it has been submitted, because it is read only by later
        steps.
        """
        if sequence.num_computed < sequence.next_offer:
            return
        if sequence.is_tainted or not sequence.add.isolation_key:
            sequence.next_offer = sys.maxsize
            return
        num_shared = len(sequence.shared_pages)
        num_full = min(sequence.num_computed, len(sequence.tokens)) // self._page_tokens
        for index in range(num_shared, num_full):
            key = self._key(sequence, index)
            if key is None:
                return
            digest = self._digest(sequence, index)
            sequence.shared_pages.append(self._cache.insert(key, sequence.pages[index], digest))
        sequence.next_offer = (len(sequence.shared_pages) + 1) * self._page_tokens

    def detach(self, sequence: Sequence) -> None:
        """Free all pages. Cached pages stay available to other sequences. The end of a prefix is evicted first."""
        for cached in reversed(sequence.shared_pages):
            if cached is not None:
                self._cache.release(cached)
        sequence.shared_pages = []
        self._pages.free(sequence.pages)
        sequence.pages = page_list()
        sequence.num_computed = sequence.num_room = 0

    def disown(self, sequence: Sequence) -> None:
        """Remove a broken sequence's pages from the prefix cache."""
        for cached in sequence.shared_pages:
            if cached is not None:
                self._cache.forget(cached)

    def _key(self, sequence: Sequence, index: int) -> bytes | None:
        """Key of the sequence's page `index`, or None without an isolation key. All of its tokens must be known."""
        keys = sequence.page_keys
        while len(keys) <= index:
            parent = keys[-1] if keys else self._cache.root(sequence.add.isolation_key)
            if parent is None:
                return None
            begin = len(keys) * self._page_tokens
            tokens = sequence.tokens[begin : begin + self._page_tokens]
            digest = self._digest(sequence, len(keys))
            num_base_tokens = 0 if digest is None else max(0, sequence.activation - begin)
            keys.append(self._cache.page_key(parent, digest, tokens, num_base_tokens))
        return keys[index]

    def _digest(self, sequence: Sequence, index: int) -> str | None:
        """The adapter that modified tokens of the sequence's page `index`, or None."""
        is_base = (index + 1) * self._page_tokens <= sequence.activation
        return None if is_base else sequence.add.digest
