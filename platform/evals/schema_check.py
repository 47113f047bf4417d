"""Checks JSON against the part of JSON Schema that takes bounded time: no references and no regular expressions."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

_TYPES: Mapping[str, Callable[[Any], bool]] = {
    "object": lambda value: isinstance(value, dict),
    "array": lambda value: isinstance(value, list),
    "string": lambda value: isinstance(value, str),
    "number": lambda value: isinstance(value, int | float) and not isinstance(value, bool),
    "integer": lambda value: _is_integer(value),
    "boolean": lambda value: isinstance(value, bool),
    "null": lambda value: value is None,
}
_COUNTS = ("minLength", "maxLength", "minItems", "maxItems")
_BOUNDS = ("minimum", "maximum")
_NOTES = ("title", "description", "default", "examples", "$schema")
"""Keywords that restrict nothing."""
_LISTS = ("type", "properties", "required")

MAX_STEPS = 200_000
"""Maximum number of keywords, values and entries that the check of one value visits. Takes about 0.2 s. For a scalar,
ten entries of an enum count as one.
"""


class SchemaNotSupported(ValueError):
    """The schema is malformed, or uses a keyword that evals do not check. The message names the keyword."""


class SchemaTooCostly(Exception):
    """The check of a value takes more than MAX_STEPS steps."""


def check_schema(schema: Any) -> None:
    """Raise SchemaNotSupported unless `follows` can check the schema."""
    if isinstance(schema, bool):
        return
    if not isinstance(schema, dict):
        raise SchemaNotSupported("schema: a schema must be an object, true or false")
    for keyword, value in schema.items():
        if not _is_usable(keyword, value):
            shown = keyword[:40] if keyword.isprintable() else "?"
            raise SchemaNotSupported(f"schema: {shown} is not supported, or its value is wrong")
    for inner in _inner_schemas(schema):
        check_schema(inner)


def follows(schema: Any, value: Any) -> bool:
    """Return whether a value follows a schema that `check_schema` has accepted. Raises SchemaTooCostly."""
    return _Check().follows(schema, value)


def same(expected: Any, value: Any) -> bool:
    """Compare JSON values. Unlike in Python, `true` is not 1."""
    if isinstance(expected, bool) or isinstance(value, bool):
        return expected is value
    if isinstance(expected, dict) and isinstance(value, dict):
        return expected.keys() == value.keys() and all(same(one, value[key]) for key, one in expected.items())
    if isinstance(expected, list) and isinstance(value, list):
        return len(expected) == len(value) and all(map(same, expected, value))
    return bool(expected == value)


def _is_integer(value: Any) -> bool:
    return not isinstance(value, bool) and (isinstance(value, int) or (isinstance(value, float) and value.is_integer()))


def _is_usable(keyword: str, value: Any) -> bool:
    match keyword:
        case "type":
            names = value if isinstance(value, list) else [value]
            return bool(names) and all(isinstance(name, str) and name in _TYPES for name in names)
        case "enum":
            return isinstance(value, list) and bool(value)
        case "properties":
            return isinstance(value, dict)
        case "required":
            return isinstance(value, list) and all(isinstance(name, str) for name in value)
        case "anyOf" | "allOf":
            return isinstance(value, list) and bool(value)
        case "items" | "additionalProperties" | "const":
            return True
    if keyword in _COUNTS:
        return _is_integer(value) and value >= 0
    if keyword in _BOUNDS:
        return isinstance(value, int | float) and not isinstance(value, bool)
    return keyword in _NOTES


def _inner_schemas(schema: Mapping[str, Any]) -> list[Any]:
    inner = [*schema.get("anyOf", ()), *schema.get("allOf", ()), *schema.get("properties", {}).values()]
    return inner + [schema[keyword] for keyword in ("items", "additionalProperties") if keyword in schema]


def _is_within(keyword: str, bound: float, amount: float) -> bool:
    return amount >= bound if keyword.startswith("min") else amount <= bound


class _Check:
    """Checks one value, in at most MAX_STEPS steps."""

    def __init__(self) -> None:
        self._steps_left = MAX_STEPS

    def follows(self, schema: Any, value: Any) -> bool:
        self._spend(1)
        if isinstance(schema, bool):
            return schema
        return all(self._holds(keyword, schema, value) for keyword in schema)

    def _same(self, expected: Any, value: Any) -> bool:
        self._spend(1)
        if isinstance(expected, dict) and isinstance(value, dict):
            self._spend(len(value))
            return expected.keys() == value.keys() and all(self._same(one, value[key]) for key, one in expected.items())
        if isinstance(expected, list) and isinstance(value, list):
            return len(expected) == len(value) and all(map(self._same, expected, value))
        return same(expected, value)

    def _spend(self, num_steps: int) -> None:
        self._steps_left -= num_steps
        if self._steps_left < 0:
            raise SchemaTooCostly

    def _holds(self, keyword: str, schema: Mapping[str, Any], value: Any) -> bool:
        wanted = schema[keyword]
        # Some keywords visit each of their entries without checking a schema.
        self._spend(1 + len(wanted) if keyword in _LISTS else 1)
        match keyword:
            case "type":
                return any(_TYPES[name](value) for name in (wanted if isinstance(wanted, list) else [wanted]))
            case "enum":
                if isinstance(value, dict | list):
                    return any(self._same(one, value) for one in wanted)
                # Comparing a scalar takes a tenth of the time of a step.
                self._spend(len(wanted) // 10)
                return any(one == value and same(one, value) for one in wanted)
            case "const":
                return self._same(wanted, value)
            case "anyOf":
                return any(self.follows(one, value) for one in wanted)
            case "allOf":
                return all(self.follows(one, value) for one in wanted)
            case "minLength" | "maxLength" if isinstance(value, str):
                return _is_within(keyword, wanted, len(value))
            case "minItems" | "maxItems" if isinstance(value, list):
                return _is_within(keyword, wanted, len(value))
            case "minimum" | "maximum" if _TYPES["number"](value):
                return _is_within(keyword, wanted, value)
            case "items" if isinstance(value, list):
                return all(self.follows(wanted, one) for one in value)
            case "properties" if isinstance(value, dict):
                return all(self.follows(one, value[name]) for name, one in wanted.items() if name in value)
            case "required" if isinstance(value, dict):
                return all(name in value for name in wanted)
            case "additionalProperties" if isinstance(value, dict):
                self._spend(len(value))
                others = [one for name, one in value.items() if name not in schema.get("properties", {})]
                return all(self.follows(wanted, one) for one in others)
        return True
