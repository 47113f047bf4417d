"""The pages of running sequences: shared pages from the prefix cache, followed by each sequence's own pages."""

from __future__ import annotations

import sys
from array import array
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import chain, takewhile
from operator import itemgetter

from loramux.engine.pages.eviction import Reclaimer
from loramux.engine.pages.host_pages import AnyPage
from loramux.engine.pages.page_index import PageCopy
from loramux.engine.pages.page_pool import PageOwner, PagePool
from loramux.engine.pages.prefix_cache import PrefixCache
from loramux.engine.pages.state_checkpoints import CopyPage, StateCheckpoints, checkpoint_pages
from loramux.engine.sequences.cache_groups import CacheGroup, CacheLayout
from loramux.engine.sequences.cached_page import CachedPage
from loramux.engine.sequences.disk_wait import NO_WAIT, DiskWait
from loramux.engine.sequences.sequence import PageTable, Sequence, block_list

RUNNING = -1
"""Queue position of running sequences: ahead of all waiting sequences."""

FindPage = Callable[[bytes], AnyPage | None]
"""Finds a page of the prefix cache by its key: `PrefixCache.find` or `find_anywhere`."""


@dataclass(frozen=True, slots=True)
class Prefix:
    """A cached prefix of `num_tokens` tokens: for each group, the pages that later tokens see.

    In a hybrid decoder, `checkpoint` are the pages of the state after these tokens, and K and V of the first
    `num_known` tokens are cached. Pages that are only in host memory get new pages of the pool when a sequence starts
    with the prefix, except those of the checkpoint, which are copied into the state.
    """

    num_tokens: int = 0
    pages: tuple[tuple[AnyPage, ...], ...] = ()
    checkpoint: tuple[AnyPage, ...] = ()
    num_known: int = 0
    num_restored: int = 0
    """Number of tokens by which the pages in host memory extend the prefix."""
    num_declined: int = 0
    """Number of tokens by which they would have extended it, if they are not used because computing is faster."""

    @property
    def num_idle(self) -> int:
        """Number of pages that no sequence uses. They can be evicted until a sequence starts with this prefix."""
        every = chain(*self.pages, self.checkpoint)
        return sum(page.num_users == 0 for page in every if isinstance(page, CachedPage))

    @property
    def copies(self) -> list[PageCopy]:
        """The pages of K and V that are only in host memory."""
        return [page for page in chain(*self.pages) if isinstance(page, PageCopy)]


NO_PREFIX = Prefix()


class KvPages:
    """Allocates pages to sequences, and frees pages of windowed layers once no later token sees them.

    In windowed layers, a sequence gets pages in advance for at most `max_step_tokens` tokens, the maximum of one step.

    In a hybrid decoder, a running sequence also has pages for its state, and a cached prefix is of use only if it ends
    with a checkpoint of the state (`StateCheckpoints`). Pages of K and V are therefore cached when a sequence leaves a
    checkpoint after them. `copy_page` is needed only for hybrid decoders.
    """

    def __init__(
        self,
        pages: PagePool,
        reclaimer: Reclaimer,
        cache: PrefixCache,
        layout: CacheLayout,
        max_step_tokens: int,
        copy_page: CopyPage | None = None,
    ) -> None:
        self._pages = pages
        self._reclaimer = reclaimer
        self._cache = cache
        self._layout = layout
        self._groups = layout.groups
        self._max_step_tokens = max_step_tokens
        self._block_tokens = layout.block_tokens
        self._shared_tokens = layout.shared_tokens
        self._copy_page = copy_page
        self._checkpoints: StateCheckpoints | None = None
        if layout.num_state_pages:
            assert copy_page is not None
            self._checkpoints = StateCheckpoints(pages, cache, layout.num_state_pages, copy_page)
        # Stored rather than computed, because most steps read these values several times.
        self._page_tokens = tuple(group.page_tokens for group in layout.groups)
        self._has_windows = any(group.window is not None for group in layout.groups)

    def find_prefix(self, sequence: Sequence) -> Prefix:
        """Find the longest cached prefix that leaves at least one token to compute, without changing any state.

        Pages in host memory extend the prefix if copying them is faster than computing their tokens. A sequence that
        still needs scores of prompt tokens uses no cached prefix, because the logits of its prompt are needed.
        """
        if sequence.num_unscored or not sequence.shares_prefixes:
            return NO_PREFIX
        longest = self._longest_prefix(sequence, self._cache.find_anywhere)
        num_copies = sum(isinstance(page, PageCopy) for page in chain(*longest.pages, longest.checkpoint))
        if not num_copies:
            return longest
        in_pool = self._in_pool(sequence, longest)
        num_more = longest.num_tokens - in_pool.num_tokens
        if self._cache.host.pays(num_copies, num_more):
            return replace(longest, num_restored=num_more)
        return replace(in_pool, num_declined=num_more)

    def awaits_disk(self, sequence: Sequence, prefix: Prefix) -> bool:
        """True if a waiting sequence should begin later, because pages that extend its prefix are read from disk.

        `prefix` is the one that `find_prefix` has just found, and is still valid if the sequence need not wait. The
        first call starts the reads if they pay. A sequence waits for them at most once, unless it is preempted.
        """
        host = self._cache.host
        if not host.disk.is_on:
            return False
        if sequence.disk_wait is None:
            sequence.disk_wait = self._fetch(sequence, prefix)
            # Pages of `prefix` may have been evicted to make room for those to come.
            return bool(sequence.disk_wait.keys)
        wait = sequence.disk_wait
        if host.disk.is_reading(wait):
            return True
        if wait.keys:
            host.disk.count_decision(max(0, prefix.num_tokens - wait.num_tokens), 0)
            sequence.disk_wait = NO_WAIT
        return False

    def is_reading(self, sequence: Sequence) -> bool:
        """True if a waiting sequence's pages are still being read from disk, and may come in time."""
        return sequence.disk_wait is not None and self._cache.host.disk.is_reading(sequence.disk_wait)

    def _fetch(self, sequence: Sequence, prefix: Prefix) -> DiskWait:
        """Start to read the pages that extend a prefix from disk, if that pays."""
        if sequence.num_unscored or not sequence.shares_prefixes:
            return NO_WAIT
        host = self._cache.host
        awaited = host.disk.awaited()
        on_disk: set[PageCopy] = set()

        def find_page(key: bytes) -> AnyPage | None:
            page = self._cache.find_anywhere(key)
            if page is None and (len(awaited) < host.max_awaited or key in awaited):
                page = host.disk.find(key)
                if page is not None:
                    on_disk.add(page)
            if isinstance(page, PageCopy):
                awaited.add(key)
            return page

        longest = self._longest_prefix(sequence, find_page)
        num_more = longest.num_tokens - prefix.num_tokens
        if not on_disk or num_more <= 0:
            return NO_WAIT
        copies = [page for page in chain(*longest.pages, longest.checkpoint) if isinstance(page, PageCopy)]
        pages = [page for page in copies if page in on_disk]
        return host.fetch(pages, [page for page in copies if page not in on_disk], prefix.num_tokens, num_more)

    def may_have_prefix(self, sequence: Sequence, num_tokens: int) -> bool:
        """False if the longest cached prefix certainly has fewer than `num_tokens` tokens. Looks up one page only."""
        if sequence.num_unscored or not sequence.shares_prefixes:
            return False
        group = self._groups[0]
        if group.window is not None:
            # Pages before the window need not be cached.
            return True
        page = (num_tokens - 1) // group.page_tokens
        if (page + 1) * group.page_tokens >= len(sequence.tokens):
            return False
        if self._find(sequence, 0, page, self._cache.find_anywhere) is not None:
            return True
        disk = self._cache.host.disk
        # Later, the sequence does not wait for the disk again.
        return disk.is_on and sequence.disk_wait is None and self._find(sequence, 0, page, disk.find) is not None

    def computes_most(self, other: Sequence, num_tokens: int, sequence: Sequence, prefix: Prefix) -> bool:
        """True if the next `num_tokens` tokens of another sequence fill pages that at least halve the number of tokens
        that a waiting sequence with this prefix has to compute. False in hybrid decoders, where pages are of use only
        up to a checkpoint.
        """
        own, add = other.add, sequence.add
        if self._checkpoints is not None or (own.isolation_key, own.digest) != (add.isolation_key, add.digest):
            return False
        if sequence.num_unscored or not sequence.shares_prefixes or not other.shares_prefixes or other.is_tainted:
            return False
        page_tokens = self._page_tokens[0]
        page = (prefix.num_tokens + len(sequence.tokens) - 1) // 2 // page_tokens
        begin, end = page * page_tokens, (page + 1) * page_tokens
        if end > min(other.num_computed + num_tokens, len(other.tokens), len(sequence.tokens) - 1):
            return False
        # Keys cover all tokens before, and take time to compute.
        is_same = other.tokens[begin:end] == sequence.tokens[begin:end]
        return is_same and self._key(other, 0, page) == self._key(sequence, 0, page)

    def copy_tokens(self, prefix: Prefix) -> int:
        """The time to copy a prefix's pages back from host memory, as a number of a prompt's tokens."""
        num_copies = sum(isinstance(page, PageCopy) for page in chain(*prefix.pages, prefix.checkpoint))
        return self._cache.host.num_tokens_for(num_copies) if num_copies else 0

    def _in_pool(self, sequence: Sequence, longest: Prefix) -> Prefix:
        """The longest cached prefix in the pool, if the longest one has copies in host memory."""
        if len(self._groups) > 1 or self._has_windows or self._checkpoints is not None:
            return self._longest_prefix(sequence, self._cache.find)
        # Without windows and states, the pages before the first copy are the longest prefix in the pool. A long prompt
        # has hundreds of pages, and may wait for many steps.
        pages = tuple(takewhile(lambda page: isinstance(page, CachedPage), longest.pages[0]))
        return Prefix(len(pages) * self._page_tokens[0], (pages,)) if pages else NO_PREFIX

    def _longest_prefix(self, sequence: Sequence, find_page: FindPage) -> Prefix:
        num_tokens = self._multiple(len(sequence.tokens) - 1)
        found: list[tuple[AnyPage, ...]] = []
        for index in range(len(self._groups)):
            # A group without a window comes first, so that the search through a windowed group is short.
            num_tokens, pages = self._longest(sequence, index, num_tokens, find_page)
            found.append(pages)
        if not num_tokens:
            return NO_PREFIX
        if self._checkpoints is not None:
            return self._up_to_checkpoint(self._checkpoints, found[0], find_page)
        return Prefix(
            num_tokens,
            tuple(
                pages[: num_tokens // group.page_tokens] if group.window is None else pages
                for group, pages in zip(self._groups, found, strict=True)
            ),
        )

    def _up_to_checkpoint(
        self, checkpoints: StateCheckpoints, pages: tuple[AnyPage, ...], find_page: FindPage
    ) -> Prefix:
        """The longest part of these pages of K and V that ends with a checkpoint."""
        num_known = self._shared_tokens * len(pages)
        for count in range(len(pages), 0, -1):
            checkpoint = checkpoints.find(pages[count - 1].key, find_page)
            if checkpoint:
                return Prefix(self._shared_tokens * count, (pages[:count],), checkpoint, num_known)
        return Prefix(num_known=num_known)

    def _longest(
        self, sequence: Sequence, group: int, num_tokens: int, find_page: FindPage
    ) -> tuple[int, tuple[AnyPage, ...]]:
        """Find the longest prefix of up to `num_tokens` tokens that is cached in one group, and its pages."""
        own = self._groups[group]
        if own.window is None:
            pages: list[AnyPage] = []
            while len(pages) < num_tokens // own.page_tokens:
                cached = self._find(sequence, group, len(pages), find_page)
                if cached is None:
                    break
                pages.append(cached)
            return self._multiple(len(pages) * own.page_tokens), tuple(pages)
        # Search from the end, because only the pages in the last window are needed. After a missing page, continue with
        # the prefix before it, so that each page is looked up once.
        while num_tokens:
            first, last = own.first_seen(num_tokens) // own.page_tokens, num_tokens // own.page_tokens
            pages = []
            while len(pages) < last - first:
                cached = self._find(sequence, group, last - 1 - len(pages), find_page)
                if cached is None:
                    break
                pages.append(cached)
            if len(pages) == last - first:
                return num_tokens, tuple(reversed(pages))
            num_tokens = self._multiple((last - 1 - len(pages)) * own.page_tokens)
        return 0, ()

    def num_pages_to_begin(self, prefix: Prefix, num_tokens: int) -> int:
        """Number of free or evictable pages needed to start a sequence with a cached prefix and `num_tokens` more
        tokens.
        """
        num_pages = prefix.num_idle + len(prefix.copies) + self._layout.num_state_pages
        for group in self._groups:
            end = self._end(group, prefix.num_tokens, num_tokens)
            num_pages += -(-end // group.page_tokens) - prefix.num_tokens // group.page_tokens
        return num_pages

    def num_pages(self, sequence: Sequence) -> int:
        """Number of pages that a sequence holds, including those that it shares."""
        tables = zip(sequence.tables, self._groups, strict=True)
        return sum(len(table.blocks) // group.num_blocks for table, group in tables) + len(sequence.state_pages)

    def attach(self, sequence: Sequence, prefix: Prefix, position: int = RUNNING) -> None:
        """Start the sequence with the prefix that `find_prefix` has just found. There must be room for it at this queue
        position.

        The first `grow` must be followed by `restore_state`.
        """
        assert not any(table.blocks for table in sequence.tables)
        assert not sequence.num_in_flight
        for page in chain(*prefix.pages):
            if isinstance(page, CachedPage):
                self._cache.acquire(page)
        if self._checkpoints is not None:
            self._checkpoints.acquire(prefix.checkpoint)
            sequence.checkpoints = self._planned_checkpoints(sequence, prefix)
            sequence.used_checkpoints = [prefix.pages[0][-1].key] if prefix.checkpoint else []
        restored = self._restore(prefix.copies, position)
        sequence.tables = [PageTable() for _ in self._groups]
        for table, group, pages in zip(sequence.tables, self._groups, prefix.pages, strict=bool(prefix.pages)):
            first_page = prefix.num_tokens // group.page_tokens - len(pages)
            table.first_block = first_page * group.num_blocks
            for page in pages:
                cached = restored[page] if isinstance(page, PageCopy) else page
                table.blocks.extend(self._layout.blocks(group, cached.page))
                table.cached.append(cached)
        sequence.num_computed = sequence.num_room = prefix.num_tokens
        sequence.next_offer = 0
        self._cache.host.count_decision(prefix.num_restored, prefix.num_declined)

    def _restore(self, copies: list[PageCopy], position: int) -> dict[PageCopy, CachedPage]:
        """Copy pages back from host memory into new pages of the pool. Pages of the same prefix that are in the pool
        must be in use, so that they are not evicted to make room.
        """
        if not copies:
            return {}
        host = self._cache.host
        for copy in copies:
            # The pages that are evicted to make room may need slots in host memory.
            host.hold(copy)
        has_room = self._reclaimer.make_room(len(copies), position)
        assert has_room
        pages = self._pages.alloc(len(copies), PageOwner.KV)
        restored = {copy: self._cache.restore(copy, page) for copy, page in zip(copies, pages, strict=True)}
        # The end of a prefix is evicted before its beginning.
        for copy in reversed(copies):
            host.put_back(copy)
        return restored

    def restore_state(self, sequence: Sequence, prefix: Prefix) -> None:
        """Copy the state after the prefix into the pages that the sequence has got since `attach`."""
        if self._checkpoints is not None and prefix.checkpoint:
            self._checkpoints.restore(prefix.checkpoint, sequence.state_pages)

    def max_tokens(self, num_other_pages: int) -> int:
        """Longest sequence, in tokens, that fits into the pool if other owners take `num_other_pages` pages."""
        return self._layout.max_tokens(self._pages.num_pages - num_other_pages, self._max_step_tokens)

    @property
    def num_groups(self) -> int:
        """Number of groups of layers. Each may need a page for a sequence's next token."""
        return len(self._groups)

    def grow(self, sequence: Sequence, num_tokens: int, position: int = RUNNING, num_kept: int | None = None) -> bool:
        """Allocate pages for `num_tokens` more tokens. Returns False if there is no room for this queue position.

        In windowed layers, pages for tokens beyond the next step are allocated later. With `num_kept`, only free pages
        and those of cached prefixes are used, and that many stay free or idle.
        """
        end = sequence.num_computed + num_tokens
        if end <= sequence.num_room:
            return True
        needed: list[int] = []
        for group, table, page_tokens in zip(self._groups, sequence.tables, self._page_tokens, strict=True):
            last = end if group.window is None else self._end(group, sequence.num_computed, num_tokens)
            num_pages = (table.first_block + len(table.blocks)) // group.num_blocks
            needed.append(max(0, -(-last // page_tokens) - num_pages))
        needed_by_state = self._layout.num_state_pages - len(sequence.state_pages)
        if num_kept is not None and not self._cache.make_room(sum(needed), num_kept):
            return False
        if not self._reclaimer.make_room(sum(needed) + needed_by_state, position):
            return False
        if needed_by_state:
            sequence.state_pages = block_list(self._pages.alloc(needed_by_state, PageOwner.KV))
        for group, table, count in zip(self._groups, sequence.tables, needed, strict=True):
            pages = self._pages.alloc(count, PageOwner.KV)
            if group.page_step == 1:
                table.blocks.extend(pages)
            else:
                for page in pages:
                    table.blocks.extend(self._layout.blocks(group, page))
        sequence.num_room = min([table.end_block for table in sequence.tables]) * self._block_tokens
        return True

    def forget_last(self, sequence: Sequence) -> bool:
        """Have the next step compute the last token again, with the same K and V. Returns False if that is impossible,
        because its page is cached, pages that it sees may be freed, or the state of a hybrid decoder has changed.
        """
        if self._has_windows or self._checkpoints is not None:
            return False
        tables = zip(sequence.tables, self._page_tokens, strict=True)
        if any(sequence.num_computed <= len(table.cached) * page_tokens for table, page_tokens in tables):
            return False
        sequence.num_computed -= 1
        return True

    def save_state(self, sequence: Sequence) -> bool:
        """Copy a hybrid decoder's state before a step with drafts. Cached prefixes are evicted if necessary, but no
        adapter is. Returns False if there is no room.
        """
        num_pages = self._layout.num_state_pages
        if self._checkpoints is None:
            return True
        # Only a prompt leaves checkpoints, so none contains the state after rows that may be rejected.
        assert not sequence.checkpoints
        if not self._cache.make_room(num_pages):
            return False
        assert self._copy_page is not None
        sequence.saved_state = block_list(self._pages.alloc(num_pages, PageOwner.KV))
        for source, target in zip(sequence.state_pages, sequence.saved_state, strict=True):
            self._copy_page(source, target)
        return True

    def settle_state(self, sequence: Sequence, *, has_rejected: bool) -> None:
        """Free the copy of `save_state`. With `has_rejected`, the copy becomes the state, which lacks the rows of the
        step, and the state with rejected positions is freed.
        """
        if has_rejected:
            sequence.state_pages, sequence.saved_state = sequence.saved_state, sequence.state_pages
        self._pages.free(sequence.saved_state)
        sequence.saved_state = block_list()

    def offer(self, sequence: Sequence) -> None:
        """Add to the prefix cache the pages that this sequence has filled since the last call. Free the pages that no
        later token sees.

        Both can happen as soon as the step that fills a page, or reads it last, has been submitted, because only later
        steps read or write the page again.
        """
        num_known = min(sequence.num_computed, len(sequence.tokens))
        if num_known < sequence.next_offer:
            return
        if self._checkpoints is not None:
            self._leave_checkpoint(sequence, self._checkpoints)
            return
        offers = sequence.shares_prefixes and not sequence.is_tainted
        if not offers and not self._has_windows:
            sequence.next_offer = sys.maxsize
            return
        if offers:
            for index in range(len(self._groups)):
                self._offer(sequence, index, num_known)
        if self._has_windows:
            for group, table in zip(self._groups, sequence.tables, strict=True):
                if group.window is not None:
                    self._free_unseen(table, group, num_known)
            sequence.next_offer = num_known - num_known % self._block_tokens + self._block_tokens
        else:
            sequence.next_offer = (len(sequence.tables[0].cached) + 1) * self._page_tokens[0]

    def detach(self, sequence: Sequence) -> None:
        """Free all pages. Cached pages stay available to other sequences. Pages at the end of a prefix are evicted
        first, and before the checkpoints that the sequence started from or left.
        """
        for cached in self._cached_from_the_end(sequence):
            if cached is not None:
                self._cache.release(cached)
        if self._checkpoints is not None:
            # Otherwise, a checkpoint would be evicted long before K and V, which are of no use without it.
            for key in reversed(sequence.used_checkpoints):
                self._checkpoints.touch(key)
        for group, table in zip(self._groups, sequence.tables, strict=True):
            self._pages.free(self._pages_of(table.blocks, group))
        self._pages.free([*sequence.state_pages, *sequence.saved_state])
        sequence.state_pages, sequence.saved_state = block_list(), block_list()
        sequence.checkpoints = []
        sequence.used_checkpoints = []
        sequence.tables = [PageTable() for _ in self._groups]
        sequence.num_computed = sequence.num_room = 0

    def _planned_checkpoints(self, sequence: Sequence, prefix: Prefix) -> list[int]:
        """The positions at which a sequence that starts with this prefix leaves checkpoints, in ascending order."""
        if not sequence.shares_prefixes:
            return []
        first, end, num_known, num_base = (
            num_tokens // self._shared_tokens
            for num_tokens in (prefix.num_tokens, len(sequence.tokens) - 1, prefix.num_known, sequence.activation)
        )
        return [page * self._shared_tokens for page in checkpoint_pages(first, end, num_known, num_base)]

    def _leave_checkpoint(self, sequence: Sequence, checkpoints: StateCheckpoints) -> None:
        """Cache the state of a sequence that has reached its next checkpoint, and its pages of K and V before it."""
        planned = sequence.checkpoints
        if planned and planned[0] == sequence.num_computed:
            page = planned.pop(0) // self._shared_tokens - 1
            last_block = (page + 1) * self._groups[0].num_blocks - 1
            key, digest = self._key(sequence, 0, page), self._digest(sequence, last_block)
            owner, state_pages = sequence.add.isolation_key, sequence.state_pages
            if key is not None and not sequence.is_tainted and checkpoints.save(key, digest, owner, state_pages):
                sequence.used_checkpoints.append(key)
                self._offer(sequence, 0, sequence.num_computed)
        sequence.next_offer = planned[0] if planned else sys.maxsize

    def _cached_from_the_end(self, sequence: Sequence) -> list[CachedPage | None]:
        """The sequence's prefix-cache entries of all groups, by the position of their tokens, last first."""
        if len(self._groups) == 1:
            return sequence.tables[0].cached[::-1]
        found: list[tuple[int, CachedPage | None]] = []
        for group, table in zip(self._groups, sequence.tables, strict=True):
            first = table.first_block // group.num_blocks
            found += [(index * group.page_tokens, cached) for index, cached in enumerate(table.cached, first)]
        return [cached for _, cached in sorted(found, key=itemgetter(0), reverse=True)]

    def disown(self, sequence: Sequence) -> None:
        """Remove from the prefix cache the pages of a sequence that produced non-finite values, including pages that
        the sequence has freed.
        """
        for index, group in enumerate(self._groups):
            for page in range(len(sequence.page_keys) // group.num_blocks):
                key = self._key(sequence, index, page)
                if key is None:
                    continue
                self._cache.forget(key)
                if self._checkpoints is not None:
                    self._checkpoints.forget(key)

    def _end(self, group: CacheGroup, num_computed: int, num_tokens: int) -> int:
        """End of the tokens that need pages now if `num_tokens` tokens follow the first `num_computed`."""
        return num_computed + (num_tokens if group.window is None else min(num_tokens, self._max_step_tokens))

    def _multiple(self, num_tokens: int) -> int:
        """`num_tokens`, rounded down to the length of a prefix that can be shared."""
        return num_tokens - num_tokens % self._shared_tokens

    def _pages_of(self, blocks: array[int], group: CacheGroup) -> list[int]:
        step = group.page_step
        return blocks.tolist() if step == 1 else [block // step for block in blocks[:: group.num_blocks]]

    def _offer(self, sequence: Sequence, group: int, num_known: int) -> None:
        table, num_blocks = sequence.tables[group], self._groups[group].num_blocks
        page_step = self._groups[group].page_step
        first = table.first_block // num_blocks
        for page in range(first + len(table.cached), num_known // self._page_tokens[group]):
            key = self._key(sequence, group, page)
            if key is None:
                return
            block = table.blocks[(page - first) * num_blocks]
            digest = self._digest(sequence, (page + 1) * num_blocks - 1)
            table.cached.append(self._cache.insert(key, block // page_step, digest, sequence.add.isolation_key))

    def _free_unseen(self, table: PageTable, group: CacheGroup, num_known: int) -> None:
        """Free the pages that no later token sees, except the pages that the first token after the longest shareable
        prefix sees.
        """
        first = table.first_block // group.num_blocks
        count = group.first_seen(self._multiple(num_known)) // group.page_tokens - first
        if count <= 0:
            return
        for cached in table.cached[:count]:
            if cached is not None:
                self._cache.release(cached)
        num_blocks = count * group.num_blocks
        self._pages.free(self._pages_of(table.blocks[:num_blocks], group))
        del table.cached[:count], table.blocks[:num_blocks]
        table.first_block += num_blocks

    def _find(self, sequence: Sequence, group: int, page: int, find_page: FindPage) -> AnyPage | None:
        key = self._key(sequence, group, page)
        return None if key is None else find_page(key)

    def _key(self, sequence: Sequence, group: int, page: int) -> bytes | None:
        """Key of a page in one group, or None without an isolation key. All tokens of the page must be known."""
        block = (page + 1) * self._groups[group].num_blocks - 1
        keys = sequence.page_keys
        while len(keys) <= block:
            parent = keys[-1] if keys else self._cache.root(sequence.add.isolation_key)
            if parent is None:
                return None
            begin = len(keys) * self._block_tokens
            tokens = sequence.tokens[begin : begin + self._block_tokens]
            digest = self._digest(sequence, len(keys))
            num_base_tokens = 0 if digest is None else max(0, sequence.activation - begin)
            keys.append(self._cache.page_key(parent, digest, tokens, num_base_tokens))
        # Keys of all groups except the first have a suffix, so keys of different groups are never equal.
        return keys[block] + group.to_bytes(1, "little") if group else keys[block]

    def _digest(self, sequence: Sequence, block: int) -> str | None:
        """Digest of the adapter that applies to tokens of the block, or None."""
        is_base = (block + 1) * self._block_tokens <= sequence.activation
        return None if is_base else sequence.add.digest
