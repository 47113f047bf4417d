"""Grammars of calls whose arguments have tags around them: see `Tags`."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from typing import Any

from loramux.platform.tool_calls.argument_types import STRING, argument_types, json_argument, referenced
from loramux.platform.tool_calls.lark_text import joined, literal, marker_parts, spelled, text_without_pattern
from loramux.platform.tool_calls.reader import MAX_NAME_LENGTH
from loramux.platform.tool_calls.tags import Tags

MAX_ARGUMENTS = 256
"""Maximum number of arguments of all functions of a request that are written between tags."""

MAX_TEXTS = 1024
"""Maximum number of values that are listed for all arguments of a request."""

MAX_LENGTH = 100
"""Maximum sum of the different lengths of texts that a grammar counts, in characters. The lexer has up to a hundred
states for each character, which is half of `MAX_LEXER_STATES`."""

MAX_CHARS = 128 * 1024
"""Maximum number of characters of the rules for all arguments that are written between tags. The definitions that an
argument refers to count for each argument."""

_MAX_ALTERNATIVES = 100

_NOTES = frozenset(
    {"$comment", "$schema", "default", "deprecated", "description", "example", "examples", "readOnly", "title"}
    | {"writeOnly"}
)
"""Keywords that allow every value."""

_OF_FUNCTION = frozenset({"type", "properties", "required", "additionalProperties", "$defs", "definitions"})
_KEY = re.compile(r"""[^"<>\n\s]([^"<>\n]*[^"<>\n\s])?""")
_OTHER_REFERENCE = re.compile(r'"\$(ref": "(?!#/(\$defs|definitions)/)|(dynamic|recursive)Ref"|anchor"|id")')
_KINDS = {str: "string", bool: "boolean", type(None): "null"}
_TEXTS_OF = {"null": ("null",), "boolean": ("true", "false")}

ToJson = Callable[[Mapping[str, Any]], str]
"""Returns the expression for the values of a schema."""


class _Unwritable(Exception):
    """A call cannot be written between tags so that its arguments surely follow the schema."""


@dataclass(frozen=True, slots=True)
class _Length:
    least: int
    most: int | None

    @property
    def repeats(self) -> str:
        if self.most is None:
            return f"{{{self.least},}}" if self.least else "*"
        return f"{{{self.least},{self.most}}}"


_ANY_LENGTH = _Length(0, None)


@dataclass(slots=True)
class _Left:
    """The parts of the limits that are left."""

    arguments: int = MAX_ARGUMENTS
    texts: int = MAX_TEXTS
    length: int = MAX_LENGTH
    chars: int = MAX_CHARS

    def spend(self, *, arguments: int = 0, texts: int = 0, length: int = 0, chars: int = 0) -> None:
        """Raise _Unwritable if more is spent than is left."""
        self.arguments -= arguments
        self.texts -= texts
        self.length -= length
        self.chars -= chars
        if min(self.arguments, self.texts, self.length, self.chars) < 0:
            raise _Unwritable


class TaggedCalls:
    """Adds the rules of calls to `lines`, as long as they stay within the limits for a request."""

    def __init__(
        self, lines: list[str], tags: Tags, after: Collection[str], ids: Mapping[str, int], to_json: ToJson
    ) -> None:
        """`after` are the texts that can come after a call: see `Tags.call_end`."""
        self._lines = lines
        self._tags = tags
        self._after = "|".join(map(re.escape, after))
        self._ids = ids
        self._to_json = to_json
        self._line = '"\\n"?' if tags.is_compact else '"\\n"'
        self._value_end = ("\n" if tags.has_lines else "") + tags.value_end
        self._left = _Left()
        self._texts: dict[tuple[_Length, str | None], str] = {}
        self._any: str | None = None

    def arguments(self, schema: Mapping[str, Any]) -> str | None:
        """Return the expression for a function's arguments, with the line breaks around them, or None if they must be
        written in JSON.

        Arguments come in the order of the schema. Arguments that it does not name cannot be written, unless it has no
        `properties`.
        """
        num_lines, left, texts = len(self._lines), replace(self._left), dict(self._texts)
        try:
            return f"{self._line} {self._written(schema)}"
        except _Unwritable:
            # Rules that nothing uses would still be compiled.
            del self._lines[num_lines:]
            self._left, self._texts = left, texts
            return None

    def _written(self, schema: Mapping[str, Any]) -> str:
        if not _OF_FUNCTION.issuperset({*schema} - _NOTES) or schema.get("type") != "object":
            raise _Unwritable
        can_add, properties, required = (schema.get(one) for one in ("additionalProperties", "properties", "required"))
        if properties is None and can_add in (None, True) and not required:
            return self._any_arguments()
        properties, required = properties or {}, required or []
        if (
            can_add not in (None, False)
            or not isinstance(properties, dict)
            or not isinstance(required, list)
            or not all(isinstance(one, str) and one in properties for one in required)
            or not all(map(self._is_key, properties))
        ):
            raise _Unwritable
        self._left.spend(arguments=len(properties))
        names = f"({'|'.join(map(re.escape, properties))})"
        found = []
        for name, one in properties.items():
            argument = self._argument(literal(name), self._value(schema, name, one, names))
            found.append(argument if name in required else f"({argument})?")
        return " ".join(found)

    def _any_arguments(self) -> str:
        if self._any is None:
            key = self._add("KEY", r'/[^"<>\n]{1,64}/')
            self._any = self._add("any", f"({self._argument(key, self._text(_ANY_LENGTH, None))})*")
        return self._any

    def _is_key(self, name: str) -> bool:
        is_short = len(name) <= MAX_NAME_LENGTH
        return is_short and _KEY.fullmatch(name) is not None and not any(one in name for one in self._ids)

    def _argument(self, key: str, value: str) -> str:
        """Return the expression for an argument. `value` includes the tag after it."""
        tags, ids = self._tags, self._ids
        value_begin = f"{self._line} {spelled(tags.value_begin, ids)}" if tags.value_begin else ""
        line = literal("\n") if tags.has_lines else ""
        begin = f"{spelled(tags.key, ids)} {key} {spelled(tags.key_end, ids)} {value_begin} {line}"
        argument = f"{begin} {value} {self._line}"
        self._left.spend(chars=len(argument))
        return argument

    def _value(self, root: Mapping[str, Any], name: str, schema: Any, names: str) -> str:
        """Return the expression for a value of an argument, and the tag after it."""
        if schema is True or (isinstance(schema, dict) and _NOTES.issuperset(schema)):
            return self._text(_ANY_LENGTH, names)
        types = argument_types(root, name)
        if types is None or not isinstance(schema, dict):
            raise _Unwritable
        if "string" not in types:
            return f"{self._json(root, schema)} {spelled(self._value_end, self._ids)}"
        length, texts, others = self._alternatives(root, schema, types)
        if any(map(self._has_tag, texts)):
            raise _Unwritable
        if length is not None:
            # The parser reads text that is JSON of another type as a value of that type. Such text has its own length.
            is_counted = length != _ANY_LENGTH
            if types - {"string"} != others or (is_counted and types != STRING) or (is_counted and texts):
                raise _Unwritable
            return self._text(length, names)
        if not texts or "number" in others:
            raise _Unwritable
        first, *rest = marker_parts(self._value_end, self._ids)
        if first in self._ids:
            first, rest = "", [first, *rest]
        listed = " | ".join(json.dumps(text + first) for text in texts)
        return f"({listed}) {spelled(''.join(rest), self._ids)}"

    def _has_tag(self, text: str) -> bool:
        return any(one in text for one in (self._tags.value_end, self._tags.key, self._tags.end))

    def _json(self, root: Mapping[str, Any], schema: Mapping[str, Any]) -> str:
        """Add a rule for the JSON of a schema, and return its name."""
        text = json.dumps(schema)
        if "$" in text and '"$ref"' in text:
            schema = {**schema, **{key: root[key] for key in ("$defs", "definitions") if key in root}}
            text = json.dumps(schema)
        if _OTHER_REFERENCE.search(text):
            raise _Unwritable
        return self._add("value", self._to_json(schema))

    def _text(self, length: _Length, names: str | None) -> str:
        """Add the terminals for free text without the tags that the parser would take for its end, and return the
        expression for the text and the tag after it.
        """
        key = (length, names)
        if key not in self._texts:
            tags = self._tags
            ends = [re.escape(tags.value_end), tags.call_end(self._after)]
            if names is not None:
                ends.append((r"\n" if tags.missed_line else "") + tags.next_argument(names))
            self._left.spend(length=max(length.least, length.most or 0))
            pattern = "|".join(ends).replace("/", r"\/")
            text = self._add("ARGUMENT", text_without_pattern(pattern, length.repeats))
            ended = f"ENDED_{len(self._lines)}"
            self._texts[key] = joined(self._lines, ended, text, self._value_end, self._ids)
        return self._texts[key]

    def _alternatives(
        self, root: Mapping[str, Any], schema: Any, types: frozenset[str]
    ) -> tuple[_Length | None, list[str], frozenset[str]]:
        """Return what an argument can be: the length of its text, or None if only some texts are allowed; these texts;
        and those of its `types` that allow every value, except strings.
        """
        length: _Length | None = None
        texts: list[str] = []
        others: set[str] = set()
        for one in _flat(root, schema):
            keys, kind = {*one} - _NOTES, one.get("type")
            if keys - {"type"} in ({"enum"}, {"const"}):
                values = [one["const"]] if "const" in one else one["enum"]
                if not isinstance(values, list):
                    raise _Unwritable
                self._left.spend(texts=len(values))
                texts += _listed(values, types, kind)
            elif kind == "string" and keys <= {"type", "minLength", "maxLength"} and length is None:
                length = _length(one.get("minLength", 0), one.get("maxLength"))
            elif keys == {"type"} and kind in ("null", "boolean", "number"):
                others.add(kind)
                texts += _TEXTS_OF.get(kind, ())
            else:
                raise _Unwritable
        return length, texts, frozenset(others)

    def _add(self, name: str, expression: str) -> str:
        """Add a rule or terminal, and return its name."""
        self._left.spend(chars=len(expression))
        name = f"{name}_{len(self._lines)}"
        self._lines.append(f"{name}: {expression}")
        return name


def _flat(root: Mapping[str, Any], schema: Any) -> list[Mapping[str, Any]]:
    """Return the alternatives of a schema. A value satisfies the schema if it satisfies one of them."""
    found: list[Mapping[str, Any]] = []
    waiting = [schema]
    for _ in range(_MAX_ALTERNATIVES):
        if not waiting:
            return found
        one = waiting.pop()
        if not isinstance(one, dict):
            raise _Unwritable
        keys = {*one} - _NOTES
        if keys == {"$ref"}:
            waiting.append(referenced(one, root))
        elif keys == {"anyOf"} and isinstance(one["anyOf"], list) and len(one["anyOf"]) <= _MAX_ALTERNATIVES:
            waiting += one["anyOf"][::-1]
        elif keys == {"type"} and isinstance(one["type"], list):
            waiting += [{"type": kind} for kind in one["type"][:_MAX_ALTERNATIVES]]
        else:
            found.append(one)
    raise _Unwritable


def _listed(values: list[Any], types: frozenset[str], kind: Any) -> list[str]:
    """Return the texts that the parser reads as these values. `kind` is the schema's `type`, or None."""
    texts = []
    for value in values:
        text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
        is_of_kind = kind is None or _KINDS.get(type(value)) in (kind if isinstance(kind, list) else [kind])
        if not is_of_kind or json.dumps(json.loads(json_argument(text, types))) != json.dumps(value):
            raise _Unwritable
        texts.append(text)
    return texts


def _length(least: Any, most: Any) -> _Length:
    if not all(type(one) is int and 0 <= one <= MAX_LENGTH for one in (least, most) if one is not None):
        raise _Unwritable
    if most is not None and most < least:
        raise _Unwritable
    return _Length(least, most)
