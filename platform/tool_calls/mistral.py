"""Mistral: `[TOOL_CALLS][{"name": "f", "arguments": {"x": 1}}]`, and since 2025 `[TOOL_CALLS]f[ARGS]{"x": 1}`."""

from __future__ import annotations

import re

from loramux.platform.tool_calls.json_calls import JsonCallParser
from loramux.platform.tool_calls.reader import JSON_SYNTAX, MAX_NAME_LENGTH, Malformed, Steps

_NAME = re.compile(r"[\w.-]*")


class MistralParser(JsonCallParser):
    markers = ("[TOOL_CALLS]",)

    def _block(self, marker: str) -> Steps[None]:
        reader = self._reader
        yield from reader.spaces()
        if (yield from reader.peek()) == "[":
            yield from self._call_array()
        elif (yield from reader.peek()) == "{":
            yield from self._call_object(is_marked=True)
        else:
            yield from self._named_call()

    def _named_call(self) -> Steps[None]:
        reader = self._reader
        name = yield from reader.span(_NAME, MAX_NAME_LENGTH)
        if not name:
            raise Malformed
        if (yield from reader.literal("[CALL_ID]")):
            yield from reader.span(_NAME, MAX_NAME_LENGTH)
        yield from reader.literal("[ARGS]")
        yield from reader.spaces()
        if (yield from reader.peek()) != "{":
            raise Malformed
        self._begin(name)
        yield from reader.enclosed(JSON_SYNTAX, self._argue)
        yield from self._end_of_call()
