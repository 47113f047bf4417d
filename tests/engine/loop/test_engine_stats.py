from __future__ import annotations

import msgspec

from tests.engine.simulated_engine import Simulate, stats_of


def test_recomputed_prompt_counts_once(simulate: Simulate) -> None:
    simulation = simulate(num_pages=12, adapters={"a": 2})
    adds = [simulation.add(f"s{i}", num_prompt=20, max_tokens=60, digest="a" if i % 2 else None) for i in range(5)]
    simulation.run()
    stats = stats_of(simulation)
    assert stats.num_preemptions > 0
    assert stats.prompt_tokens == sum(len(add.prompt) for add in adds)
    # Each new token except the last has its own row. The other rows are for prompt tokens and recomputed tokens.
    num_rows = sum(batch.num_tokens for batch in simulation.executor.batches)
    assert stats.recomputed_tokens == num_rows - stats.prompt_tokens - sum(add.max_tokens - 1 for add in adds) > 0


def test_prefix_cache_hits_count_only_as_cached(simulate: Simulate) -> None:
    simulation = simulate()
    prompt = tuple(range(50))
    for name in ("first", "second"):
        simulation.engine.add(b"gateway", simulation.make_add(name, prompt, 3, isolation_key=b"tenant"))
        simulation.run()
    stats = stats_of(simulation)
    assert (stats.prompt_tokens, stats.cached_tokens, stats.recomputed_tokens) == (50 + 2, 48, 0)


def test_background_sequences_are_counted_apart(simulate: Simulate) -> None:
    simulation = simulate(max_sequences=2)
    for number in range(5):
        simulation.add(f"line {number}", num_prompt=4, max_tokens=20, is_background=True)
    simulation.add("chat", num_prompt=4, max_tokens=20)
    for _ in range(3):
        simulation.step()
    stats = stats_of(simulation)
    assert (stats.num_running, stats.num_background_running) == (2, 1)
    assert (stats.num_waiting, stats.num_background_waiting) == (4, 4)


def test_stats_report_what_sequences_wait_for(simulate: Simulate) -> None:
    simulation = simulate(num_pages=8, adapters={"a": 2})
    for i in range(6):
        simulation.add(f"s{i}", num_prompt=20, max_tokens=20)
    simulation.add("cold", num_prompt=4, max_tokens=2, digest="a")
    before = stats_of(simulation)
    assert (before.waiting.slot, before.waiting.adapter, before.num_waiting) == (6, 1, 7)
    simulation.engine.step()
    short = stats_of(simulation)
    assert short.num_running > 0
    assert short.waiting.pages == short.num_waiting - short.waiting.adapter > 0
    simulation.run()
    stats = stats_of(simulation)
    assert sum(msgspec.structs.astuple(stats.waiting)) == 0
    assert sum(stats.step_times.counts) == stats.num_steps == len(simulation.executor.batches)
    assert stats.num_rows == sum(batch.num_tokens for batch in simulation.executor.batches)
    assert stats.num_step_sequences >= stats.num_steps
