"""The notes of the gateways' campaign about drafts agree with the engine, which counts on its own."""

from __future__ import annotations

import io
from pathlib import Path

from loramux.engine.protocol.messages import Add, Finished, SamplingParams
from tests.conformance.noted_ends import DraftCounts, read_ends
from tests.conformance.noted_engine import NotedEngine
from tests.engine.simulated_engine import simulate_engine, stats_of

BIASES = ((1, 12.0), (2, 10.5))


def test_noted_drafts_are_those_of_the_engine(tmp_path: Path) -> None:
    simulation, ends = simulate_engine(speculates=True), io.StringIO()
    engine = NotedEngine(simulation, 0.0, ends, None)
    sampling = [
        SamplingParams(seed=1, ignore_eos=True, logit_bias=BIASES),
        SamplingParams(seed=2, ignore_eos=True, logit_bias=BIASES, min_tokens=20, stop_token_ids=(2,)),
        SamplingParams(seed=3, ignore_eos=True, logit_bias=BIASES),
    ]
    for number, one in enumerate(sampling):
        prediction = (1,) * 60 if number < 2 else ()
        engine.add(b"g", Add(sequence_id=f"{number}", prompt=(5,), max_tokens=60, sampling=one, prediction=prediction))
    finished: dict[str, Finished] = {}
    while engine.has_work:
        engine.step()
        messages = [outbound.message for outbound in engine.take_outbox()]
        finished |= {one.sequence_id: one for one in messages if isinstance(one, Finished)}
    file = tmp_path / "ends"
    file.write_text(ends.getvalue())
    noted = {end.sequence_id: end for end in read_ends(file)}
    assert [finished[name].reason for name in "012"] == ["length", "stop", "length"]
    for name, end in finished.items():
        drafted, accepted = noted[name].drafts.get("prediction", (0, 0))
        told = (end.completion_tokens, end.accepted_prediction_tokens, end.rejected_prediction_tokens)
        assert (noted[name].completion_tokens, accepted, drafted - accepted) == told
    counts, drafts = DraftCounts.of(noted.values()), stats_of(simulation).drafts
    assert counts.accepted["text"] == drafts.accepted_text_tokens > 0
    assert counts.drafted["text"] == drafts.text_tokens > drafts.accepted_text_tokens
    assert counts.accepted["prediction"] == drafts.accepted_prediction_tokens > 0
    assert counts.drafted["prediction"] == drafts.prediction_tokens > drafts.accepted_prediction_tokens
