from __future__ import annotations

import json
import random
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import regex

from loramux.platform.grammars.constraint import ConstraintKind

WHITESPACE = r"(?: |\n {0,32})?"
MULTIBYTE = (
    r"(?:[\xc2-\xdf][\x80-\xbf]|\xe0[\xa0-\xbf][\x80-\xbf]|[\xe1-\xec\xee\xef][\x80-\xbf]{2}|\xed[\x80-\x9f][\x80-\xbf]"
    r"|\xf0[\x90-\xbf][\x80-\xbf]{2}|[\xf1-\xf3][\x80-\xbf]{3}|\xf4[\x80-\x8f][\x80-\xbf]{2})"
)
"""One character beyond ASCII as valid UTF-8 (RFC 3629, section 4)."""

STRING_CHARACTER = rf'(?:[^"\\\x00-\x1f\x7f-\xff]|{MULTIBYTE}|\\["\\bfnrt]|\\u00[01][0-9a-fA-F]|\\u007[fF])'
"""One character of a JSON string. Only the escapes that JSON requires and the short escapes are allowed."""

LITERALS = ("a", "ab", "abc", '"', '{"', '"}', '": "', "true", "[{", "}]", "\n", "é", "x y")
CLASSES = ("[a-c]", "[0-9]", '["}]', "[^a-z\\x00-\\x1f\\x7f-\\U0010ffff]", "[ab]")
REPEATS = ("*", "+", "?", "{2}", "{1,3}", "{0,2}", "{2,}")
MAX_NESTING = 9
"""Deepest nesting in a pattern. A walk of fewer tokens cannot exceed it."""


@dataclass(frozen=True)
class Language:
    kind: ConstraintKind
    text: str
    pattern: str

    @cached_property
    def _compiled(self) -> regex.Pattern[bytes]:
        return regex.compile(_as_bytes(self.pattern))

    def contains(self, text: bytes) -> bool:
        return self._compiled.fullmatch(text) is not None

    def may_continue(self, prefix: bytes) -> bool:
        """Return whether the language contains a text that begins with `prefix`."""
        return self._compiled.fullmatch(prefix, partial=True) is not None


def languages(count: int, seed: int = 0) -> Iterator[Language]:
    makers = (_regex, _choice, _schema, _grammar)
    for number in range(count):
        yield makers[number % len(makers)](random.Random(seed * count + number))


def _as_bytes(pattern: str) -> bytes:
    # UTF-8 is correct here, because characters beyond ASCII appear only as literals inside groups.
    return pattern.encode()


def _regex(generator: random.Random) -> Language:
    def part(depth: int) -> str:
        kind = generator.randrange(5 if depth else 2)
        if kind == 0:
            return f"(?:{regex.escape(generator.choice(LITERALS), literal_spaces=True)})"
        if kind == 1:
            return generator.choice(CLASSES)
        if kind == 2:
            return "".join(part(depth - 1) for _ in range(generator.randint(1, 3)))
        if kind == 3:
            return f"(?:{'|'.join(part(depth - 1) for _ in range(generator.randint(2, 3)))})"
        return f"(?:{part(depth - 1)}){generator.choice(REPEATS)}"

    pattern = part(3)
    return Language("regex", pattern, pattern.replace("\\U0010ffff", "\\xff"))


def _choice(generator: random.Random) -> Language:
    choices = ["".join(generator.choices(LITERALS, k=generator.randint(1, 3))) for _ in range(generator.randint(1, 6))]
    return Language("choice", json.dumps(choices), "|".join(regex.escape(one) for one in choices))


def _grammar(generator: random.Random) -> Language:
    """A grammar of nested lists, which a regular expression can describe only up to a fixed depth."""
    leaf = generator.choice(('"a"', '"ab" | "abc"', "/[0-9]{1,3}/", '"\\"" /[a-c]*/ "\\""'))
    leaf_pattern = {
        '"a"': "a",
        '"ab" | "abc"': "abc?",
        "/[0-9]{1,3}/": "[0-9]{1,3}",
        '"\\"" /[a-c]*/ "\\""': '"[a-c]*"',
    }[leaf]
    repeat = generator.choice(("*", "?"))
    text = f'start: list\nlist: "[" (item ("," item){repeat})? "]"\nitem: list | leaf\nleaf: {leaf}\n'
    pattern = leaf_pattern
    for _ in range(MAX_NESTING):
        pattern = rf"(?:\[(?:{pattern}(?:,{pattern}){repeat})?\]|{leaf_pattern})" if len(pattern) < 40_000 else pattern
    return Language("grammar", text, rf"\[(?:{pattern}(?:,{pattern}){repeat})?\]")


def _schema(generator: random.Random) -> Language:
    schema, pattern = _value(generator, 2)
    return Language("json_schema", json.dumps(schema), pattern)


def _value(generator: random.Random, depth: int) -> tuple[Any, str]:
    kind = generator.randrange(8 if depth else 5)
    if kind == 0:
        low, high = sorted(generator.choices(range(4), k=2))
        return {"type": "string", "minLength": low, "maxLength": high}, f'"{STRING_CHARACTER}{{{low},{high}}}"'
    if kind == 1:
        return {"type": "string"}, f'"{STRING_CHARACTER}*"'
    if kind == 2:
        values = generator.sample(["a", "ab", "abc", 'a"b', "é", "}", 7, 71, True, None], generator.randint(1, 5))
        spelled = "|".join(regex.escape(json.dumps(one, ensure_ascii=False)) for one in values)
        return {"enum": values}, f"(?:{spelled})"
    if kind == 3:
        return {"type": "boolean"}, "(?:true|false)"
    if kind == 4:
        high = generator.choice((9, 99, 999))
        return {"type": "integer", "minimum": 0, "maximum": high}, f"(?:0|[1-9][0-9]{{0,{len(str(high)) - 1}}})"
    if kind == 5:
        first, second = _value(generator, depth - 1), _value(generator, 0)
        return {"anyOf": [first[0], {"type": "null"}, second[0]]}, f"(?:{first[1]}|null|{second[1]})"
    if kind == 6:
        item, pattern = _value(generator, depth - 1)
        high = generator.randint(1, 3)
        more = rf"(?:{WHITESPACE},{WHITESPACE}{pattern}){{0,{high - 1}}}"
        schema = {"type": "array", "items": item, "maxItems": high}
        return schema, rf"\[{WHITESPACE}(?:{pattern}{more}{WHITESPACE})?\]"
    return _object(generator, depth)


def _object(generator: random.Random, depth: int) -> tuple[Any, str]:
    """An object schema and its pattern. Only the first property is required."""
    names = generator.sample(["a", "ab", "b", 'q"'], generator.randint(1, 3))
    values = [_value(generator, depth - 1) for _ in names]
    schema = {
        "type": "object",
        "properties": {name: value[0] for name, value in zip(names, values, strict=True)},
        "required": names[:1],
        "additionalProperties": False,
    }
    members = [
        f"{regex.escape(json.dumps(name))}{WHITESPACE}:{WHITESPACE}{value[1]}"
        for name, value in zip(names, values, strict=True)
    ]
    rest = "".join(f"(?:{WHITESPACE},{WHITESPACE}{member})?" for member in members[1:])
    return schema, rf"\{{{WHITESPACE}{members[0]}{rest}{WHITESPACE}\}}"
