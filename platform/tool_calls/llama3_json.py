"""Llama 3.1 to 3.3: `{"name": "f", "parameters": {"x": 1}}`. Several calls are separated by `;`."""

from __future__ import annotations

from loramux.platform.tool_calls.json_calls import JsonCallParser
from loramux.platform.tool_calls.reader import Steps


class Llama3JsonParser(JsonCallParser):
    """The objects are at the start of the answer or after `<|python_tag|>`."""

    markers = ("<|python_tag|>",)
    openers = "{"

    def _block(self, marker: str) -> Steps[None]:
        reader = self._reader
        while True:
            yield from reader.spaces()
            yield from self._call_object(is_marked=False)
            yield from reader.spaces()
            if not (yield from reader.literal(";")):
                return
            yield from reader.spaces()
            if (yield from reader.peek()) != "{":
                return
