"""Compiles a constraint into a grammar for the engine and tries it out. Runs in the confined process."""

from __future__ import annotations

import json
import random
import re
from typing import TYPE_CHECKING, Any

import msgspec

from loramux.engine.constraints.constraint_grammar import (
    JSON_OPTIONS,
    GrammarRefused,
    constraint_grammar,
    usable_schema,
)
from loramux.engine.constraints.limits import parser_limits
from loramux.engine.constraints.problems import plain_problem, problem_of
from loramux.platform.grammars.structural_tag import UnusableFormat, structural_tag_grammar
from loramux.platform.tool_calls.grammar import AnswerRules, lark_of
from loramux.platform.tool_calls.harmony_grammar import harmony_lark

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

NUM_TRIED_TOKENS = 64
"""Number of random tokens used to try out a grammar. A grammar that exceeds a limit in this trial is refused."""

_POSITION = re.compile(r"^(line \d+, column \d+|at the end): ")
_KEYWORDS = re.compile(r"Unimplemented keys: \[([^\]]*)\]")


def checked_grammar(kind: str, text: str, vocabulary: LLTokenizer) -> str:
    """Compile a constraint into a grammar and try it out within the limits. Raises GrammarRefused."""
    try:
        return _tried_grammar(kind, text, vocabulary)
    except GrammarRefused:
        if kind == "answer":
            _check_parts(msgspec.json.decode(text, type=AnswerRules), vocabulary)
        raise


def _check_parts(rules: AnswerRules, vocabulary: LLTokenizer) -> None:
    """Compile the constraint and each tool's schema on its own. Raises GrammarRefused for the first invalid one.

    They are not tried out, because that would take too long for many tools.
    """
    if rules.grammar is not None:
        _matcher(*rules.grammar, vocabulary)
    compiled = set()
    for tool in () if rules.calls is None else rules.calls.tools:
        schema = json.dumps(tool.schema)
        if schema in compiled:
            continue
        compiled.add(schema)
        try:
            _matcher("json_schema", schema, vocabulary)
        except GrammarRefused as refused:
            raise GrammarRefused(f"{tool.name}: {refused.message}", refused.keywords, tool.param) from None


def _tried_grammar(kind: str, text: str, vocabulary: LLTokenizer) -> str:
    grammar, matcher = _matcher(kind, text, vocabulary)
    _try_out(matcher, vocabulary.vocab_size)
    return grammar


def _matcher(kind: str, text: str, vocabulary: LLTokenizer) -> tuple[str, LLMatcher]:
    """Compile a constraint into a grammar. Raises GrammarRefused."""
    from llguidance import LLMatcher

    try:
        grammar = _grammar(kind, text)
    except GrammarRefused:
        raise
    except RecursionError as error:
        raise GrammarRefused("the grammar is too complex: it is nested too deeply") from error
    except (ValueError, TypeError, KeyError, AssertionError) as error:
        raise GrammarRefused(plain_problem(str(error))) from error
    matcher = LLMatcher(vocabulary, grammar, log_level=0, limits=parser_limits())
    if matcher.is_error():
        problem = problem_of(matcher)
        if kind == "structural_tag":
            _check_grammars(text, vocabulary)
        # The library reports the position in a grammar that the client has not seen, unless it is the client's own.
        raise _refused(problem if kind == "grammar" else _POSITION.sub("", problem))
    return grammar, matcher


def _check_grammars(structural_tag: str, vocabulary: LLTokenizer) -> None:
    """Compile each grammar in a structural tag on its own. Raises GrammarRefused for the first invalid one."""
    structural_tag_grammar(
        json.loads(structural_tag),
        _json_expression,
        lambda grammar: _grammars(_matcher("grammar", grammar, vocabulary)[0]),
    )


def _grammar(kind: str, text: str) -> str:
    match kind:
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
            return constraint_grammar(kind, text)


def _answer_grammar(rules: AnswerRules) -> str:
    """Return the grammar of an answer with tool calls or reasoning. It includes the constraint's own grammar as
    `@answer`.
    """
    for tool in () if rules.calls is None else rules.calls.tools:
        usable_schema(tool.schema)
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
    return f"%json {json.dumps({**usable_schema(schema), 'x-guidance': JSON_OPTIONS})}"


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
