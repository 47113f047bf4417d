from __future__ import annotations

from loramux.engine.protocol.messages import EngineReady, Finished, FromEngine, SequenceOutput, StepOutput
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
