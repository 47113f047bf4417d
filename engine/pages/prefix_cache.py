"""Prefix cache: full KV pages that later sequences with the same isolation key can reuse."""

from __future__ import annotations

import hashlib
from array import array
from collections import defaultdict
from collections.abc import Sequence as Tokens
from collections.abc import Set

from loramux.engine.pages.eviction import EvictionPolicy
from loramux.engine.pages.host_pages import AnyPage, HostPages
from loramux.engine.pages.page_index import PageCopy
from loramux.engine.pages.page_pool import PagePool
from loramux.engine.sequences.cached_page import CachedPage


class PrefixCache:
    """Full pages by key. Each page is held by the cache and by the sequences that use it.

    The key of a page is `SHA-256(parent's key, adapter's digest or none, token ids)`. Each isolation key has a root,
    which is the parent of its first pages. Two sequences therefore share a page only if the same adapter computed the
    same tokens after the same prefix for the same isolation key. Sequences without an isolation key share nothing. If
    pages have several blocks, each block has such a key, and the key of the last block is the key of the page.

    The pages of checkpoints (`StateCheckpoints`) are in the cache, too.

    Pages before an adapter's activation have no digest, so the base and other adapters share them. The page in which an
    adapter is activated belongs to the adapter, and its key also contains the number of tokens before the activation.

    `host` keeps copies of evicted pages in host memory, with the same keys.
    """

    def __init__(
        self,
        pages: PagePool,
        policy: EvictionPolicy,
        page_tokens: int,
        identity: Tokens[bytes] = (),
        host: HostPages | None = None,
    ) -> None:
        self._pages = pages
        self._policy = policy
        self._page_tokens = page_tokens
        self._identity = tuple(identity)
        self._by_key: dict[bytes, CachedPage] = {}
        self._by_digest: defaultdict[str, set[CachedPage]] = defaultdict(set)
        self.host = HostPages() if host is None else host
        self.num_evictions = 0
        self.num_idle = 0
        """Number of pages that no sequence uses."""

    def __len__(self) -> int:
        return len(self._by_key)

    def root(self, isolation_key: bytes) -> bytes | None:
        """Parent key of the first pages of an isolation key and this model, or None if the isolation key is empty."""
        if not isolation_key:
            return None
        return hashlib.sha256(_tagged(isolation_key, *self._identity)).digest()

    def page_key(self, parent: bytes, digest: str | None, tokens: Tokens[int], num_base_tokens: int = 0) -> bytes:
        """Key of the page (or block) of `tokens` that follows the page with the key `parent`.

        The adapter does not apply to the first `num_base_tokens` tokens. Equal tokens can have different
        `num_base_tokens`, because later tokens of a prompt can move the activation.
        """
        assert len(tokens) == self._page_tokens
        assert num_base_tokens < self._page_tokens
        adapter = b"" if digest is None else digest.encode()
        parts = [parent, adapter, array("i", tokens).tobytes()]
        if num_base_tokens:
            parts.append(num_base_tokens.to_bytes(8, "little"))
        return hashlib.sha256(_tagged(*parts)).digest()

    def find(self, key: bytes) -> CachedPage | None:
        """The page with this key, if it is in the pool."""
        return self._by_key.get(key)

    def find_anywhere(self, key: bytes) -> AnyPage | None:
        """The page with this key in the pool or, failing that, its copy in host memory."""
        return self._by_key.get(key) or self.host.find(key)

    def acquire(self, cached: CachedPage) -> int:
        if cached.num_users == 0:
            self._policy.discard(cached)
            self.num_idle -= 1
        cached.num_users += 1
        self._pages.share(cached.page)
        return cached.page

    def insert(self, key: bytes, page: int, digest: str | None, owner: bytes) -> CachedPage | None:
        """Cache a page that its sequence has filled. Returns None if a page with the same content is already cached.

        `owner` is the isolation key of the sequence.
        """
        if key in self._by_key:
            return None
        cached = self._by_key[key] = CachedPage(self, key, page, digest, owner, num_users=1)
        self._pages.share(page)
        if digest is not None:
            self._by_digest[digest].add(cached)
        return cached

    def restore(self, copy: PageCopy, page: int) -> CachedPage:
        """Fill a page that a sequence has allocated with a copy from host memory, and cache it as `insert` does."""
        self.host.load(copy, page)
        cached = self.insert(copy.key, page, copy.digest, copy.owner)
        assert cached is not None
        return cached

    def release(self, cached: CachedPage) -> None:
        """Undo one `acquire` or the `insert`. The sequence must separately free its hold on the page."""
        assert cached.num_users > 0
        cached.num_users -= 1
        if cached.num_users == 0 and self._by_key.get(cached.key) is cached:
            self._policy.add(cached)
            self.num_idle += 1

    def make_room(self, num_pages: int, num_kept: int = 0) -> bool:
        """Evict cached pages until `num_pages` pages are free. If they cannot be freed without evicting an adapter, or
        if fewer than `num_kept` more pages would be free or idle, evict nothing and return False.
        """
        if self._pages.num_free + self.num_idle < num_pages + num_kept:
            return False
        while not self._pages.can_alloc(num_pages):
            item = self._policy.take(lambda one: not one.has_slot)
            if item is None:
                return False
            item.evict()
        return True

    def evict(self, page: CachedPage) -> None:
        """Remove an idle page from the pool. Its copy in host memory can be restored."""
        self.num_evictions += 1
        self.host.save(page)
        self._forget(page)

    def forget(self, key: bytes) -> None:
        """Remove a page and its copy in host memory, if they are cached. The page becomes free once no sequence uses
        it.
        """
        cached = self._by_key.get(key)
        if cached is not None:
            self._forget(cached)
        self.host.forget(key)

    def purge(self, digest: str) -> None:
        """Remove all pages that depend on an adapter, and their copies in host memory."""
        for cached in list(self._by_digest.get(digest, ())):
            self._forget(cached)
        self.host.purge(digest)

    def purge_owners(self, owners: Set[bytes]) -> None:
        """Remove all pages of some isolation keys, and their copies in host memory."""
        for cached in [one for one in self._by_key.values() if one.owner in owners]:
            self._forget(cached)
        self.host.purge_owners(owners)

    def _forget(self, cached: CachedPage) -> None:
        """Remove a page from the pool's part of the cache."""
        del self._by_key[cached.key]
        if cached.num_users == 0:
            self._policy.discard(cached)
            self.num_idle -= 1
        if cached.digest is not None:
            self._by_digest[cached.digest].discard(cached)
            if not self._by_digest[cached.digest]:
                del self._by_digest[cached.digest]
        self._pages.free([cached.page])


def _tagged(*parts: bytes) -> bytes:
    """Concatenate parts, each with a length prefix, so that different lists never produce the same bytes."""
    return b"".join([len(part).to_bytes(8, "little") + part for part in parts])
