from __future__ import annotations

import pytest

from loramux.engine.protocol.messages import Extend
from tests.engine.simulated_engine import Simulate, stats_of


def test_extension_counts_while_a_preempted_sequence_lacks_its_adapter(simulate: Simulate) -> None:
    simulation = simulate(num_pages=8, adapters={"a": 2})
    paused = simulation.add("paused", num_prompt=20, max_tokens=4, digest="a", pause_s=600.0, priority=1)
    for _ in range(8):
        simulation.step()
    assert len(simulation.tokens["paused"]) == 4
    long = simulation.add("long", num_prompt=30, max_tokens=98)
    while "long" not in simulation.finished:
        simulation.step()
        if simulation.adapters.find("a") is None:
            simulation.engine.extend(b"gateway", Extend(sequence_id="paused", max_tokens=9))
    assert stats_of(simulation).num_preemptions == 1
    for _ in range(10):
        simulation.step()
    simulation.clock.now = 700.0
    simulation.run()
    assert simulation.tokens["long"] == simulation.expected(long)
    assert simulation.tokens["paused"] == simulation.executor.generate(paused.prompt, 9, "a")


@pytest.mark.parametrize(("wanted", "granted"), [(12, 12), (1000, 28)], ids=["beside the adapter", "beyond the pool"])
def test_extension_before_the_adapter_is_resident_counts(simulate: Simulate, wanted: int, granted: int) -> None:
    simulation = simulate(num_pages=8, adapters={"a": 5})
    simulation.hold_loads()
    add = simulation.add("s", num_prompt=20, max_tokens=4, digest="a")
    simulation.step()
    simulation.engine.extend(b"gateway", Extend(sequence_id="s", max_tokens=wanted))
    simulation.let_loads_go()
    simulation.run()
    assert simulation.tokens["s"] == simulation.executor.generate(add.prompt, granted, "a")
    assert simulation.finished["s"].reason == "length"


@pytest.mark.parametrize(("digest", "max_tokens"), [(None, 44), ("a", 12)], ids=["base", "beside its adapter"])
def test_sequence_that_fills_the_pool_does_not_pause(simulate: Simulate, digest: str | None, max_tokens: int) -> None:
    simulation = simulate(num_pages=4, adapters={"a": 2})
    add = simulation.add("s", num_prompt=20, max_tokens=max_tokens, digest=digest, pause_s=60.0)
    simulation.run(max_steps=100)
    assert simulation.tokens["s"] == simulation.expected(add)
    assert simulation.finished["s"].reason == "length"


def test_sequence_with_room_to_continue_still_pauses(simulate: Simulate) -> None:
    simulation = simulate(num_pages=4, adapters={"a": 2})
    simulation.add("s", num_prompt=20, max_tokens=11, digest="a", pause_s=60.0)
    for _ in range(30):
        simulation.step()
    assert "s" not in simulation.finished
    simulation.clock.now = 60.0
    simulation.run()
    assert simulation.finished["s"].completion_tokens == 11
