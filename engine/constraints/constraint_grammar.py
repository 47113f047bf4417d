"""Turns the constraint of a request into a grammar for llguidance."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from loramux.engine.constraints.endless import is_endless_lark, is_endless_schema

if TYPE_CHECKING:
    from llguidance._lib import JsonCompileOptions

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

DATA_KEYWORDS = frozenset({"const", "enum", "default", "example", "examples"})
"""Keywords whose values are data and contain no schemas."""

_NAMED_SCHEMAS = frozenset(
    {"properties", "patternProperties", "$defs", "definitions", "dependentSchemas", "dependencies"}
)
"""Keywords whose values map names to schemas. A name can be that of a keyword."""

_ENDLESS = "no answer can end, because the grammar requires infinite recursion"


class GrammarRefused(ValueError):
    """The constraint is invalid, is not supported, or exceeds a limit.

    `keywords` are the unsupported JSON Schema keywords. `param` names the invalid field if the constraint was built
    from several fields.
    """

    def __init__(self, message: str, keywords: tuple[str, ...] = (), param: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.keywords = keywords
        self.param = param


def constraint_grammar(kind: str, text: str) -> str:
    """Return the grammar of a `json_schema`, a `regex`, a `choice` (a JSON list) or a `grammar` (Lark or GBNF).

    Raises GrammarRefused or any exception of the library.
    """
    from llguidance import LLMatcher, grammar_from

    match kind:
        case "json_schema":
            return LLMatcher.grammar_from_json_schema(
                json.dumps(usable_schema(json.loads(text))), overrides=JSON_OPTIONS
            )
        case "regex":
            return LLMatcher.grammar_from_regex(text)
        case "choice":
            return grammar_from("choice", text)
        case "grammar":
            grammar = grammar_from("grammar", text)
            if is_endless_lark(grammar):
                raise GrammarRefused(_ENDLESS)
            return grammar
        case _:
            raise ValueError(f"{kind} is not a kind of constraint")


def usable_schema(schema: dict[str, Any] | bool) -> dict[str, Any]:
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
    waiting = [schema]
    while waiting:
        node = waiting.pop()
        if isinstance(node, dict):
            if node is not schema and isinstance(node.get("$id"), str):
                raise GrammarRefused("$id is supported only at the root of a schema", ("$id",))
            for keyword, value in node.items():
                if keyword in _NAMED_SCHEMAS and isinstance(value, dict):
                    waiting += value.values()
                elif keyword not in DATA_KEYWORDS:
                    waiting.append(value)
        elif isinstance(node, list):
            waiting += node
