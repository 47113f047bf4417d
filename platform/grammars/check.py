"""Compiles a constraint into a grammar for the engine and tries it out. Runs in the confined process."""

from __future__ import annotations

import json
import random
import re
from typing import TYPE_CHECKING, Any

import msgspec

from loramux.engine.constraints.limits import parser_limits
from loramux.engine.constraints.problems import plain_problem, problem_of
from loramux.platform.grammars.endless import is_endless_lark, is_endless_schema
from loramux.platform.grammars.structural_tag import UnusableFormat, structural_tag_grammar
from loramux.platform.tool_calls.grammar import AnswerRules, lark_of
from loramux.platform.tool_calls.harmony_grammar import harmony_lark

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer
    from llguidance._lib import JsonCompileOptions

NUM_TRIED_TOKENS = 64
"""Number of random tokens used to try out a grammar. A grammar that exceeds a limit in this trial is refused."""

JSON_OPTIONS: JsonCompileOptions = {
    "item_separator": ",",
    "key_separator": ":",
    # Allow at most one space, or a newline and up to 32 spaces. Without a limit, a model could emit whitespace forever.
    "whitespace_pattern": r"( |\n {0,32})?",
    "whitespace_flexible": True,
    "coerce_one_of": False,
    "lenient": False,
}
"""Options for compiling schemas. They override `x-guidance` in a schema."""

_ENDLESS = "no answer can end, because the grammar requires infinite recursion"

_KEYWORDS = re.compile(r"Unimplemented keys: \[([^\]]*)\]")


class GrammarRefused(Exception):
    """The constraint is invalid, is not supported, or exceeds a limit.

    `keywords` are the unsupported JSON Schema keywords. `param` names the invalid field if the constraint was built
    from several fields.
    """

    def __init__(self, message: str, keywords: tuple[str, ...] = (), param: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.keywords = keywords
        self.param = param


def checked_grammar(kind: str, text: str, vocabulary: LLTokenizer) -> str:
    """Compile a constraint into a grammar and try it out within the limits. Raises GrammarRefused."""
    try:
        return _tried_grammar(kind, text, vocabulary)
    except GrammarRefused:
        if kind == "answer":
            _check_tools(msgspec.json.decode(text, type=AnswerRules), vocabulary)
        raise


def _check_tools(rules: AnswerRules, vocabulary: LLTokenizer) -> None:
    """Check each tool's schema on its own. Raises GrammarRefused for the first invalid one."""
    for tool in () if rules.calls is None else rules.calls.tools:
        try:
            _tried_grammar("json_schema", json.dumps(tool.schema), vocabulary)
        except GrammarRefused as refused:
            raise GrammarRefused(f"{tool.name}: {refused.message}", refused.keywords, tool.param) from None


def _tried_grammar(kind: str, text: str, vocabulary: LLTokenizer) -> str:
    from llguidance import LLMatcher

    try:
        grammar = _grammar(kind, text)
    except RecursionError as error:
        raise GrammarRefused("the grammar is too complex: it is nested too deeply") from error
    except (ValueError, TypeError, KeyError, AssertionError) as error:
        raise GrammarRefused(plain_problem(str(error))) from error
    matcher = LLMatcher(vocabulary, grammar, log_level=0, limits=parser_limits())
    if matcher.is_error():
        problem = problem_of(matcher)
        # The library wraps a regular expression in a grammar, and reports the position in that grammar.
        raise _refused(problem.removeprefix("line 1, column 8: ") if kind == "regex" else problem)
    _try_out(matcher, vocabulary.vocab_size)
    return grammar


def _grammar(kind: str, text: str) -> str:
    from llguidance import LLMatcher, grammar_from

    match kind:
        case "json_schema":
            schema = _usable_schema(json.loads(text))
            return LLMatcher.grammar_from_json_schema(json.dumps(schema), overrides=JSON_OPTIONS)
        case "regex":
            return LLMatcher.grammar_from_regex(text)
        case "choice":
            return grammar_from("choice", text)
        case "grammar":
            grammar = grammar_from("grammar", text)
            if is_endless_lark(grammar):
                raise GrammarRefused(_ENDLESS)
            return grammar
        case "structural_tag":
            try:
                return structural_tag_grammar(
                    json.loads(text), _json_expression, lambda grammar: _grammars(_grammar("grammar", grammar))
                )
            except UnusableFormat as error:
                raise GrammarRefused(str(error)) from None
        case "answer":
            return _answer_grammar(msgspec.json.decode(text, type=AnswerRules))
        case _:
            raise ValueError(f"{kind} is not a kind of constraint")


def _answer_grammar(rules: AnswerRules) -> str:
    """Return the grammar of an answer with tool calls or reasoning. It includes the constraint's own grammar as
    `@answer`.
    """
    for tool in () if rules.calls is None else rules.calls.tools:
        _usable_schema(tool.schema)
    lark = lark_of if rules.channels is None else harmony_lark
    if rules.grammar is None:
        return lark(rules, JSON_OPTIONS, None)
    grammars = _grammars(_grammar(*rules.grammar))
    grammars[0]["name"] = "answer"
    return json.dumps({"grammars": [{"lark_grammar": lark(rules, JSON_OPTIONS, "@answer")}, *grammars]})


def _grammars(grammar: str) -> list[dict[str, Any]]:
    """Return the grammars in a document in llguidance's JSON or Lark format."""
    found: list[dict[str, Any]]
    found = json.loads(grammar)["grammars"] if grammar.startswith("{") else [{"lark_grammar": grammar}]
    return found


def _json_expression(schema: dict[str, Any] | bool) -> str:
    return f"%json {json.dumps({**_usable_schema(schema), 'x-guidance': JSON_OPTIONS})}"


def _usable_schema(schema: dict[str, Any] | bool) -> dict[str, Any]:
    """Return the schema as an object. Raises GrammarRefused for a schema that llguidance would read otherwise."""
    if schema is False:
        raise GrammarRefused("no value satisfies the schema false")
    if schema is True:
        return {}
    _refuse_nested_ids(schema)
    if is_endless_schema(schema):
        raise GrammarRefused(_ENDLESS)
    return schema


def _refuse_nested_ids(schema: Any) -> None:
    """Raise GrammarRefused for an `$id` below the root. It would change the base URI of references, but llguidance
    ignores it.
    """
    waiting = list(schema.values()) if isinstance(schema, dict) else []
    while waiting:
        node = waiting.pop()
        if isinstance(node, dict):
            if isinstance(node.get("$id"), str):
                raise GrammarRefused("$id is supported only at the root of a schema", ("$id",))
            waiting += node.values()
        elif isinstance(node, list):
            waiting += node


def _try_out(matcher: LLMatcher, vocab_size: int) -> None:
    """Follow the grammar with random tokens. Raises GrammarRefused if it exceeds a limit or allows no token."""
    import numpy as np

    generator = random.Random(0)
    for _ in range(NUM_TRIED_TOKENS):
        if matcher.is_stopped():
            break
        bits = np.frombuffer(matcher.compute_bitmask(), np.uint8)
        allowed = np.flatnonzero(np.unpackbits(bits, count=vocab_size, bitorder="little"))
        if matcher.is_error():
            break
        if not len(allowed):
            raise GrammarRefused("no token of the model's vocabulary can follow")
        matcher.consume_token(int(generator.choice(allowed)))
    if matcher.is_error():
        raise _refused(problem_of(matcher))


def _refused(problem: str) -> GrammarRefused:
    found = _KEYWORDS.search(problem)
    keywords = tuple(re.findall(r'"([^"]*)"', found.group(1))) if found else ()
    return GrammarRefused(problem, keywords)
