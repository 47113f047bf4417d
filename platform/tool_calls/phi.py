"""Phi-4-mini: `functools[{"name": "f", "arguments": {"x": 1}}]`, or `<|tool_call|>[...]<|/tool_call|>`."""

from __future__ import annotations

from loramux.platform.tool_calls.json_calls import JsonCallParser
from loramux.platform.tool_calls.reader import Steps


class PhiParser(JsonCallParser):
    markers = ("<|tool_call|>", "functools[")
    ends = ("<|/tool_call|>",)

    def _block(self, marker: str) -> Steps[None]:
        reader = self._reader
        yield from reader.spaces()
        if marker.endswith("["):
            yield from self._rest_of_array(is_marked=True)
        else:
            yield from self._call_array()
        yield from reader.spaces()
        yield from reader.literal("<|/tool_call|>")
