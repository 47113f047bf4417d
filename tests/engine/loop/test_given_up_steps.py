"""Steps of background sequences are given up when other sequences arrive, and computed again."""

from __future__ import annotations

from loramux.engine.adapters.stager import MemoryStager
from loramux.engine.loop.assembly import assemble_engine
from loramux.engine.loop.config import EngineConfig
from loramux.engine.loop.engine import MAX_GIVEN_UP
from loramux.engine.protocol.messages import Add, StatsRequest, StepOutput
from loramux.engine.scheduling.scheduler import MAX_YIELDS
from tests.demo_base import DEMO_BASE
from tests.engine.simulated_device import GREEDY
from tests.engine.simulated_engine import Simulation, simulate_engine, stats_of


def with_lines(simulation: Simulation, num_lines: int = 4, **fields: int) -> list[Add]:
    """Add lines whose prompts take two steps, and run the first."""
    lines = [
        simulation.add(f"line {number}", num_prompt=30, max_tokens=20, is_background=True, **fields)
        for number in range(num_lines)
    ]
    simulation.step()
    return lines


def num_computed(simulation: Simulation) -> int:
    """The tokens that the running lines have computed."""
    return sum(one.num_computed for one in simulation.scheduler.running if one.is_background)


def test_a_new_sequence_does_not_wait_for_a_step_of_lines() -> None:
    simulation = simulate_engine(num_pages=256)
    lines, num_steps = with_lines(simulation), len(simulation.executor.batches)
    simulation.engine.has_urgent = lambda: True
    assert simulation.step(), "the loop does not wait"
    assert len(simulation.executor.batches) == num_steps
    simulation.engine.has_urgent = lambda: False
    chat = simulation.add("chat", num_prompt=30)
    simulation.step()
    assert len(simulation.tokens["chat"]) == 1
    simulation.run()
    for add in (*lines, chat):
        assert simulation.tokens[add.sequence_id] == simulation.expected(add)


def test_steps_of_others_are_not_given_up() -> None:
    simulation = simulate_engine(num_pages=256)
    simulation.add("chat", max_tokens=20)
    with_lines(simulation)
    simulation.engine.has_urgent = lambda: True
    for _ in range(5):
        before = len(simulation.tokens["chat"])
        simulation.step()
        assert len(simulation.tokens["chat"]) == before + 1


def test_lines_go_on_while_others_always_arrive() -> None:
    simulation = simulate_engine(num_pages=256)
    lines = with_lines(simulation)
    simulation.engine.has_urgent = lambda: True
    num_before, num_steps = len(simulation.executor.batches), 3 * (MAX_GIVEN_UP + 1)
    for _ in range(num_steps):
        simulation.step()
    assert len(simulation.executor.batches) == num_before + 3
    assert stats_of(simulation).given_up_steps == num_steps - 3
    simulation.run()
    assert all(simulation.tokens[one.sequence_id] == simulation.expected(one) for one in lines)


def test_a_given_up_step_is_no_turn_of_the_lines() -> None:
    simulation = simulate_engine(num_pages=256)
    with_lines(simulation)
    simulation.engine.has_urgent = lambda: True
    num_steps_without, most = 0, 0
    for number in range(6 * MAX_YIELDS):
        if number % MAX_YIELDS:
            simulation.add(f"chat {number}", max_tokens=1)
        before = num_computed(simulation)
        simulation.step()
        num_steps_without = 0 if num_computed(simulation) > before else num_steps_without + 1
        most = max(most, num_steps_without)
    assert most == MAX_YIELDS


def test_states_of_a_hybrid_decoder_are_not_advanced_twice() -> None:
    simulation = simulate_engine(num_pages=256, num_state_pages=1)
    lines, num_steps = with_lines(simulation), len(simulation.executor.batches)
    simulation.engine.has_urgent = lambda: True
    simulation.step()
    assert len(simulation.executor.batches) == num_steps + 1
    simulation.run()
    assert all(simulation.tokens[one.sequence_id] == simulation.expected(one) for one in lines)


def test_a_step_on_a_cpu_is_given_up_between_layers() -> None:
    config = EngineConfig(model_dir=str(DEMO_BASE), blob_url="", cache_dir="", dtype="float32", pool_bytes=64 << 20)
    assembled = assemble_engine(config, lambda: None, MemoryStager({}))
    engine, num_looks = assembled.engine, 0

    def arrives_in_the_second_layer() -> bool:
        nonlocal num_looks
        num_looks += 1
        return num_looks == 2

    def answer(name: str) -> list[int]:
        prompt = tuple(range(100, 140))
        engine.add(b"", Add(sequence_id=name, prompt=prompt, max_tokens=4, sampling=GREEDY, is_background=True))
        while engine.has_work:
            engine.step()
        outputs = [one.message for one in engine.take_outbox()]
        return [token for one in outputs if isinstance(one, StepOutput) for token in one.outputs[0].token_ids]

    try:
        expected = answer("before")
        num_steps = engine.stats(StatsRequest(call_id="")).num_steps
        engine.has_urgent = arrives_in_the_second_layer
        assert answer("given up") == expected
        assert num_looks == 4, "it looks in the first half only"
        assert engine.stats(StatsRequest(call_id="")).num_steps == 2 * num_steps, "it counts once"
    finally:
        assembled.close()
