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

_MAX_DEPTH = 16
"""Longest chain of references and alternatives that is followed in a schema."""

_FIRST_CHARACTERS = {"{": "object", "[": "array", '"': "string", "t": "boolean", "f": "boolean", "n": "null"}


def argument_types(schema: Mapping[str, Any], name: str) -> frozenset[str] | None:
    """Return the JSON types that the schema of a function's arguments allows for one of them, or None if it allows any.

    The type of an integer is `number`.
    """
    properties = schema.get("properties")
    if isinstance(properties, Mapping) and name in properties:
        return _types(properties[name], schema, 0)
    return _types(schema.get("additionalProperties"), schema, 0)


def json_argument(text: str, types: frozenset[str] | None) -> str:
    """Return an argument as JSON. A text that is no value of one of the types is a string.

    Python's literals count as values, because some templates show them to the model.
    """
    literal = None if types == STRING else _literal(text.strip())
    if literal is not None:
        found = _FIRST_CHARACTERS.get(literal[0], "number")
        # Where strings are allowed, a quoted text is a text with quotes.
        if types is None or "string" not in types or (found in types and found != "string"):
            return literal
    return json.dumps(text, ensure_ascii=False)


def _types(schema: Any, root: Mapping[str, Any], depth: int) -> frozenset[str] | None:
    if not isinstance(schema, Mapping) or depth == _MAX_DEPTH:
        return None
    reference = schema.get("$ref")
    if isinstance(reference, str):
        return _types(_referenced(reference, root), root, depth + 1)
    stated = schema.get("type")
    if stated is not None:
        names = [stated] if isinstance(stated, str) else stated if isinstance(stated, list) else []
        return frozenset("number" if one == "integer" else one for one in names if isinstance(one, str)) or None
    values = [schema["const"]] if "const" in schema else schema.get("enum")
    if isinstance(values, list) and values:
        return frozenset(_FIRST_CHARACTERS.get(json.dumps(one)[0], "number") for one in values)
    for keyword in ("anyOf", "oneOf"):
        if isinstance(schema.get(keyword), list):
            alternatives = [_types(one, root, depth + 1) for one in schema[keyword]]
            known = [one for one in alternatives if one is not None]
            return frozenset[str]().union(*known) if known and len(known) == len(alternatives) else None
    parts = schema.get("allOf")
    if isinstance(parts, list):
        return next((found for one in parts if (found := _types(one, root, depth + 1)) is not None), None)
    return None


def _referenced(reference: str, root: Mapping[str, Any]) -> Any:
    """Return the part of the schema that a reference such as `#/$defs/x` names, or None."""
    start, *steps = reference.split("/")
    found: Any = root if start == "#" else None
    for step in steps:
        found = found.get(step.replace("~1", "/").replace("~0", "~")) if isinstance(found, Mapping) else None
    return found


def _literal(text: str) -> str | None:
    """Return a JSON or Python literal as JSON, or None if the text is no literal. JSON is not changed."""
    try:
        json.loads(text, parse_constant=_refuse)
    except (ValueError, RecursionError):
        return _python_literal(text)
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
