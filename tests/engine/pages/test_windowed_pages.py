"""Sequences of windowed layers free pages that no later token sees, and find prefixes by the remaining pages."""

from __future__ import annotations

import pytest

from loramux.engine.pages.kv_pages import NO_PREFIX
from loramux.engine.pages.page_pool import PageOwner
from loramux.engine.sequences.sequence import Sequence
from tests.engine.pages.test_kv_pages import STEP_TOKENS, Bench
from tests.engine.simulated_engine import Simulate, stats_of

SLIDING = (6, 6)
MIXED = (6, 6, None, 6)
"""Pages hold 4 tokens of the three windowed layers, or 16 of the other layer."""


def first_tokens(sequence: Sequence) -> list[int]:
    """The first token whose K and V the sequence keeps, in each group of layers."""
    return [table.first_block * 4 for table in sequence.tables]


def generate(bench: Bench, sequence: Sequence, num_tokens: int) -> None:
    for _ in range(num_tokens):
        sequence.tokens.append(7)
        sequence.num_tokens += 1
        bench.compute(sequence, 1)


@pytest.mark.parametrize("isolation_key", [b"owner", b""], ids=["cached", "not cached"])
def test_a_sequence_of_sliding_layers_holds_constant_memory(isolation_key: bytes) -> None:
    bench = Bench(num_pages=6, windows=SLIDING)
    sequence = bench.begin(8, isolation_key)
    for num_tokens in range(9, 200):
        generate(bench, sequence, 1)
        # The next token sees 5 earlier tokens. A prefix to share may end up to 3 tokens earlier.
        assert first_tokens(sequence) == [(num_tokens - num_tokens % 4 - 5) // 4 * 4]
        assert len(sequence.tables[0].blocks) <= 4
    bench.kv.detach(sequence)
    assert bench.pages.num_free + bench.cache.num_idle == 6
    bench.pages.check_integrity()


def test_only_layers_without_a_window_grow() -> None:
    bench = Bench(num_pages=64, windows=MIXED)
    sequence = bench.begin(20, b"")
    generate(bench, sequence, 140)
    whole, windowed = sequence.tables
    assert (whole.first_block, len(whole.blocks)) == (0, 160 // 4)
    assert len(windowed.blocks) <= (6 + 16) // 4 + 1
    assert bench.pages.num_owned(PageOwner.KV) == 160 // 16 + len(windowed.blocks)


def test_a_prefix_needs_only_the_pages_that_the_next_token_sees() -> None:
    bench = Bench(num_pages=8, windows=SLIDING)
    first = bench.begin(20)
    bench.kv.detach(first)
    # The oldest pages are evicted first, because they were freed first.
    assert bench.kv.grow(bench.sequence(12, b"another"), 20 - 4)
    prefix = bench.kv.find_prefix(bench.sequence(20))
    assert (prefix.num_tokens, len(prefix.pages[0])) == (16, 2)
    second = bench.sequence(20)
    bench.kv.attach(second, prefix)
    assert (second.num_computed, first_tokens(second)) == (16, [8])
    bench.compute(second, 4)
    bench.pages.check_integrity()


def test_a_missing_page_shortens_the_prefix_to_the_part_before_it() -> None:
    bench = Bench(num_pages=8, windows=SLIDING)
    first = bench.begin(20)
    pages = bench.kv.find_prefix(bench.sequence(20)).pages[0]
    bench.kv.detach(first)
    bench.cache.forget(pages[-1].key)
    assert bench.kv.find_prefix(bench.sequence(20)).num_tokens == 12
    bench.cache.forget(bench.kv.find_prefix(bench.sequence(13)).pages[0][0].key)
    # The second page is missing, so only the first page has everything that the next token sees.
    assert bench.kv.find_prefix(bench.sequence(20)).num_tokens == 4


def test_a_prefix_of_mixed_layers_fills_pages_of_both_groups() -> None:
    bench = Bench(num_pages=16, windows=MIXED)
    bench.kv.detach(bench.begin(20))
    assert bench.kv.find_prefix(bench.sequence(16)) == NO_PREFIX, "a token is left to compute"
    prefix = bench.kv.find_prefix(bench.sequence(20))
    # The token at position 16 sees [11, 16].
    assert (prefix.num_tokens, [len(pages) for pages in prefix.pages]) == (16, [1, 2])
    sequence = bench.sequence(20)
    assert bench.kv.num_pages_to_begin(prefix, 4) == 3 + 1 + 1
    bench.kv.attach(sequence, prefix)
    assert first_tokens(sequence) == [0, 8]
    bench.compute(sequence, 4)
    assert bench.pages.num_owned(PageOwner.KV) == len(bench.cache) + 2
    bench.cache.forget(prefix.pages[1][0].key)
    assert bench.kv.find_prefix(bench.sequence(20)) == NO_PREFIX


def test_pages_that_a_broken_sequence_has_freed_are_forgotten_too() -> None:
    bench = Bench(num_pages=16, windows=SLIDING)
    sequence = bench.begin(20)
    assert first_tokens(sequence) == [12]
    bench.kv.disown(sequence)
    bench.kv.detach(sequence)
    assert len(bench.cache) == 0
    assert bench.pages.num_free == 16


def test_pages_ahead_are_allocated_for_one_step_only() -> None:
    bench = Bench(num_pages=16, windows=SLIDING)
    sequence = bench.sequence(20, b"")
    assert bench.kv.num_pages_to_begin(NO_PREFIX, 20) == 2
    assert bench.kv.grow(sequence, 20)
    assert (len(sequence.tables[0].blocks), sequence.num_room) == (2, STEP_TOKENS)


@pytest.mark.parametrize(("num_pages", "num_tokens"), [(5, 20), (6, 1 << 62)])
def test_a_pool_for_one_window_has_room_for_any_sequence(num_pages: int, num_tokens: int) -> None:
    assert Bench(num_pages, SLIDING).kv.max_tokens(0) == num_tokens


@pytest.mark.parametrize("windows", [(20, 20), (20, None)], ids=["sliding", "mixed"])
def test_requests_longer_than_the_pool_run(simulate: Simulate, windows: tuple[int | None, ...]) -> None:
    """Without windows, the requests would need 32 pages each."""
    simulation = simulate(num_pages=24, max_batch_tokens=32, max_sequences=2, windows=windows)
    adds = [simulation.add(name, 300, 200) for name in ("one", "two")]
    simulation.run()
    for add in adds:
        assert simulation.tokens[add.sequence_id] == simulation.expected(add)
    assert stats_of(simulation).num_preemptions == (0 if windows[1] else stats_of(simulation).num_preemptions)


def test_a_follow_up_request_finds_its_prefix(simulate: Simulate) -> None:
    simulation = simulate(windows=(20, None, 20))
    first = simulation.make_add("a", tuple(range(200)), 40, isolation_key=b"x")
    simulation.engine.add(b"gateway", first)
    simulation.run()
    answer = tuple(simulation.tokens["a"])
    second = simulation.make_add("b", (*first.prompt, *answer, 5, 6, 7), 40, isolation_key=b"x")
    simulation.engine.add(b"gateway", second)
    simulation.run()
    assert simulation.tokens["b"] == simulation.expected(second)
    assert simulation.finished["b"].cached_tokens == 192
