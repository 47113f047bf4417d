from __future__ import annotations

import json

import numpy as np
import pytest
from llguidance import LLMatcher, LLTokenizer, grammar_from

from loramux.engine.constraints.limits import parser_limits
from loramux.engine.constraints.problems import MAX_CHARS, UNUSABLE, plain_problem, problem_of
from loramux.engine.constraints.vocabulary import load_vocabulary
from tests.demo_base import DEMO_BASE

COMPLEX = "the grammar is too complex: "
ITEMS = f"{COMPLEX}at one position, it can continue in too many ways"
EXPRESSIONS = f"{COMPLEX}its regular expressions and terminals are too large"
DEEP = f"{COMPLEX}it is nested too deeply"


@pytest.fixture(scope="module")
def vocabulary() -> LLTokenizer:
    return load_vocabulary(DEMO_BASE, 1024, (1,))


@pytest.mark.parametrize(
    ("kind", "text", "problem"),
    [
        ("lark", 'start: "b" foo\nfoo: undefined', 'line 2, column 6: unknown name: "undefined"'),
        ("lark", 'start: "a" "b', "line 1, column 14: unrecognized text"),
        ("lark", 'start: "a"\n\n}', "line 3, column 1: expecting rule, token or statement (at \"}\" ('}'))"),
        ("lark", "start: /a(((/", 'line 1, column 8: invalid regex "a(((": unclosed group (character 4)'),
        ("lark", "start: <|nope|>", 'line 1, column 8: unknown special token: "<|nope|>"'),
        ("lark", 'start: %json {"contains": {}}', 'line 1, column 8: Unimplemented keys: ["contains"]'),
        ("lark", "start: " + "(" * 3000 + '"a"' + ")" * 3000, f"line 1, column 37: {DEEP}"),
        ("lark", "start: " + '"a"?' * 4000, ITEMS),
        ("regex", "a{1000000}", EXPRESSIONS),
        ("json_schema", {"type": "array", "contains": {}}, 'Unimplemented keys: ["contains"]'),
        ("json_schema", {"type": "string", "pattern": "a(("}, "unclosed group (character 3)"),
        (
            "json_schema",
            {"type": "string", "pattern": r"\bfoo"},
            "look-around, word boundaries and anchors are not supported here",
        ),
        ("json_schema", {"$ref": "https://a/b"}, "the reference to 'https://a/b' is outside the schema"),
        (
            "json_schema",
            {"minimum": 5, "maximum": 4, "type": "integer"},
            "Unsatisfiable schema: minimum (5) is greater than maximum (4)",
        ),
        (
            "json_schema",
            {"oneOf": [{"type": "string"}, {"type": "string", "pattern": "a"}]},
            "oneOf is supported only if its schemas cannot overlap; use anyOf",
        ),
        ("json_schema", {"type": "string", "minLength": "3"}, "Expected positive integer for 'minLength', got \"3\""),
        ("json_schema", {"type": "number", "minimum": "3"}, "Expected number for 'minimum', got \"3\""),
        ("json_schema", {"type": "object", "properties": {f"p{index}": {} for index in range(3000)}}, ITEMS),
    ],
)
def test_a_tenant_reads_what_is_wrong_and_where(
    vocabulary: LLTokenizer, kind: str, text: str | dict[str, object], problem: str
) -> None:
    grammar = grammar_from(kind, text if isinstance(text, str) else json.dumps(text))  # type: ignore[arg-type]
    matcher = LLMatcher(vocabulary, grammar, log_level=0, limits=parser_limits())
    # Some limits are exceeded only when a token is chosen.
    for _ in range(2):
        if not matcher.is_error():
            allowed = np.unpackbits(np.frombuffer(matcher.compute_bitmask(), np.uint8), bitorder="little")
            matcher.consume_token(int(np.flatnonzero(allowed)[-1]))
    assert problem_of(matcher) == problem


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("parser error: Too many items (limit 2000; ff_tokens); try avoiding short lexemes <non-verbose>", ITEMS),
        ("Parser Error: Current row has 10007 items; max is 2000; consider\n<non-verbose/>", ITEMS),
        (
            "lexer error: too many states: 20000 >= 20000\n<non-verbose/>",
            f"{COMPLEX}its regular expressions and terminals need too many states",
        ),
        ("maximum relevance check fuel 1000 exceeded", EXPRESSIONS),
        ("lexer precomputation failed; either increase limits.initial_lexer_fuel or disable limits.x", EXPRESSIONS),
        (
            "grammar size (number of symbols) too big (limit for this grammar: 50)",
            f"{COMPLEX}it has too many rules",
        ),
        ("at EOF: Expected token ':', found end of input", "at the end: Expected token ':', found end of input"),
    ],
)
def test_a_limit_is_named_without_the_librarys_figures(text: str, problem: str) -> None:
    assert plain_problem(text) == problem


@pytest.mark.parametrize(
    "text",
    [
        "",
        "panic: assertion failed: self.row_infos.len() <= self.num_rows()\n<backtrace>\n 0: parser.rs:12\n</backtrace>",
        "panic: called `Option::unwrap()` on a `None` value",
        "Internal error: initial push failed",
        'Parser Error: token "x" doesn\'t satisfy the grammar; byte "x" fails parse',
        "rollback: too many bytes 3 > 2",
        "regex parse error:\n    a\n    ^",
        "/home/runner/.cargo/registry/src/derivre-0.3.13/src/ast.rs:5",
        "a text of a later version",
    ],
)
def test_unknown_texts_stay_inside(text: str) -> None:
    assert plain_problem(text) == UNUSABLE
    assert plain_problem(f"at 3(14): {text}\n 1 | x") == f"line 3, column 14: {UNUSABLE}"


def test_a_problem_has_a_bounded_length() -> None:
    assert len(plain_problem(f'unknown name: "{"x" * 100_000}"')) == MAX_CHARS
    assert len(plain_problem(f'at 1(1): invalid regex "{"a" * 100_000}" (in regex): unknown name: x')) < 200
