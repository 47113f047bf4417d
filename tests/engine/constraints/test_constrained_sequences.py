from __future__ import annotations

import json
import re
import time
from collections import defaultdict

import pytest
from llguidance import LLMatcher

from loramux.engine.protocol.messages import Add, Finished, SamplingParams, StepOutput
from tests.engine.byte_vocabulary import EOS, ids, text
from tests.engine.simulated_engine import GREEDY, Simulate, Simulation

pytestmark = pytest.mark.usefixtures("shared_grammar_processes")

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
    },
    "required": ["name", "age"],
    "additionalProperties": False,
}
PERSON_GRAMMAR = LLMatcher.grammar_from_json_schema(PERSON, overrides={"whitespace_flexible": False})


def add(name: str, grammar: str = "", prompt: str = "Tell me", max_tokens: int = 200, **fields: object) -> Add:
    fields.setdefault("sampling", SamplingParams(seed=len(name)))
    return Add(sequence_id=name, prompt=tuple(ids(prompt)), max_tokens=max_tokens, grammar=grammar, **fields)  # type: ignore[arg-type]


def run(simulation: Simulation) -> tuple[dict[str, list[int]], dict[str, Finished]]:
    tokens: dict[str, list[int]] = defaultdict(list)
    ends: dict[str, Finished] = {}
    deadline_s = time.monotonic() + 60
    while simulation.engine.has_work:
        assert time.monotonic() < deadline_s
        if not simulation.engine.step():
            time.sleep(0.001)
        for outbound in simulation.engine.take_outbox():
            match outbound.message:
                case StepOutput(outputs=outputs):
                    for output in outputs:
                        tokens[output.sequence_id] += output.token_ids
                case Finished() as finished:
                    ends[finished.sequence_id] = finished
    return tokens, ends


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_an_answer_follows_its_schema_and_ends_with_it(simulate: Simulate, temperature: float) -> None:
    simulation = simulate(eos=(EOS,))
    for index in range(8):
        sampling = SamplingParams(temperature=temperature, seed=index)
        simulation.engine.add(b"", add(str(index), PERSON_GRAMMAR, f"prompt {index}", sampling=sampling))
    tokens, ends = run(simulation)
    assert {end.reason for end in ends.values()} == {"stop"}
    for answer in tokens.values():
        person = json.loads(text(answer))
        assert (list(person), 0 <= person["age"] <= 150) == (["name", "age"], True)


def test_free_sequences_choose_the_same_tokens_next_to_constrained_ones(simulate: Simulate) -> None:
    free = [add(f"free {index}", prompt=f"text {index}", max_tokens=40) for index in range(6)]
    alone = simulate(eos=(EOS,))
    for one in free:
        alone.engine.add(b"", one)
    expected, _ = run(alone)
    mixed = simulate(eos=(EOS,))
    for index, one in enumerate(free):
        mixed.engine.add(b"", one)
        mixed.engine.add(b"", add(f"person {index}", PERSON_GRAMMAR, f"prompt {index}"))
    tokens, _ = run(mixed)
    assert {name: answer for name, answer in tokens.items() if name.startswith("free")} == expected


def test_a_preempted_sequence_continues_its_grammar(simulate: Simulate) -> None:
    """The pool has too few pages for all answers, so some sequences are preempted and recomputed."""
    grammar = LLMatcher.grammar_from_regex("([a-f]{5} ){20}end")
    simulation = simulate(num_pages=16, eos=(EOS,))
    for index in range(4):
        simulation.engine.add(b"", add(str(index), grammar, f"prompt {index}", max_tokens=140))
    tokens, ends = run(simulation)
    assert simulation.scheduler.num_preemptions > 0
    assert {end.reason for end in ends.values()} == {"stop"}
    for answer in tokens.values():
        assert re.fullmatch("([a-f]{5} ){20}end", text(answer))


def test_the_end_of_the_grammar_ends_the_sequence_whatever_its_settings(simulate: Simulate) -> None:
    simulation = simulate(eos=(EOS,))
    sampling = SamplingParams(ignore_eos=True, min_tokens=50, seed=1)
    simulation.engine.add(b"", add("short", LLMatcher.grammar_from_regex("yes|no"), sampling=sampling))
    tokens, ends = run(simulation)
    assert (text(tokens["short"]) in {"yes", "no"}, ends["short"].reason) == (True, "stop")


def test_stop_tokens_can_end_a_grammar_where_it_may_end(simulate: Simulate) -> None:
    """Adapters have end tokens that the grammar's vocabulary does not know as such."""
    simulation = simulate(eos=(EOS,))
    for stop in (700, ord("a")):
        bias = ((ord("a"), -100.0), (EOS, -100.0), (stop, 100.0))
        sampling = SamplingParams(stop_token_ids=(stop,), logit_bias=tuple(sorted(dict(bias).items())), seed=1)
        grammar = LLMatcher.grammar_from_regex("[a-c]{3,50}")
        simulation.engine.add(b"", add(f"{stop}", grammar, max_tokens=40, sampling=sampling))
    tokens, ends = run(simulation)
    assert re.fullmatch("[a-c]{3,5}", text(tokens["700"])), "the first token after which the answer may end is 700"
    assert ends["700"].stop_token_id == 700
    assert (tokens[f"{ord('a')}"], ends[f"{ord('a')}"].stop_token_id) == ([], ord("a"))


def test_min_tokens_keeps_a_grammar_from_ending_early_where_it_may_go_on(simulate: Simulate) -> None:
    simulation = simulate(eos=(EOS,))
    sampling = SamplingParams(min_tokens=30, seed=1)
    simulation.engine.add(b"", add("long", LLMatcher.grammar_from_regex("[a-c]*"), max_tokens=60, sampling=sampling))
    tokens, _ = run(simulation)
    assert len(tokens["long"]) >= 30
    assert re.fullmatch("[a-c]*", text(tokens["long"]))


@pytest.mark.parametrize(
    "grammar",
    [
        pytest.param("start: undefined", id="undefined rule"),
        pytest.param('start: "a" start', id="forced for ever"),
        pytest.param("{", id="not a grammar"),
    ],
)
def test_a_grammar_that_fails_ends_its_own_sequence_alone(simulate: Simulate, grammar: str) -> None:
    simulation = simulate(eos=(EOS,))
    simulation.engine.add(b"", add("broken", grammar))
    simulation.engine.add(b"", add("beside", max_tokens=5, sampling=GREEDY))
    _, ends = run(simulation)
    assert (ends["broken"].reason, ends["broken"].code) == ("error", "grammar_failed")
    assert ends["broken"].message
    assert ends["beside"].reason == "length"
    simulation.engine.check_integrity()


def test_an_aborted_sequence_may_wait_for_its_grammar(simulate: Simulate) -> None:
    from loramux.engine.protocol.messages import Abort

    simulation = simulate(eos=(EOS,))
    simulation.engine.add(b"", add("gone", PERSON_GRAMMAR))
    simulation.engine.abort(b"", Abort(sequence_id="gone"))
    simulation.engine.add(b"", add("stays", PERSON_GRAMMAR))
    _, ends = run(simulation)
    assert (ends["gone"].reason, ends["stays"].reason) == ("abort", "stop")
