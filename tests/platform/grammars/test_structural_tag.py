from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest
from llguidance import LLMatcher, LLTokenizer

from loramux.engine.constraints.constraint_grammar import GrammarRefused
from loramux.engine.constraints.limits import parser_limits
from loramux.platform.bodies.request_body import validated
from loramux.platform.bodies.response_formats import StructuredOutputs
from loramux.platform.bodies.structural_tags import StructuralTag, structural_tag_constraint
from loramux.platform.errors import InvalidRequest
from loramux.platform.grammars.check import checked_grammar
from loramux.platform.grammars.constraint import Constraint
from loramux.platform.tool_calls.grammar import AnswerRules, Thinking
from tests.engine.byte_vocabulary import byte_vocabulary

INTEGER = {"type": "json_schema", "json_schema": {"type": "integer"}}
TEXT = {"type": "any_text"}
CALL = {"begin": "<call=f>", "content": INTEGER, "end": "</call>"}
OTHER = {"begin": "<call=g>", "content": {"type": "const_string", "value": "x"}, "end": ["</call>", ";"]}
CALLS = {"type": "triggered_tags", "triggers": ["<call="], "tags": [CALL, OTHER]}
THINK = {"type": "tag", "begin": "<think>", "content": TEXT, "end": "</think>"}
REGEX = {"type": "regex", "pattern": r"(.|\n)+"}
TAG = {"type": "tag", "begin": "<a>", "content": INTEGER, "end": "</a>"}
END = {"type": "const_string", "value": "end"}
SEPARATED = {"type": "tags_with_separator", "tags": [CALL, OTHER], "separator": ", "}


def tags(**fields: Any) -> dict[str, Any]:
    return {**CALLS, **fields}


CASES: dict[str, tuple[dict[str, Any], list[str], list[str]]] = {
    "const_string": ({"type": "const_string", "value": 'a "quoted" / é 🦊\n'}, ['a "quoted" / é 🦊\n'], ["", "a"]),
    "empty const_string": ({"type": "const_string", "value": ""}, [""], ["a"]),
    "json_schema": (INTEGER, ["17"], ["x", ""]),
    "any schema": ({"type": "json_schema", "json_schema": True}, ['{"a": [1]}', "null"], ["x"]),
    "any_text": (TEXT, ["", "a\nb é 🦊"], []),
    "excludes": ({**TEXT, "excludes": ["no/", "a\nb"]}, ["no", "yes /"], ["no/", "it is no/ good", "a\nb"]),
    "max_chars": ({**TEXT, "max_chars": 3}, ["", "é🦊a"], ["abcd"]),
    "grammar": ({"type": "grammar", "grammar": 'root ::= "a" | "b" root'}, ["a", "bba"], ["b", "ab"]),
    "Lark grammar": ({"type": "grammar", "grammar": 'start: "a"+'}, ["aa"], ["b", ""]),
    "regex": ({"type": "regex", "pattern": r"a/[0-9]+\/(x|y)"}, ["a/12/x"], ["a/12/z", "a//x"]),
    "sequence": (
        {"type": "sequence", "elements": [{"type": "const_string", "value": "n="}, INTEGER, THINK]},
        ["n=5<think>so</think>"],
        ["n=<think>so</think>", "n=5"],
    ),
    "or": (
        {"type": "or", "elements": [INTEGER, THINK, {"type": "const_string", "value": "none"}]},
        ["5", "<think>a < b</think>", "none"],
        ["none5", "<think>"],
    ),
    "tag": (THINK, ["<think></think>", "<think>a </thin b</think>"], ["<think>a", "x</think>", "<think>a</think> b"]),
    "tag with several ends": (
        {"type": "tag", "begin": "<", "content": {"type": "regex", "pattern": ".*"}, "end": [">", "/>"]},
        ["<>", "<a>", "<a/>"],
        ["a>", "<a", "<a>b>"],
    ),
    "regex before a tag": (
        {"type": "sequence", "elements": [REGEX, {**TAG, "content": REGEX}, INTEGER]},
        ["hi <a>x</a>5", "<b></b><a>\n</a>17"],
        ["hi <a>x</a>", "<a>x</a>5"],
    ),
    "regex before a string": (
        {"type": "sequence", "elements": [{"type": "regex", "pattern": "[a-z]+"}, END, INTEGER]},
        ["abcend5", "bend17"],
        ["abc5", "end5", "endend5x"],
    ),
    "regex before a sequence": (
        {"type": "sequence", "elements": [REGEX, {"type": "sequence", "elements": [END, TAG]}]},
        ["abcend<a>1</a>"],
        ["abc<a>1</a>", "abcend"],
    ),
    "regex that must contain what follows": (
        {"type": "sequence", "elements": [{"type": "regex", "pattern": r"\d\.\d"}, {**END, "value": "."}, INTEGER]},
        ["1.5.7"],
        ["1.5"],
    ),
    "tag without an end": (
        {"type": "tag", "begin": "n=", "content": INTEGER, "end": ""},
        ["n=5"],
        ["n=", "n=5;"],
    ),
    "nested tags": (
        {"type": "tag", "begin": "[", "content": {"type": "sequence", "elements": [THINK, CALLS]}, "end": "]"},
        ["[<think>a]b</think>]", "[<think></think>so <call=f>5</call> then]"],
        ["[<think>a</think>", "[<think></think>a]b]", "[<think></think><call=f>x</call>]"],
    ),
    "triggered_tags": (
        CALLS,
        ["", "text < only", "<call=f>5</call>", "a <call=f>5</call> b <call=g>x;<call=g>x</call> c"],
        ["<call=", "<call=h>", "<call=f>x</call>", "a <call=f>5", "<call=g>x</call"],
    ),
    "at_least_one": (
        tags(at_least_one=True),
        ["<call=f>5</call>", "<call=f>5</call> and <call=g>x;"],
        ["", "a<call=f>5</call>", "text"],
    ),
    "stop_after_first": (
        tags(stop_after_first=True),
        ["", "text", "a<call=f>5</call>"],
        ["<call=f>5</call> b", "<call=f>5</call><call=g>x;"],
    ),
    "exactly one": (tags(at_least_one=True, stop_after_first=True), ["<call=g>x;"], ["", "a<call=g>x;", "<call=g>x;b"]),
    "excluded text": (tags(excludes=["bad"]), ["ba d<call=f>5</call>ba"], ["bad", "<call=f>5</call>bad"]),
    "several triggers": (
        {**CALLS, "triggers": ["<call=f", "<call=g"]},
        ["<call=h>", "a<call=f>5</call><call=g>x;"],
        ["<call=f", "<call=fx"],
    ),
    "tags_with_separator": (
        SEPARATED,
        ["", "<call=f>5</call>", "<call=f>5</call>, <call=g>x;"],
        [", ", "<call=f>5</call>,", "<call=f>5</call><call=g>x;", "a"],
    ),
    "one separated tag": (
        {**SEPARATED, "at_least_one": True, "stop_after_first": True},
        ["<call=f>5</call>"],
        ["", "<call=f>5</call>, <call=f>5</call>"],
    ),
    "optional": ({"type": "optional", "content": INTEGER}, ["", "5"], ["5 5"]),
    "plus": ({"type": "plus", "content": THINK}, ["<think></think>", "<think>a</think><think>b</think>"], [""]),
    "star": ({"type": "star", "content": {"type": "const_string", "value": "ab"}}, ["", "abab"], ["aba"]),
    "repeat": (
        {"type": "repeat", "min": 2, "max": 3, "content": {"type": "const_string", "value": "ab"}},
        ["abab", "ababab"],
        ["ab", "abababab"],
    ),
    "repeat without a limit": (
        {"type": "repeat", "min": 1, "max": -1, "content": {"type": "const_string", "value": "a"}},
        ["a", "aaaaa"],
        [""],
    ),
    "no repeat": (
        {"type": "sequence", "elements": [{"type": "repeat", "min": 0, "max": 0, "content": INTEGER}, END]},
        ["end"],
        ["5end", ""],
    ),
    "repeats in a tag": (
        {"type": "tag", "begin": "[", "content": {"type": "optional", "content": INTEGER}, "end": "]"},
        ["[]", "[7]"],
        ["[", "7]"],
    ),
}


@pytest.fixture(scope="module")
def vocabulary() -> LLTokenizer:
    return byte_vocabulary()


def constraint_of(wanted: dict[str, Any]) -> Constraint:
    tag = StructuralTag.model_validate({"type": "structural_tag", "format": wanted})
    return structural_tag_constraint(tag, "response_format")


def grammar_of(wanted: dict[str, Any], vocabulary: LLTokenizer) -> str:
    constraint = constraint_of(wanted)
    return checked_grammar(constraint.kind, constraint.text, vocabulary)


def accepts(grammar: str, text: str, vocabulary: LLTokenizer) -> bool:
    matcher = LLMatcher(vocabulary, grammar, limits=parser_limits(), log_level=0)
    tokens = list(text.encode())
    return (
        matcher.validate_tokens(tokens) == len(tokens)
        and (not tokens or matcher.consume_tokens(tokens))
        and bool(matcher.is_accepting())
    )


@pytest.mark.parametrize(("wanted", "good", "bad"), CASES.values(), ids=CASES)
def test_each_format_allows_its_texts(
    vocabulary: LLTokenizer, wanted: dict[str, Any], good: list[str], bad: list[str]
) -> None:
    grammar = grammar_of(wanted, vocabulary)
    for text in good:
        assert accepts(grammar, text, vocabulary), text
    for text in bad:
        assert not accepts(grammar, text, vocabulary), text


@pytest.mark.parametrize(("wanted", "good", "bad"), CASES.values(), ids=CASES)
def test_a_format_can_follow_the_reasoning(
    vocabulary: LLTokenizer, wanted: dict[str, Any], good: list[str], bad: list[str]
) -> None:
    thinking, constraint = Thinking("<think>", "</think>", is_open=True), constraint_of(wanted)
    rules = AnswerRules(thinking=thinking, grammar=(constraint.kind, constraint.text))
    grammar = checked_grammar("answer", msgspec.json.encode(rules).decode(), vocabulary)
    assert accepts(grammar, f"Hm.</think>{good[-1]}", vocabulary)


def test_the_older_form_is_the_same_as_triggered_tags(vocabulary: LLTokenizer) -> None:
    schema = {"type": "integer"}
    old = {
        "type": "structural_tag",
        "structures": [{"begin": "<call=f>", "schema": schema, "end": "</call>"}],
        "triggers": ["<call="],
    }
    constraint = structural_tag_constraint(StructuralTag.model_validate(old), "p")
    grammar = checked_grammar(constraint.kind, constraint.text, vocabulary)
    assert grammar == grammar_of({**CALLS, "tags": [CALL]}, vocabulary)
    assert accepts(grammar, "a <call=f>5</call> b", vocabulary)


def test_a_tag_can_be_a_string_of_json() -> None:
    tag = {"type": "structural_tag", "format": CALLS}
    whole = validated({"structural_tag": tag}, StructuredOutputs).structural_tag
    assert validated({"structural_tag": json.dumps(tag)}, StructuredOutputs).structural_tag == whole
    for text in ("", "not json", "5", '{"type": "structural_tag", "format": {"type": "regex"}}'):
        with pytest.raises(InvalidRequest) as refused:
            validated({"structural_tag": text}, StructuredOutputs)
        assert refused.value.param == "structural_tag"


@pytest.mark.parametrize(
    ("wanted", "said"),
    [
        ({"type": "sequence", "elements": [TEXT, THINK]}, "any_text has no end here"),
        ({"type": "star", "content": CALLS}, "triggered_tags has no end here"),
        ({"type": "plus", "content": {"type": "or", "elements": [INTEGER, TEXT]}}, "or has no end here"),
        ({**THINK, "end": ["</think>", ""]}, "must not be empty"),
        ({**CALLS, "triggers": ["<x>"]}, "begins with no trigger"),
        ({"type": "repeat", "min": 3, "max": 2, "content": INTEGER}, "must not be below"),
        ({"type": "json_schema", "json_schema": False}, "no value satisfies"),
        ({"type": "json_schema", "json_schema": {"type": "array", "items": {"$ref": "#"}, "minItems": 1}}, "can end"),
        ({"type": "json_schema", "json_schema": {"items": {"$id": "https://a/b"}}}, "$id is supported only"),
        ({"type": "json_schema", "json_schema": {"type": "array", "contains": {}}}, "contains"),
        ({"type": "grammar", "grammar": 'root ::= "a" root'}, "can end"),
        ({"type": "grammar", "grammar": "root ::= ("}, ""),
        ({"type": "regex", "pattern": "a/ | %json {}\nstart: /b"}, ""),
    ],
    ids=lambda value: json.dumps(value)[:50],
)
def test_what_no_grammar_can_express_is_refused(vocabulary: LLTokenizer, wanted: dict[str, Any], said: str) -> None:
    with pytest.raises(GrammarRefused) as refused:
        grammar_of(wanted, vocabulary)
    assert said in refused.value.message


@pytest.mark.parametrize(
    ("wanted", "said"),
    [
        ({"type": "regex", "pattern": "("}, 'invalid regex "(": unclosed group (character 1)'),
        ({"type": "json_schema", "json_schema": {"not": {}}}, 'Unimplemented keys: ["not"]'),
        ({"type": "grammar", "grammar": 'start: "a" b\nb: c'}, 'line 2, column 4: unknown name: "c"'),
    ],
    ids=["regex", "schema", "grammar"],
)
@pytest.mark.parametrize("is_answer", [False, True], ids=["alone", "after the thinking"])
def test_only_the_clients_own_grammar_has_positions(
    vocabulary: LLTokenizer, wanted: dict[str, Any], said: str, is_answer: bool
) -> None:
    constraint = constraint_of({"type": "sequence", "elements": [END, wanted]})
    kind, text = constraint.kind, constraint.text
    if is_answer:
        rules = AnswerRules(thinking=Thinking("<think>", "</think>", is_open=True), grammar=(kind, text))
        kind, text = "answer", msgspec.json.encode(rules).decode()
    with pytest.raises(GrammarRefused) as refused:
        checked_grammar(kind, text, vocabulary)
    assert refused.value.message == said


@pytest.mark.parametrize(
    ("tag", "param"),
    [
        ({}, "response_format.structures"),
        ({"format": None}, "response_format.structures"),
        ({"triggers": ["<"]}, "response_format.structures"),
        ({"structures": [{"begin": "<a>"}]}, "response_format.triggers"),
        ({"format": CALLS, "triggers": ["<"]}, "response_format.structures"),
    ],
    ids=["nothing", "null", "only triggers", "only structures", "both forms"],
)
def test_a_tag_has_one_form(tag: dict[str, Any], param: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        structural_tag_constraint(StructuralTag.model_validate({"type": "structural_tag", **tag}), "response_format")
    assert refused.value.param == param


@pytest.mark.parametrize(
    ("wanted", "param"),
    [
        ({}, "format"),
        ({"type": "token", "token": 5}, "format"),
        ({"type": "any_text", "max_tokens": 5}, "format.max_tokens"),
        ({"type": "json_schema", "json_schema": {}, "style": "qwen_xml"}, "format.style"),
        ({"type": "sequence", "elements": []}, "format.elements"),
        ({"type": "sequence", "elements": [TEXT] * 65}, "format.elements"),
        ({"type": "tag", "begin": {"type": "token", "token": 5}, "content": TEXT, "end": "x"}, "format.begin"),
        ({**CALLS, "triggers": [""]}, "format.triggers[0]"),
        ({**CALLS, "tags": [CALL, {**CALL, "content": {"type": "regex", "pattern": ""}}]},
         "format.tags[1].content.pattern"),
        ({"type": "repeat", "min": 0, "max": 10**9, "content": INTEGER}, "format.max"),
    ],
    ids=lambda value: json.dumps(value)[:50],
)  # fmt: skip
def test_unusable_formats_are_named(wanted: dict[str, Any], param: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        validated({"type": "structural_tag", "format": wanted}, StructuralTag)
    assert refused.value.param == param


def test_a_deeply_nested_format_is_refused() -> None:
    wanted: dict[str, Any] = INTEGER
    for _ in range(3000):
        wanted = {"type": "optional", "content": wanted}
    with pytest.raises(InvalidRequest):
        validated({"type": "structural_tag", "format": wanted}, StructuralTag)
