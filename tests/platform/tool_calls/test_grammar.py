from __future__ import annotations

import json
import random
from typing import Any

import jsonschema
import msgspec
import pytest
from llguidance import LLMatcher

from loramux.engine.constraints.constraint_grammar import GrammarRefused
from loramux.engine.constraints.limits import parser_limits
from loramux.platform.grammars import check as check_module
from loramux.platform.grammars.check import checked_grammar
from loramux.platform.tool_calls.events import ArgumentsEvent, CallBegun, TextEvent
from loramux.platform.tool_calls.grammar import AnswerRules, Calls, OfferedTool, Thinking
from loramux.platform.tool_calls.reasoning import ReasoningSplitter
from tests.engine.byte_vocabulary import EOS, TOKENS, VOCAB_SIZE, byte_vocabulary
from tests.engine.constraints.masks import allowed_tokens, follow
from tests.platform.tool_calls.tested_parsers import FORMATS, IDS, calls_of, new_parser, written_call

TOOLS = (
    OfferedTool(
        "get_weather",
        {
            "type": "object",
            "properties": {
                "city": {"$ref": "#/$defs/city"},
                "days": {"type": "integer", "minimum": 1, "maximum": 9},
                "unit": {"anyOf": [{"enum": ["c", "cf"]}, {"type": "null"}]},
                "parts": {"type": "array", "items": {"$ref": "#/$defs/city"}, "maxItems": 2},
            },
            "required": ["city"],
            "additionalProperties": False,
            "$defs": {"city": {"type": "string", "maxLength": 4}},
        },
    ),
    OfferedTool("now", {"type": "object", "properties": {}, "additionalProperties": False}),
)
SCHEMAS = {tool.name: tool.schema for tool in TOOLS}
VALIDATORS = {name: jsonschema.Draft202012Validator(schema) for name, schema in SCHEMAS.items()}
MAX_TOKENS = 400


def written(rules: AnswerRules, seed: int) -> str | None:
    """Return a random answer that follows the rules, or None if it does not end within MAX_TOKENS."""
    dice = random.Random(seed)
    vocabulary = byte_vocabulary()
    text = msgspec.json.encode(rules).decode()
    matcher = LLMatcher(vocabulary, checked_grammar("answer", text, vocabulary), limits=parser_limits())
    grammar, answer = follow(matcher, VOCAB_SIZE), b""
    for _ in range(MAX_TOKENS):
        mask = grammar.mask()
        if grammar.is_complete:
            return answer.decode()
        assert mask is not None, grammar.failure
        allowed = allowed_tokens(mask)
        if EOS in allowed and (len(allowed) == 1 or dice.random() < 0.2):
            return answer.decode()
        plain = [token for token in allowed if token != EOS and all(32 <= byte < 127 for byte in TOKENS[token])]
        token = dice.choice(plain or [token for token in allowed if token != EOS])
        answer += TOKENS[token]
        grammar.accept(token)
    return None


def accepts(rules: AnswerRules, text: str) -> bool:
    vocabulary = byte_vocabulary()
    grammar = checked_grammar("answer", msgspec.json.encode(rules).decode(), vocabulary)
    matcher = LLMatcher(vocabulary, grammar, limits=parser_limits())
    return matcher.consume_tokens(list(text.encode())) and matcher.is_accepting()


def read(text: str, format_name: str) -> tuple[str, list[tuple[str, str]]]:
    parser, content = new_parser(format_name, SCHEMAS), ""
    calls: list[tuple[str, str]] = []
    for event in [*parser.feed(text), *parser.finish()]:
        match event:
            case TextEvent(piece):
                content += piece
            case CallBegun(_, name):
                calls.append((name, ""))
            case ArgumentsEvent(index, piece):
                calls[index] = (calls[index][0], calls[index][1] + piece)
    return content, calls


def check(calls: list[tuple[str, str]]) -> None:
    for name, arguments in calls:
        VALIDATORS[name].validate(json.loads(arguments))


@pytest.mark.parametrize("format_name", FORMATS, ids=IDS)
@pytest.mark.parametrize("is_parallel", [True, False], ids=["parallel", "single"])
def test_forced_answers_are_calls(format_name: str, is_parallel: bool) -> None:
    rules = AnswerRules(calls=calls_of(format_name, TOOLS, is_forced=True, is_parallel=is_parallel))
    answers = [answer for seed in range(12) if (answer := written(rules, seed)) is not None]
    assert len(answers) >= 6
    counts = set()
    for answer in answers:
        content, calls = read(answer, format_name)
        assert not content, answer
        check(calls)
        counts.add(len(calls))
    assert counts == {1} if not is_parallel else max(counts) > 1


CALL_OF = {
    "functiongemma": "<start_function_call>call:now{}<end_function_call>",
    "gemma4": "<|tool_call>call:now{}<tool_call|>",
    "glm45": "<tool_call>now</tool_call>",
    "hermes": '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>',
    "llama3_json": '{"name": "now", "parameters": {}}',
    "minimax_m2": '<minimax:tool_call>\n<invoke name="now">\n</invoke>\n</minimax:tool_call>',
    "mistral": '[TOOL_CALLS][{"name": "now", "arguments": {}}]',
    "phi": '<|tool_call|>[{"name": "now", "arguments": {}}]<|/tool_call|>',
    "pythonic": '[{"name": "now", "arguments": {}}]',
    "qwen3_coder": "<tool_call>\n<function=now>\n</function>\n</tool_call>",
    "seed_oss": "<seed:tool_call>\n<function=now>\n</function>\n</seed:tool_call>",
}


@pytest.mark.parametrize("format_name", FORMATS, ids=IDS)
def test_text_is_free_until_a_call_begins(format_name: str) -> None:
    rules = AnswerRules(calls=calls_of(format_name, TOOLS, is_forced=False, is_parallel=False))
    call = CALL_OF.get(format_name) or written_call(format_name, "now", "{}")
    assert accepts(rules, call)
    assert accepts(rules, "It is warm. ")
    assert not accepts(rules, call.replace("now", "never"))


@pytest.mark.parametrize("is_open", [True, False], ids=["open", "optional"])
def test_grammar_begins_after_the_thinking(is_open: bool) -> None:
    rules = AnswerRules(
        thinking=Thinking("<think>", "</think>", is_open), grammar=("json_schema", '{"const": {"a": 1}}')
    )
    thought = "Why </b> so?</think>" if is_open else "<think>Why </b> so?</think>"
    answer = thought + '\n\n{"a":1}'
    assert accepts(rules, answer)
    assert not accepts(rules, thought + "\n\nno")
    assert accepts(rules, '{"a":1}') != is_open
    splitter = ReasoningSplitter(is_open=is_open)
    reasoning, content = splitter.feed(answer)
    assert (reasoning, content) == ("Why </b> so?", '{"a":1}')


def test_markers_that_are_special_tokens_are_written_by_their_ids() -> None:
    special = {"[TOOL_CALLS]": EOS}
    rules = AnswerRules(calls=Calls("mistral", TOOLS, is_forced=True, is_parallel=False), special_tokens=special)
    vocabulary = byte_vocabulary()
    grammar = checked_grammar("answer", msgspec.json.encode(rules).decode(), vocabulary)
    matcher = LLMatcher(vocabulary, grammar, limits=parser_limits())
    assert matcher.consume_tokens([EOS, *b'[{"name": "now"'])
    assert not LLMatcher(vocabulary, grammar, limits=parser_limits()).consume_tokens(list(b"[TOOL"))


def test_answers_are_calls_or_follow_the_other_constraint() -> None:
    calls = Calls("hermes", TOOLS, is_forced=False, is_parallel=False)
    rules = AnswerRules(calls=calls, grammar=("choice", '["yes", "no"]'))
    for text, is_accepted in (("yes", True), (CALL_OF["hermes"], True), ("maybe", False)):
        assert accepts(rules, text) == is_accepted


@pytest.mark.parametrize(
    ("last", "grammar", "said", "param"),
    [
        ("uri-reference", None, "tool_299: Unknown format: uri-reference", "tools[299].function.parameters"),
        ("uri", ("json_schema", '{"uniqueItems": true}'), 'Unimplemented keys: ["uniqueItems"]', None),
    ],
    ids=["the last tool", "the response format"],
)
def test_invalid_part_is_found_without_trying_out_the_others(
    last: str, grammar: tuple[str, str] | None, said: str, param: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    num_compiled = 0
    compiled = check_module._matcher

    def counted(*arguments: Any) -> Any:
        nonlocal num_compiled
        num_compiled += 1
        return compiled(*arguments)

    monkeypatch.setattr(check_module, "_matcher", counted)
    monkeypatch.setattr(check_module, "_try_out", None)
    schemas = [{"type": "object", "properties": {"x": {"type": "string", "format": name}}} for name in ("uri", last)]
    tools = [
        OfferedTool(f"tool_{index}", schemas[index // 299], f"tools[{index}].function.parameters")
        for index in range(300)
    ]
    calls = Calls("hermes", tuple(tools), is_forced=False, is_parallel=True)
    text = msgspec.json.encode(AnswerRules(calls=calls, grammar=grammar)).decode()
    with pytest.raises(GrammarRefused) as refusal:
        checked_grammar("answer", text, byte_vocabulary())
    assert (refusal.value.message, refusal.value.param) == (said, param)
    assert num_compiled <= 3
