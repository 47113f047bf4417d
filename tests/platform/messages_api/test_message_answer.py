from __future__ import annotations

import json

import msgspec
import pytest

from loramux.platform.errors import RateLimited
from loramux.platform.generation.choice import ChoiceDelta
from loramux.platform.generation.generation import Usage
from loramux.platform.messages_api.message_answer import MessageAnswer
from loramux.platform.messages_api.message_blocks import BlockEvents
from loramux.platform.messages_api.signatures import sign
from loramux.platform.tool_calls.events import ArgumentsEvent, CallBegun, CallEnded

TRANSCRIPT = """\
event: message_start
data: {"type":"message_start","message":{"id":"msg_7","type":"message","role":"assistant","model":"m","content":[],\
"stop_reason":null,"stop_sequence":null,"usage":{"input_tokens":25,"cache_creation_input_tokens":0,\
"cache_read_input_tokens":0,"output_tokens":0,"service_tier":"standard"}}}

event: content_block_start
data: {"type":"content_block_start","index":0,"content_block":{"type":"thinking","thinking":"","signature":""}}

event: ping
data: {"type":"ping"}

event: content_block_delta
data: {"type":"content_block_delta","index":0,"delta":{"type":"thinking_delta","thinking":"Hm."}}

event: content_block_delta
data: {"type":"content_block_delta","index":0,"delta":{"type":"signature_delta","signature":"SIGNATURE"}}

event: content_block_stop
data: {"type":"content_block_stop","index":0}

event: content_block_start
data: {"type":"content_block_start","index":1,"content_block":{"type":"text","text":""}}

event: content_block_delta
data: {"type":"content_block_delta","index":1,"delta":{"type":"text_delta","text":"Let me"}}

event: content_block_delta
data: {"type":"content_block_delta","index":1,"delta":{"type":"text_delta","text":" look."}}

event: content_block_stop
data: {"type":"content_block_stop","index":1}

event: content_block_start
data: {"type":"content_block_start","index":2,"content_block":{"type":"tool_use","id":"CALL","name":"look","input":{}}}

event: content_block_delta
data: {"type":"content_block_delta","index":2,"delta":{"type":"input_json_delta","partial_json":""}}

event: content_block_delta
data: {"type":"content_block_delta","index":2,"delta":{"type":"input_json_delta",\
"partial_json":"{\\"city\\": \\"Rome\\"}"}}

event: content_block_stop
data: {"type":"content_block_stop","index":2}

event: message_delta
data: {"type":"message_delta","delta":{"stop_reason":"tool_use","stop_sequence":null},"usage":{"input_tokens":9,\
"cache_creation_input_tokens":0,"cache_read_input_tokens":16,"output_tokens":8,\
"output_tokens_details":{"thinking_tokens":2}}}

event: message_stop
data: {"type":"message_stop"}

"""
"""Every event of a stream that succeeds, in the order of Anthropic's documentation."""


def made(*, is_clipped: bool = False) -> MessageAnswer:
    return MessageAnswer("req_7", "m", 25, BlockEvents(None), "default", is_clipped=is_clipped)


def test_a_stream_equals_the_transcript() -> None:
    answer = made()
    calls = (CallBegun(0, "look"), ArgumentsEvent(0, '{"city": "Rome"}'), CallEnded(0))
    deltas = [
        ChoiceDelta(0, "", (), None, token_ids=(1,), reasoning="Hm."),
        ChoiceDelta(0, "Let me", (), None, token_ids=(2,)),
        ChoiceDelta(0, " look.", (), None, token_ids=(3,)),
        ChoiceDelta(0, "", (), "stop", parts=calls),
    ]
    sent = b"".join(map(answer.events, deltas)) + answer.end(Usage(25, 8, 16, 2))
    call_id = json.loads(sent.split(b"event: ")[11].partition(b"data: ")[2])["content_block"]["id"]
    expected = TRANSCRIPT.replace("SIGNATURE", sign("Hm.")).replace("CALL", call_id)
    assert sent.decode() == expected


def test_a_failure_is_an_error_event() -> None:
    assert made().failure(RateLimited("too many")) == (
        b'event: error\ndata: {"type":"error","error":{"type":"rate_limit_error","message":"too many"},'
        b'"request_id":"req_7"}\n\n'
    )


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("", {}),
        ('{"a": [1, "x"]}', {"a": [1, "x"]}),
        ('{"a": {"b": "it is', {"a": {"b": "it is"}}),
        ("[1]", {"INVALID_JSON": "[1]"}),
        ('{"a" 1}', {"INVALID_JSON": '{"a" 1}'}),
        ('{"a": NaN}', {"INVALID_JSON": '{"a": NaN}'}),
        ("[" * 5000, {"INVALID_JSON": "[" * 5000}),
    ],
    ids=["none", "whole", "cut off", "a list", "malformed", "no number", "too deep"],
)
def test_the_input_of_a_call_is_an_object(text: str, shown: dict[str, object]) -> None:
    calls = (CallBegun(0, "look"), ArgumentsEvent(0, text), CallEnded(0))
    whole = made().whole([ChoiceDelta(0, "", (), "stop", parts=calls)], Usage(25, 8, 16))
    assert json.loads(msgspec.json.encode(whole))["content"][0]["input"] == shown


@pytest.mark.parametrize("number", ["1" * 40, "1e999"])
def test_numbers_that_no_machine_type_holds_are_passed_on(number: str) -> None:
    calls = (CallBegun(0, "look"), ArgumentsEvent(0, f'{{"a": {number}}}'), CallEnded(0))
    whole = made().whole([ChoiceDelta(0, "", (), "stop", parts=calls)], Usage(25, 8, 16))
    assert f'{{"a": {number}}}'.encode() in msgspec.json.encode(whole)


@pytest.mark.parametrize(
    ("last", "is_clipped", "reason", "sequence"),
    [
        (ChoiceDelta(0, "", (), "stop"), False, "end_turn", None),
        (ChoiceDelta(0, "", (), "stop", stop_reason="END"), True, "stop_sequence", "END"),
        (ChoiceDelta(0, "", (), "length"), False, "max_tokens", None),
        (ChoiceDelta(0, "", (), "length"), True, "model_context_window_exceeded", None),
        (ChoiceDelta(0, "", (), "stop", parts=(CallBegun(0, "f"), CallEnded(0))), False, "tool_use", None),
        (ChoiceDelta(0, "", (), "stop", parts=(CallBegun(0, "f"),)), False, "end_turn", None),
    ],
)
def test_stop_reasons(last: ChoiceDelta, is_clipped: bool, reason: str, sequence: str | None) -> None:
    whole = made(is_clipped=is_clipped).whole([last], Usage(25, 8, 16))
    assert (whole["stop_reason"], whole["stop_sequence"]) == (reason, sequence)


def test_blocks_keep_the_order_in_which_the_model_wrote_them() -> None:
    deltas = [
        ChoiceDelta(0, "", (), None, reasoning="A"),
        ChoiceDelta(0, "b", (), None),
        ChoiceDelta(0, "", (), None, reasoning="C"),
        ChoiceDelta(0, "d", (), "stop"),
    ]
    content = made().whole(deltas, Usage(25, 8, 16))["content"]
    assert [block.get("thinking", block.get("text")) for block in content] == ["A", "b", "C", "d"]
