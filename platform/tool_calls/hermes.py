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
        # Some models write all their calls in one block. Others write no end, and then an answer, maybe in JSON.
        while (has_comma := (yield from reader.literal(","))) or (yield from reader.peek()) == "{":
            if has_comma:
                yield from reader.spaces()
            yield from self._call_object(is_marked=False)
        yield from reader.literal(self.ends[0])
