"""What is believed about a pooled sequence that another server runs."""

from __future__ import annotations

import struct

import pytest
from msgspec import structs

from loramux.engine.protocol.messages import Add, Finished, SamplingParams, SequenceOutput, StepOutput
from loramux.platform.engine_link.sequence_stream import SequenceStream
from loramux.platform.replicas.frame_link import FrameRefused
from loramux.platform.replicas.peer_answers import MAX_STATE_SIZE, check_answer

STATE = struct.pack("<2f", 0.5, -2.0)
END = Finished(sequence_id="s", reason="stop", prompt_tokens=3, completion_tokens=0)


def pooled_stream() -> dict[str, SequenceStream]:
    add = Add(sequence_id="s", prompt=(1, 2, 3), max_tokens=0, sampling=SamplingParams(), pooling="mean")
    return {"s": SequenceStream(add)}


def step(pooled: bytes, *token_ids: int) -> StepOutput:
    return StepOutput(outputs=(SequenceOutput(sequence_id="s", token_ids=token_ids, pooled=pooled),))


def test_a_state_and_its_end_are_believed() -> None:
    streams = pooled_stream()
    check_answer(step(STATE), streams)
    streams["s"].put(step(STATE).outputs[0])
    check_answer(END, streams)


@pytest.mark.parametrize(
    "message",
    [
        step(STATE[:-1]),
        step(struct.pack("<f", float("nan"))),
        step(struct.pack("<f", float("inf"))),
        step(bytes(4 * (MAX_STATE_SIZE + 1))),
        step(STATE, 5),
        END,
    ],
    ids=["half a number", "not a number", "infinity", "a huge state", "a token", "an end without a state"],
)
def test_anything_else_is_refused(message: StepOutput | Finished) -> None:
    with pytest.raises(FrameRefused):
        check_answer(message, pooled_stream())


@pytest.mark.parametrize(("accepted", "rejected"), [(3, 0), (-1, 0), (0, -1)])
def test_counts_of_a_prediction_must_be_possible(accepted: int, rejected: int) -> None:
    add = Add(sequence_id="s", prompt=(1, 2, 3), max_tokens=4, sampling=SamplingParams(), prediction=(5, 6))
    streams = {"s": SequenceStream(add)}
    output = SequenceOutput(sequence_id="s", token_ids=(5,))
    check_answer(StepOutput(outputs=(output,)), streams)
    streams["s"].put(output)
    end = Finished(sequence_id="s", reason="stop", prompt_tokens=3, completion_tokens=2)
    check_answer(structs.replace(end, accepted_prediction_tokens=2, rejected_prediction_tokens=9), streams)
    impossible = structs.replace(end, accepted_prediction_tokens=accepted, rejected_prediction_tokens=rejected)
    with pytest.raises(FrameRefused):
        check_answer(impossible, streams)


@pytest.mark.parametrize(("cached", "is_believed"), [(3, True), (4, False), (-1, False)])
def test_cached_tokens_are_tokens_of_the_prompt(cached: int, is_believed: bool) -> None:
    output = SequenceOutput(sequence_id="s", token_ids=(), cached_tokens=cached)
    if is_believed:
        check_answer(StepOutput(outputs=(output,)), pooled_stream())
        return
    with pytest.raises(FrameRefused):
        check_answer(StepOutput(outputs=(output,)), pooled_stream())


def test_two_states_in_one_message_are_refused() -> None:
    (output,) = step(STATE).outputs
    with pytest.raises(FrameRefused):
        check_answer(StepOutput(outputs=(output, output)), pooled_stream())


@pytest.mark.parametrize(("num_labels", "is_believed"), [(2, True), (1, False), (3, False)])
def test_logits_are_those_of_the_adapters_classes(num_labels: int, is_believed: bool) -> None:
    add = structs.replace(pooled_stream()["s"].add, num_labels=num_labels)
    streams = {"s": SequenceStream(add)}
    if is_believed:
        check_answer(step(STATE), streams)
        return
    with pytest.raises(FrameRefused):
        check_answer(step(STATE), streams)


def test_a_second_state_is_refused() -> None:
    streams = pooled_stream()
    streams["s"].put(step(STATE).outputs[0])
    with pytest.raises(FrameRefused):
        check_answer(step(STATE), streams)
