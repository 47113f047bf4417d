"""Calls whose arguments have tags around them: Qwen3-Coder and Qwen3.5, Seed-OSS, GLM-4.5 and later, MiniMax-M2."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import ClassVar

from loramux.platform.tool_calls.argument_types import STRING, argument_types, json_argument
from loramux.platform.tool_calls.call_parser import CallParser
from loramux.platform.tool_calls.reader import JSON_SYNTAX, MAX_NAME_LENGTH, Malformed, Steps, is_function_name

_NAME = re.compile(r"""[^\s"<>]*""")
_KEY = re.compile(r"""[^"<>\n]*""")


@dataclass(frozen=True, slots=True)
class Tags:
    """The text around the parts of a call: `begin` NAME `name_end`, then each argument, then `end`.

    An argument is `key` KEY `key_end` VALUE `value_end`. Whitespace may come before each tag but `value_end`. With
    `value_begin`, it may also come after `key_end`, and the value begins after that tag. Values that are strings are
    written as they are, others in JSON, and a value ends at the first `value_end`, whatever else it contains. If
    `has_lines`, a line break comes before and after each value.
    """

    begin: str
    name_end: str
    key: str
    key_end: str
    value_end: str
    end: str
    value_begin: str = ""
    has_lines: bool = False


class TaggedCallParser(CallParser):
    """Reads calls in tags, and forced calls, which have JSON arguments.

    `schemas` decides which values are strings. Strings are passed on piece by piece, other values once they are
    complete.
    """

    tags: ClassVar[Tags]

    def __init__(self) -> None:
        super().__init__()
        self._types: dict[tuple[str, str], frozenset[str] | None] = {}
        self._tags = (self.tags.key, self.tags.key_end, self.tags.value_begin, self.tags.end)

    def _block(self, marker: str) -> Steps[None]:
        reader, tags = self._reader, self.tags
        if marker != tags.begin:
            yield from reader.spaces()
            yield from reader.expect(tags.begin)
        yield from self._call()
        yield from reader.spaces()
        while tags.begin and (yield from reader.literal(tags.begin)):
            yield from self._call()
            yield from reader.spaces()
        if self.ends[0] != tags.end:
            yield from reader.literal(self.ends[0])

    def _call(self) -> Steps[None]:
        """Read a call after its beginning. Raises Malformed."""
        reader, tags = self._reader, self.tags
        name = yield from reader.span(_NAME, MAX_NAME_LENGTH)
        if not is_function_name(name):
            raise Malformed
        yield from reader.expect(tags.name_end)
        yield from reader.spaces()
        if (yield from reader.peek()) == "{":
            self._begin(name)
            yield from reader.enclosed(JSON_SYNTAX, self._argue)
            yield from reader.spaces()
            yield from reader.literal(tags.end)
            return
        if not (yield from reader.literal(tags.key)):
            if not (yield from reader.literal(tags.end)):
                yield from reader.expect(self.ends[0])
            self._begin(name)
            self._argue("{}")
            return
        key = yield from self._key()
        self._begin(name)
        try:
            yield from self._arguments(name, key)
        except Malformed:
            if not reader.ends_within(*self._tags):
                raise
            # The answer was cut off within a tag or a key, or within a value that is passed on as a whole.
            self.is_cut_off = True
            reader.take(len(reader.text))
            reader.mark()

    def _key(self) -> Steps[str]:
        """Read the name of an argument after `Tags.key`, up to its value. It can have quotes. Raises Malformed."""
        reader, tags = self._reader, self.tags
        has_quotes = not tags.key_end.startswith('"') and (yield from reader.literal('"'))
        key = yield from reader.span(_KEY, MAX_NAME_LENGTH)
        if has_quotes:
            yield from reader.expect('"')
        yield from reader.expect(tags.key_end)
        if tags.value_begin:
            yield from reader.spaces()
            yield from reader.expect(tags.value_begin)
        return key.strip()

    def _arguments(self, name: str, key: str) -> Steps[None]:
        """Read the arguments of a call, from the value of the first one, whose name is `key`. Raises Malformed."""
        reader, tags = self._reader, self.tags
        before = "{"
        while True:
            self._argue(f"{before}{json.dumps(key, ensure_ascii=False)}: ")
            if (name, key) not in self._types:
                self._types[name, key] = argument_types(self.schemas.get(name, {}), key)
            yield from self._value(self._types[name, key])
            yield from reader.spaces()
            if not (yield from reader.literal(tags.key)):
                break
            try:
                before, key = ", ", (yield from self._key())
            except Malformed:
                if reader.ends_within(*self._tags):
                    raise
                # The call is complete without it.
                rest = reader.taken()
                self._argue("}")
                self._say(rest)
                return
        if not (yield from reader.literal(tags.end)) and reader.ends_within(*self._tags):
            raise Malformed
        # A call with text in place of its end is complete, too.
        self._argue("}")

    def _value(self, types: frozenset[str] | None) -> Steps[None]:
        """Read a value and the tag after it. Raises Malformed."""
        reader, tags = self._reader, self.tags
        if tags.has_lines:
            yield from reader.literal("\n")
        if types != STRING:
            pieces: list[str] = []
            yield from reader.until(tags.value_end, pieces.append)
            text = "".join(pieces)
            self._argue(json_argument(text.removesuffix("\n") if tags.has_lines else text, types))
            return
        held = ""

        def argue(piece: str) -> None:
            nonlocal held
            text = held + piece
            held = "\n" if tags.has_lines and text.endswith("\n") else ""
            if text := text.removesuffix(held):
                self._argue(json.dumps(text, ensure_ascii=False)[1:-1])

        self._argue('"')
        yield from reader.until(tags.value_end, argue)
        self._argue('"')


class Qwen3CoderParser(TaggedCallParser):
    """Models sometimes leave out the marker around the call."""

    markers = ("<tool_call>", "<function=")
    ends = ("</tool_call>",)
    tags = Tags("<function=", ">", "<parameter=", ">", "</parameter>", "</function>", has_lines=True)


class SeedOssParser(TaggedCallParser):
    markers = ("<seed:tool_call>",)
    ends = ("</seed:tool_call>",)
    tags = Tags("<function=", ">", "<parameter=", ">", "</parameter>", "</function>")


class Glm45Parser(TaggedCallParser):
    markers = ("<tool_call>",)
    ends = ("</tool_call>", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>")
    tags = Tags("", "", "<arg_key>", "</arg_key>", "</arg_value>", "</tool_call>", value_begin="<arg_value>")


class MiniMaxM2Parser(TaggedCallParser):
    markers = ("<minimax:tool_call>",)
    ends = ("</minimax:tool_call>",)
    tags = Tags('<invoke name="', '">', '<parameter name="', '">', "</parameter>", "</invoke>")
