from __future__ import annotations

import msgspec
import pytest

from loramux.engine.protocol.messages import (
    EngineReady,
    Finished,
    FromEngine,
    PromptLogprob,
    SequenceOutput,
    StepOutput,
    TokenLogprobs,
)
from loramux.engine.server import gateway_link
from loramux.engine.server.gateway_link import GatewayLink


def output(name: str, *tokens: int) -> StepOutput:
    return StepOutput(outputs=(SequenceOutput(sequence_id=name, token_ids=tokens),))


def end(name: str) -> Finished:
    return Finished(sequence_id=name, reason="length", prompt_tokens=1, completion_tokens=1)


def test_messages_are_sent_immediately_with_credit() -> None:
    sent: list[FromEngine] = []
    link = GatewayLink(sent.append)
    link.grant(2)
    for message in (output("a", 1), output("a", 2), end("a")):
        link.post(message)
    assert sent == [output("a", 1), output("a", 2), end("a")]


def test_tokens_are_merged_before_the_final_message_without_credit() -> None:
    sent: list[FromEngine] = []
    link = GatewayLink(sent.append)
    for message in (output("a", 1), output("b", 7), output("a", 2), end("a"), output("b", 8)):
        link.post(message)
    assert sent == []
    link.grant(1)
    both = (SequenceOutput(sequence_id="a", token_ids=(1, 2)), SequenceOutput(sequence_id="b", token_ids=(7, 8)))
    assert sent == [StepOutput(outputs=both), end("a")]


def test_other_messages_need_no_credit() -> None:
    sent: list[FromEngine] = []
    ready = EngineReady(max_model_len=1, num_pages=1, page_tokens=16, device="cpu", dtype="float32")
    GatewayLink(sent.append).post(ready)
    assert sent == [ready]


def test_final_message_without_tokens_needs_no_credit() -> None:
    sent: list[FromEngine] = []
    GatewayLink(sent.append).post(end("refused"))
    assert sent == [end("refused")]


def test_held_output_is_sent_in_messages_of_bounded_size(monkeypatch: pytest.MonkeyPatch) -> None:
    max_bytes = 2000
    monkeypatch.setattr(gateway_link, "MAX_OUTPUT_BYTES", max_bytes)
    top = tuple((1 << 17, -1.25) for _ in range(20))
    scores = tuple(PromptLogprob(1 << 17, -2.5, 1, top) for _ in range(9))
    entries = tuple(TokenLogprobs(1 << 17, -2.5, top) for _ in range(7))
    held = [
        SequenceOutput(
            sequence_id="scored", token_ids=(1 << 17,) * len(entries), logprobs=entries, prompt_logprobs=scores
        ),
        SequenceOutput(sequence_id="long", token_ids=tuple(range(100_000, 102_000))),
        *(SequenceOutput(sequence_id=f"pooled-{i}", token_ids=(), pooled=b"x" * 900) for i in range(5)),
    ]
    sent: list[FromEngine] = []
    link = GatewayLink(sent.append)
    for one in held:
        link.post(StepOutput(outputs=(one,)))
        link.post(end(one.sequence_id))
    for _ in range(100):
        link.grant(1)
    outputs = [output for message in sent if isinstance(message, StepOutput) for output in message.outputs]
    # A pooled state is sent whole.
    assert max(len(msgspec.msgpack.encode(message)) for message in sent) <= max_bytes + 1000
    merged: dict[str, gateway_link.HeldTokens] = {}
    for one in outputs:
        merged.setdefault(one.sequence_id, gateway_link.HeldTokens()).join(one)
    assert [merged[one.sequence_id].output(one.sequence_id) for one in held] == held
    ends = [index for index, message in enumerate(sent) if message == end("scored")]
    assert not any("scored" in str(message) for message in sent[ends[0] + 1 :]), "the end follows the last token"
