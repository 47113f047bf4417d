"""What is believed about a pooled sequence that another server runs."""

from __future__ import annotations

import struct

import pytest

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


def test_a_second_state_is_refused() -> None:
    streams = pooled_stream()
    streams["s"].put(step(STATE).outputs[0])
    with pytest.raises(FrameRefused):
        check_answer(step(STATE), streams)
