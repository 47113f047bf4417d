"""An adapter applies only from its activation on. Earlier tokens have the K and V of the base."""

from __future__ import annotations

import random

import pytest

from loramux.engine.protocol.messages import Add
from loramux.engine.sequences.batch import ScheduledSequence, build_batch
from loramux.engine.sequences.sequence import PageTable, Sequence, block_list
from tests.engine.simulated_engine import GREEDY, VOCAB_SIZE, Simulate, Simulation, simulate_engine

PAGE = 16
OWNER = b"tenant"


def tokens(count: int, seed: int = 0) -> tuple[int, ...]:
    rng = random.Random(seed)
    return tuple(rng.randrange(VOCAB_SIZE) for _ in range(count))


def cached(simulation: Simulation, name: str, prompt: tuple[int, ...], digest: str | None, activation: int = 0) -> int:
    """Run one request, check its answer, and return its number of cached prompt tokens."""
    add = simulation.make_add(name, prompt, 4, digest, isolation_key=OWNER, activation=activation)
    simulation.engine.add(b"gateway", add)
    simulation.run()
    assert simulation.tokens[name] == simulation.expected(add)
    assert simulation.cached[name] == simulation.finished[name].cached_tokens, "it is told before the first token"
    return simulation.finished[name].cached_tokens


@pytest.fixture
def simulation(simulate: Simulate) -> Simulation:
    return simulate(num_pages=64, adapters={"a": 2, "b": 3})


@pytest.mark.parametrize("lookahead", [False, True], ids=["at once", "lookahead"])
@pytest.mark.parametrize("max_batch_tokens", [1, 7, 16, 256])
def test_every_activation_in_every_chunk_yields_the_same_answer(max_batch_tokens: int, lookahead: bool) -> None:
    simulation = simulate_engine(
        num_pages=200, adapters={"a": 2, "b": 1}, max_batch_tokens=max_batch_tokens, lookahead=lookahead
    )
    adds = [simulation.add("base", num_prompt=40), simulation.add("plain", num_prompt=40, digest="b")]
    adds += [
        simulation.add(f"s{activation}", num_prompt=40, digest="a", activation=activation)
        for activation in (0, 1, 6, 7, 15, 16, 17, 38, 39)
    ]
    simulation.run()
    for add in adds:
        assert simulation.tokens[add.sequence_id] == simulation.expected(add)
    # Without this, a device that ignored the activation would pass.
    assert simulation.expected(adds[-1]) != simulation.executor.generate(adds[-1].prompt, 4, "a")


def test_rows_before_the_activation_have_the_slot_of_the_base() -> None:
    def sequence(activation: int, num_computed: int, slot: int) -> Sequence:
        add = Add(sequence_id="s", prompt=tokens(10), max_tokens=1, sampling=GREEDY, digest="a", activation=activation)
        made = Sequence(add, b"", 0, 0, slot=slot, num_computed=num_computed)
        made.tables = [PageTable(block_list([slot]))]
        return made

    def slots(*scheduled: tuple[Sequence, int]) -> list[int]:
        return build_batch([ScheduledSequence(*one) for one in scheduled], PAGE).slots.tolist()

    assert slots((sequence(5, 3, slot=2), 4), (sequence(0, 8, slot=3), 2)) == [-1, -1, 2, 2, 3, 3]
    assert slots((sequence(5, 0, slot=2), 3), (sequence(9, 9, slot=2), 1)) == [-1, -1, -1, 2]
    # One row per sequence, as in decode.
    assert slots((sequence(5, 4, slot=2), 1), (sequence(5, 5, slot=2), 1)) == [-1, 2]


@pytest.mark.parametrize("lookahead", [False, True], ids=["at once", "lookahead"])
def test_a_preempted_sequence_is_activated_where_it_was(lookahead: bool) -> None:
    simulation = simulate_engine(num_pages=8, adapters={"a": 1}, lookahead=lookahead, max_batch_tokens=9)
    adds = [
        simulation.add(f"s{i}", num_prompt=30, max_tokens=30, digest="a", activation=10 * i, isolation_key=OWNER)
        for i in range(3)
    ]
    simulation.run()
    assert simulation.scheduler.num_preemptions > 0
    for add in adds:
        assert simulation.tokens[add.sequence_id] == simulation.expected(add)


def test_the_prefix_before_the_activation_is_shared_with_the_base_and_other_adapters(simulation: Simulation) -> None:
    conversation = tokens(100)
    assert cached(simulation, "base", conversation, None) == 0
    assert cached(simulation, "a", (*conversation, 1, 2), "a", 100) == 96
    assert cached(simulation, "b", (*conversation, 3, 4), "b", 100) == 96
    # The other way round: the base continues after an adapter has computed more of the conversation.
    longer = tokens(200, seed=1)
    assert cached(simulation, "first", longer, "a", 190) == 0
    assert cached(simulation, "again", longer, None) == 176
    assert cached(simulation, "plain", longer, "b") == 0


def test_the_page_of_the_activation_belongs_to_the_adapter(simulation: Simulation) -> None:
    prompt = tokens(65)
    assert cached(simulation, "first", prompt, "a", 40) == 0
    assert cached(simulation, "base", prompt, None) == 32
    assert cached(simulation, "other", prompt, "b", 40) == 32
    assert cached(simulation, "again", prompt, "a", 40) == 64


@pytest.mark.parametrize("activation", [47, 48, 49])
def test_an_activation_at_the_edge_of_a_page_shares_whole_pages_only(simulation: Simulation, activation: int) -> None:
    prompt = tokens(80)
    cached(simulation, "base", prompt, None)
    assert cached(simulation, "a", prompt, "a", activation) == activation // PAGE * PAGE


def test_equal_tokens_activated_at_different_positions_share_only_what_comes_before(simulation: Simulation) -> None:
    """The next token decides which occurrence is the last, so the same page can have two activation positions."""
    prompt = tokens(48)
    cached(simulation, "early", (*prompt, 1), "a", 34)
    assert cached(simulation, "late", (*prompt, 2), "a", 47) == 32
    assert cached(simulation, "from the start", (*prompt, 3), "a") == 0


def test_an_unloaded_adapter_keeps_only_the_base_pages(simulation: Simulation) -> None:
    prompt = tokens(65)
    cached(simulation, "first", prompt, "a", 32)
    simulation.prefixes.purge("a")
    assert cached(simulation, "again", prompt, "a", 32) == 32


@pytest.mark.parametrize(
    ("digest", "activation"), [("a", -1), ("a", 5), ("a", 2**40), (None, 1)], ids=["-1", "end", "large", "base"]
)
def test_an_activation_outside_the_prompt_is_refused(
    simulation: Simulation, digest: str | None, activation: int
) -> None:
    simulation.add("s", num_prompt=5, digest=digest, activation=activation)
    simulation.run()
    assert simulation.finished["s"].code == "invalid_request"
