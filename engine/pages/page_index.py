"""Copies of pages of the prefix cache by key: the index of a tier behind the pool."""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

MAX_SHARE = 2
"""In a full tier, an owner of `1 / MAX_SHARE` of the slots or more replaces only its own pages. All other owners
together therefore keep the rest, however many pages one owner fills.
"""


@dataclass(slots=True, eq=False)
class PageCopy:
    """A copy of a page of the prefix cache, with the same key, in a slot of a tier."""

    key: bytes
    slot: int
    digest: str | None
    owner: bytes


class PageIndex:
    """Copies by key, least recently used first. The tier decides what happens to their slots.

    The keys are those of the prefix cache, so a copy depends on the same isolation key, adapter, format and tokens as
    its page.
    """

    def __init__(self, num_slots: int) -> None:
        self.num_slots = num_slots
        # Both orders are the order of use. The second finds an owner's oldest page without a scan over other owners'.
        self._by_key: OrderedDict[bytes, PageCopy] = OrderedDict()
        self._by_owner: defaultdict[bytes, OrderedDict[bytes, PageCopy]] = defaultdict(OrderedDict)
        self._by_digest: defaultdict[str, set[bytes]] = defaultdict(set)

    def __len__(self) -> int:
        return len(self._by_key)

    def __iter__(self) -> Iterator[PageCopy]:
        return iter(self._by_key.values())

    def find(self, key: bytes) -> PageCopy | None:
        return self._by_key.get(key)

    def add(self, page: PageCopy) -> None:
        """Add a page, which counts as just used."""
        assert page.key not in self._by_key
        self._by_key[page.key] = page
        self._by_owner[page.owner][page.key] = page
        if page.digest is not None:
            self._by_digest[page.digest].add(page.key)

    def touch(self, page: PageCopy) -> None:
        """Record that a page has been used until now."""
        self._by_key.move_to_end(page.key)
        self._by_owner[page.owner].move_to_end(page.key)

    def remove(self, page: PageCopy) -> None:
        assert self._by_key[page.key] is page
        del self._by_key[page.key]
        own = self._by_owner[page.owner]
        del own[page.key]
        if not own:
            del self._by_owner[page.owner]
        if page.digest is not None:
            keys = self._by_digest[page.digest]
            keys.remove(page.key)
            if not keys:
                del self._by_digest[page.digest]

    def oldest_for(self, owner: bytes) -> PageCopy | None:
        """The page that a new page of this owner replaces, or None if there are no pages."""
        own = self._by_owner.get(owner)
        is_large = own is not None and MAX_SHARE * len(own) >= self.num_slots
        pages = own if own is not None and is_large else self._by_key
        return next(iter(pages.values()), None)

    def with_digest(self, digest: str) -> list[PageCopy]:
        """All pages that depend on an adapter."""
        return [self._by_key[key] for key in self._by_digest.get(digest, ())]

    def of_owners(self, owners: Iterable[bytes]) -> list[PageCopy]:
        """All pages of some owners."""
        return [page for owner in owners for page in self._by_owner.get(owner, {}).values()]

    def check_integrity(self) -> None:
        """Assert that the pages are listed alike everywhere, and that no two have the same slot."""
        assert sum(map(len, self._by_owner.values())) == len(self._by_key)
        with_digest = [page.key for page in self if page.digest is not None]
        assert {key for keys in self._by_digest.values() for key in keys} == set(with_digest)
        assert len({page.slot for page in self}) == len(self)
