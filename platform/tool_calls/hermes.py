"""Hermes, Qwen2.5 and Qwen3: `<tool_call>{"name": "f", "arguments": {"x": 1}}</tool_call>`."""

from __future__ import annotations

from loramux.platform.tool_calls.json_calls import JsonCallParser
from loramux.platform.tool_calls.reader import Steps


class HermesParser(JsonCallParser):
    markers = ("<tool_call>",)
    ends = ("</tool_call>",)

    def _block(self, marker: str) -> Steps[None]:
        reader = self._reader
        yield from reader.spaces()
        yield from self._call_object(is_marked=True)
        yield from reader.spaces()
        # Some models write all their calls in one block.
        while (yield from reader.peek()) == "{":
            yield from self._call_object(is_marked=True)
            yield from reader.spaces()
        yield from reader.literal(self.ends[0])
