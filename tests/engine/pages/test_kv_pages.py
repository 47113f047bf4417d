from __future__ import annotations

import pytest

from loramux.engine.pages.eviction import LeastRecentlyUsed, Reclaimer
from loramux.engine.pages.kv_pages import NO_PREFIX, KvPages
from loramux.engine.pages.page_pool import PageOwner, PagePool
from loramux.engine.pages.prefix_cache import PrefixCache
from loramux.engine.protocol.messages import Add
from loramux.engine.sequences.cache_groups import cache_layout
from loramux.engine.sequences.sequence import Sequence
from tests.engine.simulated_engine import GREEDY, Simulate, stats_of

PAGE_TOKENS = 4
STEP_TOKENS = 8
OWNER = b"owner"
TOKENS = tuple(range(100, 120))


class Bench:
    """`compute` simulates the steps that fill the pages. A step runs up to STEP_TOKENS tokens of a sequence."""

    def __init__(self, num_pages: int = 8, windows: tuple[int | None, ...] = (None,)) -> None:
        self.pages = PagePool(num_pages)
        reclaimer = Reclaimer(self.pages, LeastRecentlyUsed())
        self.cache = PrefixCache(self.pages, reclaimer.policy, PAGE_TOKENS)
        self.kv = KvPages(self.pages, reclaimer, self.cache, cache_layout(windows, 64, PAGE_TOKENS), STEP_TOKENS)

    def sequence(self, num_prompt: int, isolation_key: bytes = OWNER) -> Sequence:
        add = Add(
            sequence_id="s", prompt=TOKENS[:num_prompt], max_tokens=4, sampling=GREEDY, isolation_key=isolation_key
        )
        return Sequence(add=add, owner=b"gateway", arrival=0, seed=0)

    def compute(self, sequence: Sequence, num_tokens: int) -> None:
        while num_tokens:
            chunk = min(num_tokens, STEP_TOKENS)
            assert self.kv.grow(sequence, chunk)
            sequence.num_computed += chunk
            num_tokens -= chunk
            self.kv.offer(sequence)

    def begin(self, num_prompt: int, isolation_key: bytes = OWNER) -> Sequence:
        sequence = self.sequence(num_prompt, isolation_key)
        self.kv.attach(sequence, self.kv.find_prefix(sequence))
        self.compute(sequence, num_prompt - sequence.num_computed)
        return sequence


def blocks_of(sequence: Sequence) -> list[int]:
    [table] = sequence.tables
    return table.blocks.tolist()


@pytest.mark.parametrize(("num_tokens", "num_pages"), [(1, 1), (4, 1), (5, 2), (12, 3)])
def test_sequence_grows_by_the_fewest_pages(num_tokens: int, num_pages: int) -> None:
    bench = Bench()
    sequence = bench.sequence(20)
    assert bench.kv.grow(sequence, num_tokens)
    assert (len(blocks_of(sequence)), sequence.num_room) == (num_pages, num_pages * PAGE_TOKENS)
    assert bench.pages.num_owned(PageOwner.KV) == num_pages


def test_last_page_is_filled_before_another_is_allocated() -> None:
    bench = Bench(num_pages=2)
    sequence = bench.begin(5)
    for _ in range(3):
        bench.compute(sequence, 1)
    assert (len(blocks_of(sequence)), bench.pages.num_free) == (2, 0)
    assert not bench.kv.grow(sequence, 1)


def test_failed_growth_allocates_nothing() -> None:
    bench = Bench(num_pages=3)
    bench.begin(8)
    refused = bench.sequence(8, b"another")
    assert not bench.kv.grow(refused, 8)
    assert (len(blocks_of(refused)), refused.num_room, bench.pages.num_free) == (0, 0, 1)


def test_growth_evicts_unused_prefixes() -> None:
    bench = Bench(num_pages=3)
    bench.kv.detach(bench.begin(8))
    assert (len(bench.cache), bench.pages.num_free) == (2, 1)
    assert bench.kv.grow(bench.sequence(12, b"another"), 12)
    assert (len(bench.cache), bench.cache.num_evictions, bench.pages.num_free) == (0, 2, 0)


def test_the_end_of_a_prefix_is_evicted_before_its_beginning() -> None:
    bench = Bench(num_pages=3)
    bench.kv.detach(bench.begin(12))
    assert bench.kv.grow(bench.sequence(4, b"another"), 4)
    assert [cached.page for cached in bench.kv.find_prefix(bench.sequence(13)).pages[0]] == [0, 1]


def test_finished_sequence_returns_all_but_cached_pages() -> None:
    bench = Bench()
    sequence = bench.begin(10)
    assert bench.pages.num_free == 5
    bench.kv.detach(sequence)
    assert (len(blocks_of(sequence)), sequence.num_computed, sequence.num_room) == (0, 0, 0)
    # The third page was not full, so no other sequence can reuse it.
    assert (bench.pages.num_free, bench.cache.num_idle) == (6, 2)
    bench.pages.check_integrity()


def test_sequence_starts_with_another_sequences_pages() -> None:
    bench = Bench()
    first = bench.begin(10)
    second = bench.sequence(11)
    bench.kv.attach(second, bench.kv.find_prefix(second))
    assert blocks_of(second) == blocks_of(first)[:2]
    assert second.num_computed == second.num_room == 8
    bench.kv.detach(first)
    assert all(cached.num_users == 1 for cached in bench.kv.find_prefix(second).pages[0]), "one of two users remains"
    bench.pages.check_integrity()


@pytest.mark.parametrize(("num_prompt", "num_pages"), [(3, 0), (4, 0), (5, 1), (8, 1), (9, 2)])
def test_a_prefix_leaves_at_least_one_token_to_compute(num_prompt: int, num_pages: int) -> None:
    bench = Bench()
    bench.begin(12)
    prefix = bench.kv.find_prefix(bench.sequence(num_prompt))
    assert sum(map(len, prefix.pages)) == num_pages
    assert prefix.num_tokens == num_pages * PAGE_TOKENS < num_prompt


@pytest.mark.parametrize("isolation_key", [b"another", b""], ids=["another owner", "no key"])
def test_prefix_is_found_only_by_its_owner(isolation_key: bytes) -> None:
    bench = Bench()
    bench.begin(12)
    assert bench.kv.find_prefix(bench.sequence(12, isolation_key)) == NO_PREFIX


def test_only_full_pages_are_offered() -> None:
    bench = Bench()
    sequence = bench.sequence(9)
    for num_tokens, num_offered in [(3, 0), (1, 1), (3, 1), (1, 2)]:
        bench.compute(sequence, num_tokens)
        assert len(bench.cache) == num_offered


def test_possibly_broken_sequence_offers_nothing() -> None:
    bench = Bench()
    sequence = bench.sequence(12)
    sequence.is_tainted = True
    bench.compute(sequence, 12)
    assert len(bench.cache) == 0


def test_prefixes_of_a_broken_sequence_are_forgotten() -> None:
    bench = Bench()
    sequence = bench.begin(12)
    bench.kv.disown(sequence)
    assert bench.kv.find_prefix(bench.sequence(12)) == NO_PREFIX
    bench.kv.detach(sequence)
    assert bench.pages.num_free == 8


def test_unused_prefix_counts_towards_the_pages_to_begin() -> None:
    """The prefix's pages stay evictable until the sequence uses them."""
    bench = Bench()
    first = bench.begin(8)
    prefix = bench.kv.find_prefix(bench.sequence(12))
    assert bench.kv.num_pages_to_begin(prefix, 4) == 1
    bench.kv.detach(first)
    assert bench.kv.num_pages_to_begin(prefix, 4) == 3


def test_max_tokens_excludes_other_pages() -> None:
    assert [Bench(num_pages=8).kv.max_tokens(num_other_pages) for num_other_pages in (0, 3, 8)] == [32, 20, 0]


def test_idle_adapters_pages_are_reused_for_kv(simulate: Simulate) -> None:
    simulation = simulate(num_pages=10, adapters={"a": 5, "b": 4})
    for digest in ("a", "b"):
        simulation.add(digest, digest=digest, max_tokens=1)
        simulation.run()
    assert stats_of(simulation).num_adapter_pages == 9
    add = simulation.add("base", num_prompt=60, max_tokens=20)
    simulation.run()
    assert simulation.tokens["base"] == simulation.expected(add)
    assert stats_of(simulation).num_adapter_evictions == 1


@pytest.mark.parametrize("windows", [(None,), (None, 8), (8,)])
def test_one_page_shows_that_no_prefix_is_long_enough(windows: tuple[int | None, ...]) -> None:
    bench = Bench(num_pages=24, windows=windows)
    for num_cached in (0, 5, 12):
        if num_cached:
            bench.kv.detach(bench.begin(num_cached))
        for num_prompt in (1, 4, 5, 12, 13, 20):
            sequence = bench.sequence(num_prompt)
            num_found = bench.kv.find_prefix(sequence).num_tokens
            assert all(bench.kv.may_have_prefix(sequence, count) for count in range(1, num_found + 1))
            if windows[0] is None:
                assert not any(bench.kv.may_have_prefix(sequence, count) for count in range(13, num_prompt))
    assert not bench.kv.may_have_prefix(bench.sequence(20, isolation_key=b""), 1)
