from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from loramux.engine.loop.decode_reads import ReadsPerStep
from loramux.engine.protocol.messages import Add, SamplingParams
from loramux.engine.sequences.batch import ScheduledSequence
from loramux.engine.sequences.cache_groups import CacheGroup, CacheLayout
from loramux.engine.sequences.sequence import Sequence
from tests.engine.simulated_engine import Simulate, stats_of

PAGE_BYTES = 1600
ONE_GROUP = CacheLayout(2, (CacheGroup((0, 1), None),))
STEP_S = 0.25


def reads(**options: Any) -> ReadsPerStep:
    fields = {
        "weight_bytes": 10_000, "expert_bytes": 0, "num_experts": 1, "top_k": 1, "page_bytes": PAGE_BYTES,
        "cache": ONE_GROUP, "bandwidth": 100_000.0,
    }  # fmt: skip
    return ReadsPerStep(**(fields | options))


def item(context: int, num_tokens: int = 1, slot: int = -1, pages: int = 0) -> ScheduledSequence:
    add = Add(sequence_id="s", prompt=(0,) * (context + 1), max_tokens=1, sampling=SamplingParams())
    sequence = Sequence(add=add, owner=b"", arrival=0, seed=0, slot=slot, num_computed=context)
    sequence.num_adapter_pages = pages
    return ScheduledSequence(sequence, num_tokens)


def test_a_decode_reads_weights_contexts_and_each_adapter_once() -> None:
    step = [item(31), item(7, slot=3, pages=2), item(0, slot=3, pages=2), item(15, slot=1, pages=5)]
    # 32 + 8 + 1 + 16 tokens, of which 16 fill a page, and the pages of two adapters.
    assert reads().num_bytes(step) == 10_000 + 57 * 100 + 7 * PAGE_BYTES


def test_other_steps_are_not_counted() -> None:
    assert reads().num_bytes([item(5), item(0, num_tokens=4)]) == 0
    assert reads().num_bytes([]) == 0


def test_windows_limit_what_is_read_and_states_are_read_whole() -> None:
    windowed = CacheLayout(
        3, (CacheGroup((0,), None, num_blocks=2, page_step=3), CacheGroup((1, 2), 20, page_step=3)), num_state_pages=4
    )
    # A page has 32 tokens of the first group, or 16 of the second.
    expected = 10_000 + PAGE_BYTES * (64 / 32 + 20 / 16 + 4)
    assert reads(cache=windowed).num_bytes([item(63)]) == int(expected)


def test_more_tokens_read_more_experts() -> None:
    mixture = reads(expert_bytes=8000, num_experts=8, top_k=2, page_bytes=0)
    one, two = (mixture.num_bytes([item(0)] * count) - 10_000 for count in (1, 2))
    assert (one, two) == (2000, 3500)
    assert mixture.num_bytes([item(0)] * 500) - 10_000 == pytest.approx(8000, abs=1)


@pytest.mark.parametrize("lookahead", [False, True], ids=["synchronous", "ahead"])
def test_an_engine_counts_the_time_of_its_decode_steps(lookahead: bool, simulate: Simulate) -> None:
    simulation = simulate(lookahead=lookahead, adapters={"a": 2}, reads=reads())
    submit: Callable[..., Any] = simulation.executor.submit
    decodes: list[int] = []

    def slow(batch: Any) -> Any:
        simulation.clock.now += STEP_S
        if batch.max_q == 1:
            decodes.append(batch.num_tokens)
        return submit(batch)

    simulation.executor.submit = slow  # type: ignore[method-assign]
    simulation.add("base", num_prompt=20, max_tokens=6)
    simulation.add("adapted", num_prompt=9, max_tokens=6, digest="a")
    simulation.run()
    counted = stats_of(simulation).decode_reads
    assert counted.num_bytes > 10_000 * len(decodes) >= 50_000
    # With a step in flight, the last iteration commits a step but submits none.
    assert counted.seconds == STEP_S * (len(decodes) - lookahead)
    assert counted.utilization == counted.num_bytes / counted.seconds / 100_000.0
