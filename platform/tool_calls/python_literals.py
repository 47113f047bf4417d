"""Python's literals: strings, numbers, True, False, None, lists and dicts. `ast.literal_eval` is called only on single
strings and numbers.
"""

from __future__ import annotations

import ast
import json
import re

from loramux.platform.tool_calls.literals import OnPiece
from loramux.platform.tool_calls.reader import JSON_NUMBER, PYTHON_SYNTAX, Malformed, Reader, Steps

MAX_NUMBER_LENGTH = 64
"""Longest number that is converted to JSON, in characters. Numbers that are already valid JSON are passed on
unchanged.
"""

_NAMES = {"True": "true", "False": "false", "None": "null", "true": "true", "false": "false", "null": "null"}
"""Models sometimes write JSON's names instead of Python's."""

_SCALAR = re.compile(r"[\w.+-]*")
_NUMBER = re.compile(r"[0-9a-fA-FxXoO_.+-]+")
"""Python warns about numbers that a keyword follows, such as `1if`. A keyword has other letters."""
_ESCAPE = re.compile(r"\\(?:[\n\\'\"abfnrtv]|0(?!\d)|x[0-9a-fA-F]{2}|u[0-9a-fA-F]{4})?|[\n\r\0]")
"""A valid Python escape, the backslash of an invalid one, or a character that a string cannot contain unescaped."""

_WRITTEN = {"\\": "\\\\", "\n": "\\n", "\r": "\\r", "\0": "\\x00"}


class PythonLiterals:
    def key(self, reader: Reader) -> Steps[str]:
        pieces: list[str] = []
        yield from self.scalar(reader, pieces.append)
        yield from reader.spaces()
        yield from reader.expect(":")
        key = "".join(pieces)
        return key if key.startswith('"') else f'"{key}"'

    def scalar(self, reader: Reader, on_piece: OnPiece) -> Steps[None]:
        first = yield from reader.peek()
        if first and first in "\"'":
            pieces: list[str] = []
            yield from reader.enclosed(PYTHON_SYNTAX, pieces.append)
            on_piece(_json_string("".join(pieces)))
            return
        text = yield from reader.span(_SCALAR)
        if text in _NAMES:
            on_piece(_NAMES[text])
        else:
            on_piece(text if JSON_NUMBER.fullmatch(text) else _json_number(text))


def _json_string(token: str) -> str:
    """Convert a string in quotes to JSON. Raises Malformed.

    Strings may contain raw line breaks and unknown escapes, which models write in code.
    """
    token = _ESCAPE.sub(lambda found: _WRITTEN.get(found.group(), found.group()), token)
    try:
        # Models may write a character beyond U+FFFF as two surrogates, as in JSON.
        text = str(ast.literal_eval(token)).encode("utf-16", "surrogatepass").decode("utf-16")
    except (SyntaxError, ValueError) as error:  # triple quotes, or a lone surrogate
        raise Malformed from error
    return json.dumps(text, ensure_ascii=False)


def _json_number(text: str) -> str:
    """Convert a number such as `.5`, `+1` or `1_000` to JSON. Raises Malformed."""
    if len(text) > MAX_NUMBER_LENGTH or _NUMBER.fullmatch(text) is None:
        raise Malformed
    try:
        number = ast.literal_eval(text)
        if type(number) not in (int, float):
            raise Malformed
        return json.dumps(number, allow_nan=False)
    except (SyntaxError, ValueError, RecursionError) as error:
        raise Malformed from error
