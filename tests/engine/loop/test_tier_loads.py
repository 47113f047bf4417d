"""What the engine reports about its load, from which gateways forecast first tokens."""

from __future__ import annotations

from loramux.engine.protocol.messages import TierLoad
from tests.engine.simulated_engine import Simulate, stats_of


def test_loads_are_reported_by_rank(simulate: Simulate) -> None:
    simulation = simulate(max_sequences=2, max_batch_tokens=8)
    simulation.add("long", num_prompt=20, max_tokens=2)
    simulation.step()
    simulation.add("urgent", num_prompt=5, service_tier="priority", share_key="other")
    simulation.add("cheap", num_prompt=7, service_tier="flex")
    simulation.add("line", num_prompt=9, is_background=True)
    stats = stats_of(simulation)
    assert stats.service_tiers == (
        TierLoad(num_waiting=1, prompt_tokens=5),
        TierLoad(num_running=1, prompt_tokens=12),
        TierLoad(num_waiting=1, prompt_tokens=7),
        TierLoad(num_waiting=1, prompt_tokens=9),
    )
    assert (stats.max_sequences, stats.num_ended, stats.num_engines) == (2, 0, 1)
    simulation.run()
    stats = stats_of(simulation)
    assert stats.service_tiers == (TierLoad(),) * 4
    assert stats.num_ended == 4


def test_sequences_that_never_ran_do_not_count_as_ended(simulate: Simulate) -> None:
    simulation = simulate(max_sequences=1, max_waiting_s=5.0)
    simulation.add("running", max_tokens=3)
    simulation.step()
    simulation.add("waiting")
    simulation.clock.now = 6.0
    simulation.run()
    assert simulation.finished["waiting"].code == "overloaded"
    assert stats_of(simulation).num_ended == 1


def test_speed_of_prompts_is_measured_in_steps_that_they_fill(simulate: Simulate) -> None:
    simulation = simulate(max_batch_tokens=8, max_sequences=4)
    clock, submit = simulation.clock, simulation.executor.submit

    def timed(batch: object) -> object:
        clock.now += 0.5
        return submit(batch)

    simulation.executor.submit = timed
    simulation.add("short", num_prompt=3, max_tokens=5)
    simulation.run()
    assert (stats_of(simulation).prefill_tokens, stats_of(simulation).prefill_s) == (0, 0.0)
    simulation.add("long", num_prompt=18, max_tokens=5)
    simulation.run()
    stats = stats_of(simulation)
    assert (stats.prefill_tokens, stats.prefill_s) == (16, 1.0), "the last two tokens fill a quarter of a step"
