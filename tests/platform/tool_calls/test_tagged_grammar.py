"""Grammars of calls with arguments between tags, against the parsers and the real library."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest
from llguidance import LLMatcher, LLParserLimits

from loramux.engine.constraints.limits import MAX_LEXER_STATES, parser_limits
from loramux.platform.grammars.check import checked_grammar
from loramux.platform.tool_calls.call_syntax import SYNTAXES
from loramux.platform.tool_calls.events import ArgumentsEvent
from loramux.platform.tool_calls.grammar import AnswerRules, Calls, OfferedTool
from loramux.platform.tool_calls.parsers import PARSERS
from loramux.platform.tool_calls.tagged_grammar import MAX_ARGUMENTS, MAX_LENGTH, MAX_TEXTS
from tests.engine.byte_vocabulary import byte_vocabulary

FORMATS = [name for name, syntax in SYNTAXES.items() if syntax.tags is not None]

ORDER: dict[str, Any] = {
    "type": "object",
    "properties": {
        "city": {"$ref": "#/$defs/city"},
        "note": {"anyOf": [{"type": "string"}, {"type": "null"}], "default": None},
        "unit": {"enum": ["c", "cf", "a/b"], "type": "string"},
        "scale": {"anyOf": [{"enum": ["big", "2"]}, {"type": "null"}]},
        "count": {"type": "integer", "minimum": 1, "maximum": 40},
        "flags": {"type": "array", "items": {"type": "boolean"}, "maxItems": 2},
        "address": {"$ref": "#/$defs/address"},
        "any": {},
    },
    "required": ["city", "count"],
    "additionalProperties": False,
    "$defs": {
        "city": {"type": "string", "minLength": 1, "maxLength": 6},
        "address": {
            "type": "object",
            "properties": {"town": {"$ref": "#/$defs/city"}, "lines": {"type": "array", "items": {"type": "string"}}},
            "required": ["town"],
            "additionalProperties": False,
        },
    },
}


def grammar_of(schema: dict[str, Any], format_name: str = "qwen3_coder") -> str:
    tool = OfferedTool("order", {"type": "object", **schema})
    rules = AnswerRules(calls=Calls(format_name, (tool,), is_forced=True, is_parallel=False))
    return checked_grammar("answer", msgspec.json.encode(rules).decode(), byte_vocabulary())


def accepts(grammar: str, text: str) -> bool:
    matcher = LLMatcher(byte_vocabulary(), grammar, limits=parser_limits(), log_level=0)
    tokens = list(text.encode())
    return matcher.validate_tokens(tokens) == len(tokens) and matcher.consume_tokens(tokens) and matcher.is_accepting()


def call_of(*arguments: tuple[str, str], format_name: str = "qwen3_coder", line: str = "\n") -> str:
    """Return a call as the model's own chat template writes it."""
    syntax = SYNTAXES[format_name]
    tags = syntax.tags
    assert tags is not None
    ((marker, block), *_) = syntax.blocks.items()
    inner = "\n" if tags.has_lines else ""
    before_value = f"{tags.key_end}{line}{tags.value_begin}" if tags.value_begin else tags.key_end
    written = (f"{tags.key}{key}{before_value}{inner}{value}{inner}{tags.value_end}{line}" for key, value in arguments)
    begin = syntax.before_arguments.replace("NAME", "order").rstrip("\n") + line
    return f"{marker}{block.before}{begin}{''.join(written)}{syntax.after_arguments.lstrip()}{block.after}{block.end}"


def arguments_in(answer: str, format_name: str, schema: dict[str, Any], size: int) -> Any:
    """Return the arguments of the answer's only call, read in pieces of this size."""
    parser = PARSERS[format_name]()
    parser.schemas = {"order": schema}
    pieces = [answer[at : at + size] for at in range(0, len(answer), size)]
    events = [event for piece in pieces for event in parser.feed(piece)] + parser.finish()
    return json.loads("".join(event.text for event in events if isinstance(event, ArgumentsEvent)))


@pytest.mark.parametrize("format_name", FORMATS)
def test_calls_of_the_models_own_template_are_accepted(format_name: str) -> None:
    grammar = grammar_of(ORDER, format_name)
    quoting = f'["{PARSERS[format_name].tags.value_end}"]'  # type: ignore[attr-defined]
    call = call_of(
        ("city", "Rome\n"),
        ("note", 'if a < b:\n    "x"\n'),
        ("unit", "cf"),
        ("scale", "null"),
        ("count", "5"),
        ("flags", "[true, false]"),
        ("address", f'{{"town": "Rome", "lines": {quoting}}}'),
        ("any", "[1"),
        format_name=format_name,
    )
    assert accepts(grammar, call)
    for size in (1, 3, len(call)):
        assert arguments_in(call, format_name, ORDER, size) == {
            "city": "Rome\n",
            "note": 'if a < b:\n    "x"\n',
            "unit": "cf",
            "scale": None,
            "count": 5,
            "flags": [True, False],
            "address": {"town": "Rome", "lines": json.loads(quoting)},
            "any": "[1",
        }
    if format_name == "glm45":
        assert accepts(grammar, call_of(("city", "Rome"), ("count", "5"), format_name=format_name, line=""))


REFUSED = {
    "a required argument is missing": [("city", "Rome")],
    "another order": [("count", "5"), ("city", "Rome")],
    "twice": [("city", "Rome"), ("city", "Rome"), ("count", "5")],
    "an argument that the schema lacks": [("city", "Rome"), ("town", "x"), ("count", "5")],
    "too short": [("city", ""), ("count", "5")],
    "too long": [("city", "Cologne"), ("count", "5")],
    "not of the enum": [("city", "Rome"), ("unit", "f"), ("count", "5")],
    "an enum's string that would be read as a number": [("city", "Rome"), ("scale", "3"), ("count", "5")],
    "too small": [("city", "Rome"), ("count", "0")],
    "a string": [("city", "Rome"), ("count", '"5"')],
    "items of another type": [("city", "Rome"), ("count", "5"), ("flags", "[1]")],
    "a list that is open": [("city", "Rome"), ("count", "5"), ("flags", "[true")],
    "an object that lacks a member": [("city", "Rome"), ("count", "5"), ("address", "{}")],
    "a tag in a value": [("city", "Rome"), ("note", "a</parameter>"), ("count", "5")],
    "an argument in a value": [("city", "Rome"), ("note", "a\n<parameter=count>\n9"), ("count", "5")],
    "an argument at the end of a value": [("city", "Rome"), ("note", "a\n<parameter=count>"), ("count", "5")],
    "the end of the call in a value": [("city", "Rome"), ("note", "a</function>\n</tool_call>"), ("count", "5")],
}


@pytest.mark.parametrize("arguments", REFUSED.values(), ids=REFUSED.keys())
def test_calls_against_the_schema_are_refused(arguments: list[tuple[str, str]]) -> None:
    assert not accepts(grammar_of(ORDER), call_of(*arguments))


def test_texts_that_only_resemble_tags_are_accepted() -> None:
    for note in (
        "</function>",
        "<parameter=other>",
        "</parameter",
        "<tool_call>",
        "</tool_call>\n",
        "a <parameter=count>",
        "None",
    ):
        call = call_of(("city", "Rome"), ("note", note), ("count", "5"))
        assert accepts(grammar_of(ORDER), call)
        assert arguments_in(call, "qwen3_coder", ORDER, 1)["note"] == (None if note == "None" else note)


@pytest.mark.parametrize("name", ["a b", "a/b", "#", "~&", "é", "\\d", "'", "a{1}", "$x", "(", "[", "|"])
def test_names_can_have_any_characters(name: str) -> None:
    schema = {"properties": {name: {"type": "string"}, "x": {"type": "string"}}}
    grammar = grammar_of(schema)
    call = call_of((name, "y"), ("x", "z"))
    assert accepts(grammar, call)
    assert arguments_in(call, "qwen3_coder", schema, 5) == {name: "y", "x": "z"}
    assert not accepts(grammar, call_of((name, "y"), ("x", f"\n<parameter={name}>")))


def test_text_can_mention_the_names_of_arguments() -> None:
    note = "see <arg_key>count</arg_key> b"
    call = call_of(("city", "Rome"), ("note", note), ("count", "5"), format_name="glm45")
    assert accepts(grammar_of(ORDER, "glm45"), call)
    assert arguments_in(call, "glm45", ORDER, 1)["note"] == note
    missed = "a<arg_key>count</arg_key>\n<arg_value>"
    assert not accepts(
        grammar_of(ORDER, "glm45"), call_of(("city", "Rome"), ("note", missed), ("count", "5"), format_name="glm45")
    )


@pytest.mark.parametrize("length", [{"maxLength": MAX_LENGTH}, {"minLength": MAX_LENGTH}], ids=["max", "min"])
def test_the_longest_text_that_is_counted_needs_few_states_of_the_lexer(length: dict[str, Any]) -> None:
    names = ("x", *(f"name_{index}" for index in range(20)))
    grammar = grammar_of({"properties": {name: {"type": "string", **length} for name in names}})
    text = "</function>\n <parameter=name </b> é\n<parameter=name"
    limits = LLParserLimits(max_lexer_states=MAX_LEXER_STATES // 2)
    matcher = LLMatcher(byte_vocabulary(), grammar, limits=limits, log_level=0)
    for token in call_of(("x", (text * 3)[:MAX_LENGTH])).encode():
        matcher.compute_bitmask()
        assert matcher.consume_token(token), matcher.get_error()


def test_functions_can_come_in_any_order() -> None:
    loose = {"type": "object"}
    in_json = {"type": "object", "properties": {"x": {"type": "string", "pattern": "^a"}}}
    for at in range(8):
        schemas = [loose, *[{**loose, "properties": {}}] * 6]
        schemas.insert(at, in_json)
        tools = tuple(OfferedTool(f"f{index}", schema) for index, schema in enumerate(schemas))
        rules = AnswerRules(calls=Calls("qwen3_coder", tools, is_forced=True, is_parallel=False))
        checked_grammar("answer", msgspec.json.encode(rules).decode(), byte_vocabulary())


def test_function_that_states_no_properties_takes_any_arguments() -> None:
    call = call_of(("a", "5"), ("b", "x\ny"))
    assert accepts(grammar_of({}), call)
    assert not accepts(grammar_of({"properties": {}}), call)
    assert accepts(grammar_of({"properties": {}}), call_of())


STRING, SHORT = {"type": "string"}, {"type": "string", "maxLength": 3}
NAMES = {f"name_{index}": {"type": "string"} for index in range(MAX_ARGUMENTS + 1)}
IN_JSON = {
    "a pattern": {"properties": {"x": {"type": "string", "pattern": "^a"}}},
    "a format": {"properties": {"x": {"type": "string", "format": "date"}}},
    "a string or a list": {"properties": {"x": {"type": ["string", "array"]}}},
    "a string or an integer": {"properties": {"x": {"anyOf": [STRING, {"type": "integer"}]}}},
    "a string that looks like a number": {"properties": {"x": {"enum": ["5", 6]}}},
    "a string with a tag": {"properties": {"x": {"enum": ["</parameter>"]}}},
    "other properties": {"properties": {"x": STRING}, "additionalProperties": STRING},
    "any other properties": {"properties": {"x": STRING}, "additionalProperties": True},
    "alternatives": {"anyOf": [{"properties": {"x": STRING}}, {"properties": {"y": STRING}}]},
    "a property that nobody states": {"properties": {"x": STRING}, "required": ["z"]},
    "a name with a tag": {"properties": {"x>": STRING}},
    "a reference to another place": {"properties": {"x": {"type": "integer"}, "l": {"items": {"$ref": "#"}}}},
    "two kinds of strings": {"properties": {"x": {"$ref": "#/$defs/x"}}, "$defs": {"x": {"anyOf": [STRING, STRING]}}},
    "too many arguments": {"properties": NAMES},
    "too many texts": {"properties": {"x": {"enum": [f"v{index}" for index in range(MAX_TEXTS + 1)]}}},
    "too many texts of all arguments": {
        "properties": {f"x{index}": {"$ref": "#/$defs/x"} for index in range(3)},
        "$defs": {"x": {"enum": [f"v{index}" for index in range(MAX_TEXTS // 2)]}},
    },
    "texts that are too long": {
        "properties": {f"x{index}": {"$ref": "#/$defs/x"} for index in range(20)},
        "$defs": {"x": {"enum": ["x" * 9_000]}},
    },
    "a string with a length, or null": {"properties": {"x": {"anyOf": [SHORT, {"type": "null"}]}}},
    "a string with a length, or another text": {"properties": {"x": {"anyOf": [SHORT, {"enum": ["other"]}]}}},
    "any string, or one with a tag": {"properties": {"x": {"anyOf": [STRING, {"enum": ["</parameter>"]}]}}},
    "too long a text": {"properties": {"x": {"type": "string", "maxLength": MAX_LENGTH + 1}}},
    "too long texts of several lengths": {"properties": {"x": SHORT, "y": {"type": "string", "maxLength": MAX_LENGTH}}},
    "too much": {
        "properties": {f"x{index}": {"type": "array", "items": {"$ref": "#/$defs/x"}} for index in range(20)},
        "$defs": {"x": {"enum": ["x" * 9_000]}},
    },
}


@pytest.mark.parametrize("schema", IN_JSON.values(), ids=IN_JSON.keys())
def test_arguments_that_tags_cannot_express_are_written_in_json(schema: dict[str, Any]) -> None:
    grammar = grammar_of(schema)
    matcher = LLMatcher(byte_vocabulary(), grammar, limits=parser_limits(), log_level=0)
    assert matcher.consume_tokens(list(b"<tool_call>\n<function=order>\n{"))


def test_only_functions_within_the_limits_are_written_between_tags() -> None:
    almost = {"type": "object", "properties": dict([*NAMES.items()][:200]) | IN_JSON["a pattern"]["properties"]}
    wide, almost_wide = OfferedTool("wide", {"type": "object", "properties": NAMES}), OfferedTool("almost", almost)
    narrow = OfferedTool("narrow", {"type": "object", "properties": dict.fromkeys(("x", *[*NAMES][:60]), STRING)})
    rules = AnswerRules(calls=Calls("qwen3_coder", (wide, almost_wide, narrow), is_forced=True, is_parallel=False))
    grammar = checked_grammar("answer", msgspec.json.encode(rules).decode(), byte_vocabulary())
    for text in ("<tool_call>\n<function=wide>\n{", "<tool_call>\n<function=narrow>\n<parameter=x>"):
        matcher = LLMatcher(byte_vocabulary(), grammar, limits=parser_limits(), log_level=0)
        assert matcher.consume_tokens(list(text.encode())), text
