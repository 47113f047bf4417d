"""Turns the text of an argument into JSON, as the function's schema says.

Formats that write arguments without quotes cannot tell the number 5 from the string "5". The schema decides.
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Mapping
from typing import Any

from loramux.platform.tool_calls.literals import read_literal
from loramux.platform.tool_calls.python_literals import PythonLiterals
from loramux.platform.tool_calls.reader import Malformed, Reader

STRING = frozenset({"string"})

_MAX_SCHEMAS = 100
"""Number of schemas that are looked at to find the types of one argument. Schemas can refer to themselves."""

_MAX_VALUES = 1000
"""Number of an enum's values, of a schema's types and of a reference's steps that are looked at."""

_FIRST_CHARACTERS = {"{": "object", "[": "array", '"': "string", "t": "boolean", "f": "boolean", "n": "null"}

_NAMES = {dict: "object", list: "array", str: "string", bool: "boolean", type(None): "null"}


def argument_types(schema: Mapping[str, Any], name: str) -> frozenset[str] | None:
    """Return the JSON types that the schema of a function's arguments allows for one of them, or None if it allows any,
    or if that takes too long to find out.

    The type of an integer is `number`.
    """
    return _Search(schema).types_of(name)


def has_argument(schema: Mapping[str, Any], name: str) -> bool:
    """Return whether the schema of a function's arguments states one of this name. False if that takes too long to find
    out.
    """
    return _Search(schema).has(name)


def json_argument(text: str, types: frozenset[str] | None) -> str:
    """Return an argument as JSON. A text that is neither JSON nor a literal of Python is a string.

    Where strings are allowed, a text is a string unless it is JSON of another allowed type. Python's lists, dicts and
    names count as JSON, because some templates show them to the model. Its numbers count only where strings are not
    allowed: `0x52` and `+49` are rather texts.
    """
    if types == STRING:
        return json.dumps(text, ensure_ascii=False)
    can_be_text = types is None or "string" in types
    literal = _literal(text.strip(), has_numbers=not can_be_text)
    if literal is not None:
        found = _FIRST_CHARACTERS.get(literal[0], "number")
        # Where strings are allowed, a quoted text is a text with quotes.
        if types is None or not can_be_text or (found in types and found != "string"):
            return literal
    return json.dumps(text, ensure_ascii=False)


class _Search:
    """Looks at the schema of a function's arguments."""

    def __init__(self, root: Mapping[str, Any]) -> None:
        self._root = root
        self._num_left = _MAX_SCHEMAS

    def types_of(self, name: str) -> frozenset[str] | None:
        found = self._property(self._root, name)
        return self._types(self._root.get("additionalProperties") if found is None else found)

    def has(self, name: str) -> bool:
        return self._property(self._root, name) is not None

    def _property(self, schema: Any, name: str) -> Any:
        """Return the schema of a property, which can be stated behind a reference or in a part of the schema. Return
        None if there is none.
        """
        if not self._may_look_at(schema):
            return None
        properties = schema.get("properties")
        if isinstance(properties, Mapping) and name in properties:
            return properties[name]
        parts = [referenced(schema, self._root), *self._listed(schema, "allOf")]
        return next((found for one in parts if (found := self._property(one, name)) is not None), None)

    def _types(self, schema: Any) -> frozenset[str] | None:
        if not self._may_look_at(schema):
            return None
        target = referenced(schema, self._root)
        if target is not None:
            return self._types(target)
        stated = schema.get("type")
        if stated is not None:
            names = [stated] if isinstance(stated, str) else stated[:_MAX_VALUES] if isinstance(stated, list) else []
            found = {"number" if one == "integer" else one for one in names if isinstance(one, str)}
            if schema.get("nullable") is True:
                found.add("null")
            return frozenset(found) or None
        values = [schema["const"]] if "const" in schema else schema.get("enum")
        if isinstance(values, list) and values:
            return frozenset(_NAMES.get(kind, "number") for kind in set(map(type, values[:_MAX_VALUES])))
        for keyword in ("anyOf", "oneOf"):
            if alternatives := self._listed(schema, keyword):
                kinds = [self._types(one) for one in alternatives]
                known = [one for one in kinds if one is not None]
                return frozenset[str]().union(*known) if len(known) == len(kinds) else None
        parts = (self._types(one) for one in self._listed(schema, "allOf"))
        return next((found for found in parts if found is not None), None)

    def _may_look_at(self, schema: Any) -> bool:
        self._num_left -= 1
        return self._num_left >= 0 and isinstance(schema, Mapping)

    def _listed(self, schema: Mapping[str, Any], keyword: str) -> list[Any]:
        """Return the schemas of a keyword. A list that is too long to look at counts as one unknown schema."""
        found = schema.get(keyword)
        if not isinstance(found, list):
            return []
        return found if len(found) <= self._num_left else [None]


def referenced(schema: Mapping[str, Any], root: Mapping[str, Any]) -> Any:
    """Return the part of the root that the schema's reference, such as `#/$defs/x`, names, or None."""
    reference = schema.get("$ref")
    if not isinstance(reference, str):
        return None
    start, *steps = reference.split("/", _MAX_VALUES)
    found: Any = root if start == "#" else None
    for step in steps:
        found = found.get(step.replace("~1", "/").replace("~0", "~")) if isinstance(found, Mapping) else None
    return found


def _literal(text: str, *, has_numbers: bool) -> str | None:
    """Return a JSON or Python literal as JSON, or None if the text is no literal. JSON is not changed.

    Python's own spellings of numbers, such as `0x1`, count only if `has_numbers`.
    """
    try:
        json.loads(text, parse_constant=_refuse)
    except (ValueError, RecursionError):
        is_literal = has_numbers or text[:1] in ("[", "{") or text in ("True", "False", "None")
        return _python_literal(text) if is_literal else None
    return text


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} is not JSON")


def _python_literal(text: str) -> str | None:
    reader = Reader()
    reader.add(text)
    reader.is_ended = True
    pieces: list[str] = []
    try:
        # The text has ended, so the generator never waits for more.
        deque(read_literal(reader, PythonLiterals(), pieces.append), maxlen=0)
    except Malformed:
        return None
    return "".join(pieces) if reader.is_exhausted else None
