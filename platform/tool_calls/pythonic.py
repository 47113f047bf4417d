"""Llama 3.2 and 4, and Gemma 3: `[f(x=1), g(y="z")]`, alone or between `<|python_start|>` and `<|python_end|>`."""

from __future__ import annotations

import re

from loramux.platform.tool_calls.json_calls import JsonCallParser
from loramux.platform.tool_calls.literals import read_literal
from loramux.platform.tool_calls.python_literals import PythonLiterals
from loramux.platform.tool_calls.reader import MAX_NAME_LENGTH, Malformed, Steps

_NAME = re.compile(r"[\w.-]*")
_KEYWORD = re.compile(r"\w*")
_LITERALS = PythonLiterals()


class PythonicParser(JsonCallParser):
    """Reads a list of Python calls or of JSON objects. Without the marker, Python calls must be the whole answer.

    Python calls are reported once their list is complete, because until then the list may turn out to be text. Forced
    calls are JSON objects, because these can express every schema.
    """

    markers = ("<|python_start|>",)
    ends = ("<|python_end|>",)
    openers = "["

    def _block(self, marker: str) -> Steps[None]:
        reader = self._reader
        yield from reader.spaces()
        yield from reader.expect("[")
        yield from reader.spaces()
        if (yield from reader.peek()) == "{":
            yield from self._rest_of_array(is_marked=bool(marker))
            yield from reader.spaces()
            yield from reader.literal("<|python_end|>")
            return
        calls = yield from self._calls()
        yield from reader.spaces()
        is_ended = yield from reader.literal("<|python_end|>")
        if not marker and not is_ended and (yield from reader.peek()):
            raise Malformed
        for name, arguments in calls:
            self._begin(name)
            self._argue(arguments)

    def _calls(self) -> Steps[list[tuple[str, str]]]:
        """Read calls up to the closing bracket. Return their names and the JSON of their arguments."""
        reader = self._reader
        calls: list[tuple[str, str]] = []
        while True:
            name = yield from reader.span(_NAME, MAX_NAME_LENGTH)
            if not name:
                raise Malformed
            yield from reader.expect("(")
            calls.append((name, (yield from self._arguments())))
            yield from reader.spaces()
            if (yield from reader.literal("]")):
                return calls
            yield from reader.expect(",")
            yield from reader.spaces()

    def _arguments(self) -> Steps[str]:
        """Read keyword arguments up to the closing parenthesis. Return them as JSON."""
        reader = self._reader
        pieces: list[str] = []
        names: set[str] = set()
        while True:
            yield from reader.spaces()
            if (yield from reader.literal(")")):
                return "{" + "".join(pieces) + "}"
            if names:
                yield from reader.expect(",")
                yield from reader.spaces()
                if (yield from reader.literal(")")):
                    return "{" + "".join(pieces) + "}"
                pieces.append(", ")
            name = yield from reader.span(_KEYWORD, MAX_NAME_LENGTH)
            if not name or name in names:
                raise Malformed
            names.add(name)
            pieces.append(f'"{name}": ')
            yield from reader.spaces()
            yield from reader.expect("=")
            yield from read_literal(reader, _LITERALS, pieces.append)
