from __future__ import annotations

from collections import defaultdict

import numpy as np
import pytest
from msgspec import structs

from loramux.engine.protocol.messages import POOLINGS, Abort, Add, Extend, Finished, Pin, SequenceOutput, StepOutput
from loramux.engine.server.gateway_link import GatewayLink
from tests.engine.simulated_engine import GREEDY, Simulation, simulate_engine, stats_of


def add_pooled(simulation: Simulation, name: str, pooling: str = "last", **fields: object) -> Add:
    return simulation.add(name, max_tokens=0, pooling=pooling, **fields)  # type: ignore[arg-type]


def states_of(simulation: Simulation) -> tuple[dict[str, list[float]], dict[str, Finished]]:
    """Run each sequence to its end, and return its pooled states and its end."""
    states: dict[str, list[float]] = defaultdict(list)
    ends: dict[str, Finished] = {}
    has_more = True
    while has_more:
        simulation.engine.step()
        has_more = simulation.engine.has_work
        for outbound in simulation.engine.take_outbox():
            match outbound.message:
                case StepOutput(outputs=outputs):
                    for output in outputs:
                        simulation.tokens[output.sequence_id].extend(output.token_ids)
                        states[output.sequence_id] += np.frombuffer(output.pooled, "<f4").tolist()
                case Finished(sequence_id=sequence_id):
                    ends[sequence_id] = outbound.message
    simulation.engine.check_integrity()
    return states, ends


def expected(simulation: Simulation, add: Add) -> float:
    assert add.pooling is not None
    return float(np.float32(simulation.executor.pool(add.prompt, add.pooling, add.digest, add.activation)))


@pytest.mark.parametrize("lookahead", [False, True], ids=["at-once", "a-step-ahead"])
@pytest.mark.parametrize("num_prompt", [1, 2, 7, 16, 33, 100])
def test_prompts_of_any_length_are_pooled_beside_generation(num_prompt: int, lookahead: bool) -> None:
    simulation = simulate_engine(adapters={"a": 2, "b": 1}, lookahead=lookahead, max_batch_tokens=7)
    pooled = [
        add_pooled(simulation, f"{pooling}-{digest}", pooling, num_prompt=num_prompt, digest=digest)
        for pooling in POOLINGS
        for digest in (None, "a", "b")
    ]
    pooled.append(
        add_pooled(simulation, "later", "mean", num_prompt=num_prompt, digest="a", activation=num_prompt // 2)
    )
    generated = [simulation.add(f"g{digest}", num_prompt=num_prompt, digest=digest) for digest in (None, "a")]
    states, ends = states_of(simulation)
    for add in pooled:
        end = ends[add.sequence_id]
        assert states[add.sequence_id] == [expected(simulation, add)], add.sequence_id
        assert (end.reason, end.prompt_tokens, end.completion_tokens, end.cached_tokens) == ("stop", num_prompt, 0, 0)
    for add in generated:
        assert simulation.tokens[add.sequence_id] == simulation.expected(add)
    stats = stats_of(simulation)
    assert stats.prompt_tokens == num_prompt * (len(pooled) + len(generated))
    assert stats.completion_tokens == 8


@pytest.mark.parametrize("lookahead", [False, True], ids=["at-once", "a-step-ahead"])
def test_rows_that_a_preemption_computes_again_are_pooled_once(lookahead: bool) -> None:
    simulation = simulate_engine(num_pages=8, lookahead=lookahead, max_batch_tokens=9)
    generated = [simulation.add(f"s{i}", num_prompt=20 - i, max_tokens=50) for i in range(2)]
    pooled = [add_pooled(simulation, f"{pooling}{i}", pooling, num_prompt=60) for pooling in POOLINGS for i in range(2)]
    states, _ = states_of(simulation)
    assert stats_of(simulation).recomputed_tokens > 0
    for add in pooled:
        assert states[add.sequence_id] == [expected(simulation, add)]
    for add in generated:
        assert simulation.tokens[add.sequence_id] == simulation.expected(add)


def test_a_pooled_prompt_neither_reads_nor_fills_the_prefix_cache() -> None:
    simulation = simulate_engine()
    prompt = tuple(range(100, 164))

    def run(name: str, pooling: str | None) -> Finished:
        tokens = 2 if pooling is None else 0
        add = simulation.make_add(name, prompt, tokens, isolation_key=b"tenant", pooling=pooling)
        simulation.engine.add(b"gateway", add)
        states, ends = states_of(simulation)
        if pooling is not None:
            assert states[name] == [expected(simulation, add)]
        return ends[name]

    run("first", "mean")
    assert len(simulation.prefixes) == 0
    assert run("plain", None).cached_tokens == 0
    assert run("again", None).cached_tokens > 0
    assert run("pooled", "mean").cached_tokens == 0


def test_a_state_that_is_not_finite_ends_only_its_own_sequence() -> None:
    simulation = simulate_engine(adapters={"a": 2}, max_batch_tokens=8)
    simulation.executor.not_finite_for.add("a")
    add_pooled(simulation, "broken", "mean", num_prompt=30, digest="a")
    whole = add_pooled(simulation, "whole", "mean", num_prompt=30)
    states, ends = states_of(simulation)
    assert ends["broken"].code == "not_finite"
    assert ends["whole"].reason == "stop"
    assert "broken" not in states
    assert states["whole"] == [expected(simulation, whole)]


@pytest.mark.parametrize("num_steps", range(1, 9))
def test_an_aborted_prompt_returns_nothing_and_leaks_nothing(num_steps: int) -> None:
    simulation = simulate_engine(lookahead=True, max_batch_tokens=8)
    add_pooled(simulation, "s", "mean", num_prompt=60)
    for _ in range(num_steps):
        simulation.engine.step()
    assert not simulation.engine.take_outbox()
    simulation.engine.abort(b"gateway", Abort(sequence_id="s"))
    states, ends = states_of(simulation)
    assert not states
    assert (ends["s"].reason, ends["s"].prompt_tokens) == ("abort", 60)


def test_an_extension_gives_a_pooled_prompt_no_tokens() -> None:
    simulation = simulate_engine()
    add = add_pooled(simulation, "s", num_prompt=30)
    simulation.engine.extend(b"gateway", Extend(sequence_id="s", max_tokens=9))
    states, ends = states_of(simulation)
    assert states["s"] == [expected(simulation, add)]
    assert ends["s"].completion_tokens == 0


@pytest.mark.parametrize(
    "fields",
    [
        {"pooling": "first"},
        {"max_tokens": 1},
        {"prompt": ()},
        {"grammar": "{}"},
        {"sampling": structs.replace(GREEDY, num_prompt_logprobs=1)},
        {"prompt": (1,) * 513},
        {"prompt": (1000,)},
    ],
    ids=["an unknown pooling", "tokens", "no prompt", "a grammar", "scores", "too long", "no such token"],
)
def test_a_pooled_sequence_that_cannot_run_is_refused(fields: dict[str, object]) -> None:
    simulation = simulate_engine()
    add = simulation.make_add("s", (1, 2, 3), 0, pooling="last")
    simulation.engine.add(b"gateway", structs.replace(add, **fields))
    [refused] = simulation.engine.take_outbox()
    assert isinstance(refused.message, Finished)
    assert refused.message.code in ("invalid_request", "prompt_too_long")


def test_a_prompt_as_long_as_the_context_is_pooled() -> None:
    simulation = simulate_engine(max_model_len=512)
    add = add_pooled(simulation, "s", "mean", num_prompt=512)
    states, _ = states_of(simulation)
    assert states["s"] == [expected(simulation, add)]


def test_a_state_held_for_a_slow_gateway_arrives_before_the_end() -> None:
    sent: list[object] = []
    link = GatewayLink(sent.append)
    link.post(StepOutput(outputs=(SequenceOutput(sequence_id="s", token_ids=(), pooled=b"1234"),)))
    end = Finished(sequence_id="s", reason="stop", prompt_tokens=1, completion_tokens=0)
    link.post(end)
    assert not sent
    link.grant(1)
    assert isinstance(sent[0], StepOutput)
    assert sent[0].outputs[0].pooled == b"1234"
    assert sent[1:] == [end]


@pytest.mark.parametrize("lookahead", [False, True], ids=["at-once", "a-step-ahead"])
def test_a_classifier_returns_the_logits_of_its_classes_beside_other_sequences(lookahead: bool) -> None:
    simulation = simulate_engine(
        adapters={"a": 2, "b": 1, "c": 1}, num_labels={"a": 3, "b": 1}, lookahead=lookahead, max_batch_tokens=9
    )
    adds = [
        add_pooled(simulation, f"{digest}{length}", digest=digest, num_labels=count, num_prompt=length)
        for length in (1, 9, 40)
        for digest, count in (("a", 3), ("b", 1), ("c", None), (None, None))
    ]
    generated = simulation.add("g", num_prompt=30, digest="c")
    states, ends = states_of(simulation)
    for add in adds:
        # The simulated head adds a class's number to the hidden state.
        labels = range(add.num_labels or 1)
        assert states[add.sequence_id] == [expected(simulation, add) + label for label in labels]
        assert ends[add.sequence_id].reason == "stop"
    assert simulation.tokens["g"] == simulation.expected(generated)


@pytest.mark.parametrize(
    ("digest", "fields"),
    [
        ("a", {"pooling": "last"}),
        ("a", {"pooling": "last", "num_labels": 2}),
        ("a", {"max_tokens": 2}),
        ("b", {"pooling": "last", "num_labels": 3}),
        ("a", {"pooling": "mean", "num_labels": 3}),
        ("a", {"max_tokens": 2, "num_labels": 3}),
        (None, {"pooling": "last", "num_labels": 3}),
        ("a", {"pooling": "last", "num_labels": 0}),
    ],
    ids=["embedding", "fewer classes", "tokens", "no head", "mean", "tokens with classes", "the base", "no classes"],
)
def test_a_classifier_does_nothing_else(digest: str | None, fields: dict[str, object]) -> None:
    simulation = simulate_engine(adapters={"a": 2, "b": 1}, num_labels={"a": 3})
    simulation.engine.add(b"", simulation.make_add("s", (1, 2), **{"max_tokens": 0, "digest": digest, **fields}))  # type: ignore[arg-type]
    states, ends = states_of(simulation)
    assert not states
    assert ends["s"].code == "invalid_request"


def test_a_pooled_prompt_that_fills_the_context_leaves_room_for_pins() -> None:
    simulation = simulate_engine(adapters={"a": 2}, max_batch_tokens=16, max_model_len=300)
    add_pooled(simulation, "s", num_prompt=300)
    simulation.step()
    simulation.engine.pin(b"gateway", Pin(call_id="p", digest="a"))
    for _ in range(3):
        simulation.step()
    assert [answer.state for answer in simulation.answers] == ["resident"]
    assert "s" not in simulation.finished


def test_a_pooled_prompt_that_fills_the_pool_beside_its_adapter_runs() -> None:
    simulation = simulate_engine(num_pages=10, adapters={"a": 2})
    add = add_pooled(simulation, "s", num_prompt=128, digest="a")
    states, ends = states_of(simulation)
    assert ends["s"].reason == "stop"
    assert states["s"] == [expected(simulation, add)]
