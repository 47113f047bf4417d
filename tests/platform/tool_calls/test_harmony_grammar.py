from __future__ import annotations

import re

import msgspec
import pytest
from llguidance import LLMatcher

from loramux.engine.constraints.limits import parser_limits
from loramux.platform.grammars.check import checked_grammar
from loramux.platform.tool_calls.grammar import AnswerRules, Calls, OfferedTool, OpenChannels
from loramux.platform.tool_calls.harmony import MARKERS
from tests.engine.byte_vocabulary import EOS, vocabulary_with_markers

STRICT = {"type": "object", "properties": {"x": {"type": "integer"}}, "required": ["x"], "additionalProperties": False}
TOOLS = (OfferedTool("f", STRICT), OfferedTool("ff", {"type": "object"}))
BEGUN = OpenChannels(has_start=True, channel=None)
JSON = ("json_schema", '{"const": {"a": 1}}')
ANALYSIS = "<|channel|>analysis<|message|>Why <so>?\n<|end|><|start|>assistant"
PREAMBLE = "<|channel|>commentary<|message|>I look.<|end|><|start|>assistant"
FINAL = "<|channel|>final<|message|>"
TO_F = "<|channel|>commentary to=functions.f <|constrain|>json<|message|>"
CALL = TO_F + '{"x": 1}'


def accepts(rules: AnswerRules, answer: str) -> bool:
    vocabulary = vocabulary_with_markers(MARKERS)
    grammar = checked_grammar("answer", msgspec.json.encode(rules).decode(), vocabulary)
    matcher = LLMatcher(vocabulary, grammar, limits=parser_limits(), log_level=0)
    parts = re.split("(" + "|".join(map(re.escape, MARKERS)) + ")", answer)
    tokens = [
        token for part in parts for token in ([EOS + 1 + MARKERS.index(part)] if part in MARKERS else part.encode())
    ]
    return matcher.consume_tokens(tokens) and matcher.is_accepting()


def rules(
    grammar: tuple[str, str] | None = None, is_forced: bool | None = None, channels: OpenChannels = BEGUN
) -> AnswerRules:
    """Rules with tools, unless `is_forced` is None."""
    calls = None if is_forced is None else Calls("harmony", TOOLS, is_forced=is_forced, is_parallel=True)
    ids = {marker: EOS + 1 + index for index, marker in enumerate(MARKERS)}
    return AnswerRules(channels=channels, calls=calls, grammar=grammar, special_tokens=ids)


@pytest.mark.parametrize("before", ["", ANALYSIS, ANALYSIS + PREAMBLE + ANALYSIS], ids=["none", "one", "three"])
def test_constraints_apply_to_the_final_message(before: str) -> None:
    assert accepts(rules(JSON), f'{before}{FINAL}{{"a":1}}')
    for wrong in (
        '{"a":1}',
        f"{FINAL}no",
        '<|channel|>analysis<|message|>{"a":1}',
        CALL,
        f'{FINAL}{{"a":1}}<|end|>',
    ):
        assert not accepts(rules(JSON), before + wrong), wrong


SPELLINGS = (
    CALL,
    '<|channel|>commentary to=functions.f<|message|>{"x": 1}',
    ' to=functions.f<|channel|>commentary json<|message|>{"x": 1}',
    '<|channel|>commentary to=functions.ff json<|message|>{"y": ""}',
)


@pytest.mark.parametrize("call", SPELLINGS)
def test_forced_answers_end_with_one_call(call: str) -> None:
    assert accepts(rules(is_forced=True), ANALYSIS + PREAMBLE + call)
    for wrong in (f"{FINAL}Hi", call + "<|call|><|start|>assistant" + call, ANALYSIS):
        assert not accepts(rules(is_forced=True), wrong), wrong


@pytest.mark.parametrize(
    "wrong", [f'{TO_F}{{"x": "1"}}', CALL.replace("functions.f", "functions.g"), CALL.replace("commentary", "final")]
)
def test_calls_follow_their_schema(wrong: str) -> None:
    for one in (rules(is_forced=True), rules(is_forced=False), rules(JSON, is_forced=False)):
        assert accepts(one, CALL)
        assert not accepts(one, wrong)


def test_text_can_replace_a_call_that_is_not_forced() -> None:
    to_f = "to=functions.f <channel> {"
    assert accepts(rules(is_forced=False), f"{ANALYSIS}{FINAL}Anything {to_f}")
    assert accepts(rules(JSON, is_forced=False), f'{FINAL}{{"a":1}}')
    assert not accepts(rules(JSON, is_forced=False), f"{FINAL}Anything")


@pytest.mark.parametrize(
    ("channels", "is_forced", "answer"),
    [
        (OpenChannels(has_start=False, channel=None), None, f'<|start|>assistant{FINAL}{{"a":1}}'),
        (OpenChannels(has_start=False, channel="final"), None, '{"a":1}'),
        (OpenChannels(has_start=False, channel="final"), True, f".<|end|><|start|>assistant{CALL}"),
        (OpenChannels(has_start=False, channel="analysis"), None, f'So.<|end|><|start|>assistant{FINAL}{{"a":1}}'),
    ],
    ids=["after a message", "in the text", "in the text, forced", "in the reasoning"],
)
def test_grammar_begins_where_the_prompt_ends(channels: OpenChannels, is_forced: bool | None, answer: str) -> None:
    grammar = None if is_forced else JSON
    assert accepts(rules(grammar, is_forced, channels), answer)
    assert not accepts(rules(grammar, is_forced), answer)
