"""What is counted once, and what apart."""

from __future__ import annotations

from tests.engine.conftest import Simulate, stats_of


def test_a_prompt_counts_once_however_often_it_is_computed(simulate: Simulate) -> None:
    simulation = simulate(num_pages=12, adapters={"a": 2})
    adds = [simulation.add(f"s{i}", num_prompt=20, max_tokens=60, digest="a" if i % 2 else None) for i in range(5)]
    simulation.run()
    stats = stats_of(simulation)
    assert stats.num_preemptions > 0
    assert stats.prompt_tokens == sum(len(add.prompt) for add in adds)
    # Each new token but the last has one row of its own; all else are prompts, and what was computed again.
    num_rows = sum(batch.num_tokens for batch in simulation.executor.batches)
    assert stats.recomputed_tokens == num_rows - stats.prompt_tokens - sum(add.max_tokens - 1 for add in adds) > 0


def test_what_the_prefix_cache_spared_counts_as_cached_only(simulate: Simulate) -> None:
    simulation = simulate()
    prompt = tuple(range(50))
    for name in ("first", "second"):
        simulation.engine.add(b"gateway", simulation.make_add(name, prompt, 3, isolation_key=b"tenant"))
        simulation.run()
    stats = stats_of(simulation)
    assert (stats.prompt_tokens, stats.cached_tokens, stats.recomputed_tokens) == (50 + 2, 48, 0)
