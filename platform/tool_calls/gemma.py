"""FunctionGemma: `<start_function_call>call:f{x:<escape>y<escape>}<end_function_call>`. Gemma 4 uses other markers."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import ClassVar

from loramux.platform.tool_calls.call_parser import CallParser
from loramux.platform.tool_calls.literals import OnPiece, read_literal
from loramux.platform.tool_calls.reader import (
    JSON_NUMBER,
    JSON_SYNTAX,
    MAX_NAME_LENGTH,
    Malformed,
    Reader,
    Steps,
)

_NAME = re.compile(r"[\w.-]*")
_KEY = re.compile(r"""[^\s"<>:,{}\[\]]*""")
_BARE = re.compile(r"""[^"<>,{}\[\]]*""")
_JSON_NAMES = {"true": "true", "false": "false", "null": "null", "True": "true", "False": "false", "None": "null"}


@dataclass(frozen=True, slots=True)
class GemmaLiterals:
    """Gemma's syntax for `read_literal`, with strings enclosed in `quote`. It also accepts JSON strings."""

    quote: str

    def key(self, reader: Reader) -> Steps[str]:
        pieces: list[str] = []
        if not (yield from self._string(reader, pieces.append)):
            name = yield from reader.span(_KEY, MAX_NAME_LENGTH)
            if not name:
                raise Malformed
            pieces.append(json.dumps(name, ensure_ascii=False))
        yield from reader.spaces()
        yield from reader.expect(":")
        return "".join(pieces)

    def scalar(self, reader: Reader, on_piece: OnPiece) -> Steps[None]:
        if (yield from self._string(reader, on_piece)):
            return
        text = (yield from reader.span(_BARE)).rstrip()
        if not text or reader.is_exhausted:
            raise Malformed
        if JSON_NUMBER.fullmatch(text):
            on_piece(text)
        else:
            # Models sometimes forget the quotes.
            on_piece(_JSON_NAMES.get(text) or json.dumps(text, ensure_ascii=False))

    def _string(self, reader: Reader, on_piece: OnPiece) -> Steps[bool]:
        if (yield from reader.peek()) == '"':
            yield from reader.enclosed(JSON_SYNTAX, on_piece)
            return True
        if not (yield from reader.literal(self.quote)):
            return False
        on_piece('"')
        yield from reader.until(self.quote, lambda piece: on_piece(json.dumps(piece, ensure_ascii=False)[1:-1]))
        on_piece('"')
        return True


class _GemmaParser(CallParser):
    """Reads calls in Gemma's syntax, and forced calls, which have JSON arguments."""

    literals: ClassVar[GemmaLiterals]
    response: ClassVar[str]
    """The marker that models write to ask for the result."""

    def _block(self, marker: str) -> Steps[None]:
        reader = self._reader
        yield from reader.spaces()
        yield from reader.expect("call:")
        name = yield from reader.span(_NAME, MAX_NAME_LENGTH)
        yield from reader.spaces()
        if not name or (yield from reader.peek()) != "{":
            raise Malformed
        self._begin(name)
        try:
            yield from read_literal(reader, self.literals, self._argue)
        except Malformed:
            if not reader.is_exhausted:
                raise
            # The answer was cut off within a key or value before any of it was converted to JSON.
            self.is_cut_off = True
            reader.mark()
        yield from reader.spaces()
        yield from reader.literal(self.ends[0])
        yield from reader.spaces()
        yield from reader.literal(self.response)


class FunctionGemmaParser(_GemmaParser):
    markers = ("<start_function_call>",)
    ends = ("<end_function_call>",)
    response = "<start_function_response>"
    literals = GemmaLiterals("<escape>")


class Gemma4Parser(_GemmaParser):
    markers = ("<|tool_call>",)
    ends = ("<tool_call|>",)
    response = "<|tool_response>"
    literals = GemmaLiterals('<|"|>')
