"""Sequences of a hybrid decoder: each has the pages of a state, and starts from a cached state if it can."""

from __future__ import annotations

import itertools
import random
from typing import Any

import msgspec
import pytest

from loramux.engine.execution.direct_executor import states_of
from loramux.engine.pages import state_checkpoints
from loramux.engine.pages.host_pages import AnyPage
from loramux.engine.pages.kv_pages import FindPage
from loramux.engine.pages.page_pool import PageOwner
from loramux.engine.pages.state_checkpoints import StateCheckpoints
from loramux.engine.protocol.messages import Abort, Add, Unload
from loramux.engine.sequences.batch import ScheduledSequence, build_batch
from loramux.engine.sequences.cache_groups import hybrid_layout
from loramux.engine.sequences.sequence import PageTable, Sequence, block_list
from tests.engine.simulated_device import SimulatedExecutor
from tests.engine.simulated_engine import GREEDY, VOCAB_SIZE, Simulation, simulate_engine, stats_of

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


def test_drafts_are_rows_of_their_sequences_state() -> None:
    def sequence(state_page: int, block: int, drafts: tuple[int, ...] = ()) -> ScheduledSequence:
        add = Add(sequence_id="s", prompt=(1,) * 5, max_tokens=9, sampling=GREEDY)
        tables = [PageTable(block_list([block]))]
        made = Sequence(add, b"", 0, 0, num_computed=4, tables=tables, state_pages=block_list([state_page]))
        return ScheduledSequence(made, 1, drafts)

    batch = build_batch([sequence(7, 1, (8, 9)), sequence(5, 2), sequence(4, 3, (6,))], 16)
    assert batch.seq_lens.tolist() == [5, 6, 7, 5, 5, 6]
    assert batch.state_starts.tolist() == [3, 3, 3, 4, 5, 5]
    states = states_of(batch)
    assert states is not None
    assert states.cu_q.tolist() == [0, 3, 4, 6]
    assert states.seq_lens.tolist() == [7, 5, 6]
    assert [batch.blocks[start] for start in states.page_starts] == [7, 5, 4]
    assert states.max_q == 3


def with_prediction(simulation: Simulation, name: str, num_prompt: int, **fields: Any) -> Add:
    """A request with 60 tokens. Every tenth token of its prediction is wrong."""
    add = simulation.make_add(name, tokens(num_prompt, len(name)), 60, **fields)
    predicted = [(one + (place % 10 == 9)) % VOCAB_SIZE for place, one in enumerate(simulation.expected(add))]
    return msgspec.structs.replace(add, prediction=tuple(predicted))


def test_rejected_drafts_leave_no_trace_in_a_state(lookahead: bool) -> None:
    simulation = simulate_engine(adapters={"a": 2}, num_state_pages=3, lookahead=lookahead, speculates=True)
    ask(simulation, with_prediction(simulation, "one", 20), with_prediction(simulation, "other", 20, digest="a"))
    drafts = stats_of(simulation).drafts
    assert 40 < drafts.accepted_prediction_tokens < drafts.prediction_tokens
    # Copies of states are kept for one step only.
    assert simulation.pages.num_owned(PageOwner.KV) == 0


def test_a_copy_of_a_state_evicts_cached_prefixes(lookahead: bool) -> None:
    simulation = simulate_engine(num_pages=24, num_state_pages=5, lookahead=lookahead, speculates=True)
    for number in range(3):
        ask(simulation, simulation.make_add(str(number), tokens(100, number), 4, isolation_key=OWNER))
    # The first step of the request takes 5 pages for the state and 3 for K and V. No page is left for a copy.
    assert simulation.pages.num_free <= 8
    ask(simulation, with_prediction(simulation, "one", 40))
    assert stats_of(simulation).drafts.accepted_prediction_tokens > 20


def test_a_copy_of_a_state_evicts_no_page_more_than_it_takes() -> None:
    num_pages: list[int] = []
    for speculates in (False, True):
        simulation = simulate_engine(num_pages=120, num_state_pages=3, speculates=speculates)
        for number in range(16):
            ask(simulation, simulation.make_add(str(number), tokens(100, number), 4, isolation_key=OWNER))
        # They keep running, and need no pages.
        for number in range(12):
            simulation.engine.add(
                b"gateway", simulation.make_add(f"paused {number}", tokens(5, number), 2, pause_s=1e6)
            )
        for _ in range(30):
            simulation.step()
        simulation.engine.add(b"gateway", with_prediction(simulation, "one", 20))
        while "one" not in simulation.finished:
            simulation.step()
        assert (stats_of(simulation).drafts.accepted_prediction_tokens > 20) is speculates
        num_pages.append(len(simulation.prefixes))
    assert 0 < num_pages[0] - num_pages[1] <= 3


def test_a_copy_of_a_state_evicts_no_adapter(lookahead: bool) -> None:
    simulation = simulate_engine(
        num_pages=24, adapters={"a": 10}, num_state_pages=5, lookahead=lookahead, speculates=True
    )
    ask(simulation, simulation.make_add("first", tokens(5), 4, "a"))
    # The state and 9 pages of K and V leave too few pages for a copy beside the adapter, which is idle.
    ask(simulation, with_prediction(simulation, "one", 80))
    assert stats_of(simulation).drafts.prediction_tokens == 0
    assert stats_of(simulation).num_adapter_evictions == 0


def ask(simulation: Simulation, *adds: Add) -> list[int]:
    """Run requests to their end, check their tokens, and return their numbers of cached tokens."""
    for add in adds:
        simulation.engine.add(b"gateway", add)
    simulation.run()
    for add in adds:
        assert simulation.tokens[add.sequence_id] == simulation.expected(add)
    return [simulation.finished[add.sequence_id].cached_tokens for add in adds]


def tokens(count: int, seed: int = 0) -> tuple[int, ...]:
    rng = random.Random(seed)
    return tuple(rng.randrange(VOCAB_SIZE) for _ in range(count))


@pytest.mark.parametrize("num_new", [1, 17, 60, 100])
@pytest.mark.parametrize("digest", [None, "a"])
@pytest.mark.parametrize("page_tokens", [16, 64])
def test_a_second_prompt_with_the_same_system_prompt_computes_a_tenth(
    page_tokens: int, digest: str | None, num_new: int, lookahead: bool
) -> None:
    num_layers = page_tokens // 16
    simulation = simulate_engine(
        num_pages=400,
        adapters={"a": 2},
        cache=hybrid_layout(num_layers, (num_layers - 1,), num_state_pages=5),
        max_model_len=4096,
        max_batch_tokens=512,
        lookahead=lookahead,
    )
    system, computed = tokens(2040), [0]
    for number in range(2):
        prompt = (*system, *tokens(num_new, 1 + number))
        [num_cached] = ask(simulation, simulation.make_add(str(number), prompt, 4, digest, isolation_key=OWNER))
        computed.append(stats_of(simulation).prompt_tokens)
        assert computed[-1] - computed[-2] == len(prompt) - num_cached
    assert computed[1] == len(system) + num_new
    assert computed[2] - computed[1] <= 0.1 * computed[1]


def test_a_third_prompt_starts_where_the_second_differed() -> None:
    simulation = simulate_engine(num_pages=400, num_state_pages=5, max_model_len=4096, max_batch_tokens=512)
    system = tokens(1000)
    prompts = [(*system, *tokens(700, 1 + number)) for number in range(3)]
    adds = [simulation.make_add(str(number), prompt, 4, isolation_key=OWNER) for number, prompt in enumerate(prompts)]
    assert [ask(simulation, add) for add in adds] == [[0], [0], [992]]


def test_choices_of_a_prompt_and_later_turns_use_its_state(lookahead: bool) -> None:
    simulation = simulate_engine(num_pages=200, num_state_pages=3, max_batch_tokens=512, lookahead=lookahead)
    prompt = tokens(100)
    adds = [simulation.make_add(f"choice {number}", prompt, 4, isolation_key=OWNER) for number in range(3)]
    # The choices begin in the same step.
    assert ask(simulation, *adds) == [0, 0, 0]
    later = simulation.make_add(
        "later", (*prompt, *simulation.tokens["choice 0"], *tokens(40, 1)), 4, isolation_key=OWNER
    )
    assert ask(simulation, later) == [80]


def test_states_of_other_adapters_and_tenants_are_not_used(lookahead: bool) -> None:
    simulation = simulate_engine(num_pages=300, adapters={"a": 2, "b": 2}, num_state_pages=3, lookahead=lookahead)
    prompt = tokens(100)
    number = itertools.count()

    def cached(digest: str | None, isolation_key: bytes = OWNER, activation: int = 0) -> int:
        add = simulation.make_add(
            str(next(number)), prompt, 4, digest, isolation_key=isolation_key, activation=activation
        )
        return ask(simulation, add)[0]

    assert [cached(digest) for digest in ("a", "b", None)] == [0, 0, 0]
    assert [cached(digest) for digest in ("a", "b", None)] == [80, 80, 80]
    assert [cached("a", b"another"), cached("a", b""), cached("a", b"")] == [0, 0, 0]
    # An adapter that is activated later starts from the state of the base.
    assert [cached("a", activation=90), cached("b", activation=85)] == [80, 80]
    simulation.engine.unload(b"gateway", Unload(call_id="u", digest="a"))
    simulation.run()
    assert [cached("a"), cached("b"), cached(None)] == [0, 80, 80]


def test_states_of_a_broken_adapter_are_purged() -> None:
    simulation = simulate_engine(adapters={"a": 2}, num_state_pages=3)
    prompt = tokens(100)
    for name, is_broken in (("first", False), ("broken", True), ("last", False)):
        simulation.executor.not_finite_for = {"a"} if is_broken else set()
        simulation.engine.add(b"gateway", simulation.make_add(name, prompt, 4, "a", isolation_key=OWNER))
        simulation.run()
        assert len(simulation.prefixes) == (0 if is_broken else 5 + 3)
    assert [simulation.finished[name].cached_tokens for name in ("first", "broken", "last")] == [0, 80, 0]


def test_a_sequence_that_leaves_its_slot_to_another_resumes_from_its_state(lookahead: bool) -> None:
    num_recomputed: list[int] = []
    for isolation_key in (OWNER, b""):
        simulation = simulate_engine(num_state_pages=3, max_sequences=1, max_batch_tokens=256, lookahead=lookahead)
        first = simulation.make_add("first", tokens(100), 40, isolation_key=isolation_key, is_background=True)
        simulation.engine.add(b"gateway", first)
        for _ in range(10):
            simulation.step()
        assert ask(simulation, simulation.make_add("urgent", tokens(5), 3)) == [0]
        assert simulation.tokens["first"] == simulation.expected(first)
        assert stats_of(simulation).num_preemptions == 1
        num_recomputed.append(stats_of(simulation).recomputed_tokens)
    assert 0 < num_recomputed[0] < 32
    assert num_recomputed[1] > 100


def test_an_aborted_prompt_leaves_the_states_that_it_reached() -> None:
    simulation = simulate_engine(num_state_pages=2, max_batch_tokens=32)
    prompt = tokens(160)
    simulation.engine.add(b"gateway", simulation.make_add("aborted", prompt, 4, isolation_key=OWNER))
    for _ in range(4):
        simulation.step()
    simulation.engine.abort(b"gateway", Abort(sequence_id="aborted"))
    assert ask(simulation, simulation.make_add("again", prompt, 4, isolation_key=OWNER)) == [128]


def test_prompt_scores_use_no_state_and_leave_one() -> None:
    simulation = simulate_engine(num_state_pages=2)
    scored = msgspec.structs.replace(GREEDY, num_prompt_logprobs=0)
    prompt = tokens(100)
    adds = [
        simulation.make_add(str(number), prompt, 4, None, sampling, isolation_key=OWNER)
        for number, sampling in enumerate((scored, GREEDY, scored))
    ]
    assert [ask(simulation, add) for add in adds] == [[0], [80], [0]]


def test_a_checkpoint_that_does_not_fit_beside_the_state_is_not_used() -> None:
    simulation = simulate_engine(num_pages=16, num_state_pages=4, max_batch_tokens=256)
    assert ask(simulation, simulation.make_add("short", tokens(90), 4, isolation_key=OWNER)) == [0]
    assert ask(simulation, simulation.make_add("same", tokens(90), 4, isolation_key=OWNER)) == [64]
    # Its K and V take 12 pages and its state 4.
    assert ask(simulation, simulation.make_add("long", (*tokens(90), *tokens(95, 1)), 4, isolation_key=OWNER)) == [0]


@pytest.mark.parametrize("is_background", [False, True], ids=["equal", "background"])
def test_a_checkpoint_that_does_not_fit_delays_no_request_and_preempts_none(
    is_background: bool, lookahead: bool
) -> None:
    """A long request runs. There is room for another one's K, V and state, but not for a checkpoint beside them."""
    num_steps: list[dict[str, int]] = []
    for isolation_key in (OWNER, b""):
        simulation = simulate_engine(num_pages=45, num_state_pages=10, max_batch_tokens=256, lookahead=lookahead)
        ask(simulation, simulation.make_add("first", tokens(100), 1, isolation_key=isolation_key))
        adds = [
            simulation.make_add("long", tokens(150, 1), 60, is_background=is_background),
            simulation.make_add("same", tokens(100), 2, isolation_key=isolation_key),
            simulation.make_add("other", tokens(20, 2), 2),
        ]
        if is_background:
            # The other one would preempt the long one for pages of its own.
            del adds[2]
        simulation.engine.add(b"gateway", adds[0])
        # A background prompt gets few rows of each step.
        for _ in range(14):
            simulation.step()
        assert simulation.tokens["long"]
        for add in adds[1:]:
            simulation.engine.add(b"gateway", add)
        ends: dict[str, int] = {}
        for step in range(1, 20):
            simulation.step()
            for name in simulation.finished.keys() - ends.keys():
                ends[name] = step
        num_steps.append({add.sequence_id: ends[add.sequence_id] for add in adds[1:]})
        assert stats_of(simulation).num_preemptions == 0
        simulation.run()
        assert [simulation.tokens[add.sequence_id] for add in adds] == [simulation.expected(add) for add in adds]
    # A step ends at the checkpoint of the prompt that is computed again.
    assert all(num_steps[0][name] <= num_steps[1][name] + 1 for name in num_steps[1])


def test_a_prompt_that_is_not_asked_again_evicts_no_adapter() -> None:
    simulation = simulate_engine(num_pages=120, adapters={"a": 3}, num_state_pages=26, max_batch_tokens=256)
    ask(simulation, simulation.make_add("adapter", tokens(5), 2, "a"))
    for number in range(2):
        ask(simulation, simulation.make_add(str(number), tokens(200, number), 2, isolation_key=OWNER))
    assert simulation.adapters.num_evictions == 0
    assert len(simulation.prefixes) == 2 * (11 + 26)


def test_other_prompts_fill_a_step_that_ends_at_a_checkpoint() -> None:
    simulation = simulate_engine(num_pages=200, num_state_pages=2, max_batch_tokens=256)
    adds = [simulation.make_add(str(number), tokens(180, number), 2, isolation_key=OWNER) for number in range(2)]
    for add in adds:
        simulation.engine.add(b"gateway", add)
    simulation.step()
    # The checkpoint of a prompt of 11 pages is after the tenth.
    assert [len(batch.tokens) for batch in simulation.executor.batches] == [256]
    assert ask(simulation) == []
    assert [simulation.tokens[add.sequence_id] for add in adds] == [simulation.expected(add) for add in adds]


@pytest.mark.parametrize("mutant", ["any state", "a state of another length", "no copy"])
def test_a_wrong_state_is_noticed(mutant: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The simulated device compares the state with that of the last token."""
    if mutant == "any state":
        monkeypatch.setattr(state_checkpoints, "_key", lambda key, index: b"state" + bytes([index]))
    elif mutant == "a state of another length":
        find = StateCheckpoints.find
        earlier: list[tuple[AnyPage, ...]] = []

        def find_first(checkpoints: StateCheckpoints, key: bytes, find_page: FindPage) -> tuple[AnyPage, ...]:
            earlier.extend(filter(None, [find(checkpoints, key, find_page)]))
            return earlier[0] if earlier else ()

        monkeypatch.setattr(StateCheckpoints, "find", find_first)
    else:
        monkeypatch.setattr(SimulatedExecutor, "copy_page", lambda executor, source, target: None)
    simulation = simulate_engine(num_pages=200, adapters={"a": 2, "b": 2}, num_state_pages=2)
    prompt = tokens(200)
    adds = [
        simulation.make_add(str(number), prompt[:length], 4, digest, isolation_key=OWNER)
        for number, (length, digest) in enumerate([(100, "a"), (100, "b"), (100, "b"), (200, "a"), (200, "a")])
    ]

    def ask_all() -> None:
        for add in adds:
            ask(simulation, add)

    with pytest.raises(AssertionError, match="a stale state page"):
        ask_all()
