"""Sequences of a hybrid decoder: each has the pages of a state, which is computed again after a preemption."""

from __future__ import annotations

import pytest

from loramux.engine.pages.page_pool import PageOwner
from loramux.engine.protocol.messages import Abort, Add
from loramux.engine.sequences.batch import ScheduledSequence, build_batch
from loramux.engine.sequences.cache_groups import hybrid_layout
from loramux.engine.sequences.sequence import PageTable, Sequence, block_list
from tests.engine.simulated_engine import GREEDY, simulate_engine

OWNER = b"tenant"


@pytest.fixture(params=[False, True], ids=["at once", "lookahead"])
def lookahead(request: pytest.FixtureRequest) -> bool:
    return bool(request.param)


@pytest.mark.parametrize("max_batch_tokens", [3, 16, 256])
def test_the_state_goes_from_chunk_to_chunk(max_batch_tokens: int, lookahead: bool) -> None:
    simulation = simulate_engine(
        adapters={"a": 2}, num_state_pages=3, max_batch_tokens=max_batch_tokens, max_sequences=3, lookahead=lookahead
    )
    adds = [
        simulation.add(f"s{i}", num_prompt=1 + 17 * i, max_tokens=9, digest="a" if i % 2 else None, activation=i % 2)
        for i in range(4)
    ]
    simulation.run()
    assert [simulation.tokens[add.sequence_id] for add in adds] == [simulation.expected(add) for add in adds]


def test_a_preempted_sequence_starts_over(lookahead: bool) -> None:
    simulation = simulate_engine(num_pages=12, num_state_pages=2, lookahead=lookahead)
    adds = [simulation.add(f"s{i}", num_prompt=30, max_tokens=30, isolation_key=OWNER) for i in range(3)]
    simulation.run()
    assert simulation.scheduler.num_preemptions > 0
    assert [simulation.tokens[add.sequence_id] for add in adds] == [simulation.expected(add) for add in adds]
    assert {finished.cached_tokens for finished in simulation.finished.values()} == {0}


def test_a_state_has_its_pages_from_the_first_step_to_the_end() -> None:
    simulation = simulate_engine(num_state_pages=5)
    simulation.add("one", num_prompt=3, max_tokens=40)
    simulation.add("other", num_prompt=20, max_tokens=40)
    simulation.step()
    assert simulation.pages.num_owned(PageOwner.KV) == (5 + 1) + (5 + 2)
    simulation.engine.abort(b"gateway", Abort(sequence_id="one"))
    assert simulation.pages.num_owned(PageOwner.KV) == 5 + 2
    simulation.run()
    assert simulation.pages.num_owned(PageOwner.KV) == 0


def test_equal_prompts_are_computed_each_time() -> None:
    simulation = simulate_engine(num_state_pages=2)
    prompt = tuple(range(100))
    for name in ("first", "second"):
        add = simulation.make_add(name, prompt, 4, isolation_key=OWNER)
        simulation.engine.add(b"gateway", add)
        simulation.run()
        assert simulation.tokens[name] == simulation.expected(add)
        assert simulation.finished[name].cached_tokens == 0
    assert len(simulation.prefixes) == 0


def test_a_request_must_fit_next_to_its_state() -> None:
    simulation = simulate_engine(num_pages=10, num_state_pages=4)
    simulation.add("fits", num_prompt=90, max_tokens=6)
    simulation.add("does not", num_prompt=90, max_tokens=7)
    simulation.run()
    assert simulation.finished["fits"].reason == "length"
    assert simulation.finished["does not"].code == "request_too_large"


def test_states_wait_for_pages_without_preempting(lookahead: bool) -> None:
    """The pool has room for one state and its K and V at a time."""
    simulation = simulate_engine(num_pages=10, num_state_pages=6, lookahead=lookahead)
    adds = [simulation.add(f"s{i}", num_prompt=20, max_tokens=10) for i in range(4)]
    simulation.run()
    assert simulation.scheduler.num_preemptions == 0
    assert [simulation.tokens[add.sequence_id] for add in adds] == [simulation.expected(add) for add in adds]


def test_a_step_lists_the_pages_of_states_after_those_of_k_and_v() -> None:
    def sequence(state_pages: list[int], blocks: list[int]) -> ScheduledSequence:
        add = Add(sequence_id="s", prompt=(1,) * 20, max_tokens=1, sampling=GREEDY)
        tables = [PageTable(block_list(blocks))]
        made = Sequence(add, b"", 0, 0, num_computed=16, tables=tables, state_pages=block_list(state_pages))
        return ScheduledSequence(made, 4)

    batch = build_batch([sequence([7, 8], [1, 2]), sequence([5, 4], [9, 3])], 16)
    assert batch.blocks.tolist() == [1, 2, 9, 3, 7, 8, 5, 4]
    assert batch.block_starts.tolist() == [[0, 2]]
    assert batch.state_starts.tolist() == [4, 6]
    assert batch.kv_slots.tolist() == [[32, 33, 34, 35, 48, 49, 50, 51]]


def test_pages_hold_more_tokens_if_few_layers_have_attention() -> None:
    # As in Qwen3.5, every fourth of 24 layers.
    layout = hybrid_layout(24, tuple(range(3, 24, 4)), num_state_pages=26)
    [group] = layout.groups
    assert (group.page_tokens, group.window, group.page_step) == (64, None, 24)
    assert list(layout.blocks(group, 2)) == [48, 54, 60, 66]
    assert layout.place(7) == (0, 1)
    assert layout.max_pages(65, 512) == 26 + 2
    assert layout.max_blocks(65, 512) == 26 + 8
    assert layout.max_tokens(27, 512) == 64
