"""The tags around the arguments of a call, for parsers and for grammars."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

from loramux.platform.tool_calls.reader import MAX_GAP, SPACE


@dataclass(frozen=True, slots=True)
class Tags:
    """The text around the parts of a call: `begin` NAME `name_end`, then each argument, then `end`.

    An argument is `key` KEY `key_end` VALUE `value_end`. Whitespace may come before each tag but `value_end`. With
    `value_begin`, it may also come after `key_end`, and the value begins after that tag. Values that are strings are
    written as they are, others in JSON. If `has_lines`, a line break comes before and after each value.
    """

    begin: str
    name_end: str
    key: str
    key_end: str
    value_end: str
    end: str
    value_begin: str = ""
    has_lines: bool = False
    is_compact: bool = False
    """True if some models write no line break between the tags."""

    def after_calls(self, markers: Iterable[str], block_end: str) -> list[str]:
        """Return the texts that can come after a call, for a format with these markers around a block of calls."""
        return sorted({*markers, self.begin, block_end} - {"", self.end})

    @property
    def missed_line(self) -> str:
        """The text that must come before `next_argument` where the model left out `value_end`. A value can mention the
        tags within a line.
        """
        return "" if self.is_compact else "\n"

    def next_argument(self, names: str) -> str:
        """Return the pattern of the beginning of an argument, whose name matches the pattern `names`."""
        begin = f"{re.escape(self.key)}{names}{re.escape(self.key_end)}"
        return begin + (f"{SPACE}{{0,{MAX_GAP}}}{re.escape(self.value_begin)}" if self.value_begin else "")

    def call_end(self, after: str) -> str:
        """Return the pattern of the end of a call. It counts only before a text that matches the pattern `after`,
        because a value can contain it.
        """
        return f"{re.escape(self.end)}{SPACE}{{0,{MAX_GAP}}}({after})"


QWEN3_CODER = Tags("<function=", ">", "<parameter=", ">", "</parameter>", "</function>", has_lines=True)
SEED_OSS = Tags("<function=", ">", "<parameter=", ">", "</parameter>", "</function>")
GLM45 = Tags(
    "", "", "<arg_key>", "</arg_key>", "</arg_value>", "</tool_call>", value_begin="<arg_value>", is_compact=True
)
MINIMAX_M2 = Tags('<invoke name="', '">', '<parameter name="', '">', "</parameter>", "</invoke>")
