"""Calls whose arguments have tags around them: Qwen3-Coder and Qwen3.5, Seed-OSS, GLM-4.5 and later, MiniMax-M2."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from collections.abc import Set as AbstractSet
from typing import ClassVar

from loramux.platform.tool_calls.argument_types import STRING, argument_types, has_argument, json_argument
from loramux.platform.tool_calls.call_parser import CallParser
from loramux.platform.tool_calls.reader import (
    JSON_SYNTAX,
    MAX_GAP,
    MAX_NAME_LENGTH,
    SPACE,
    WHITESPACE,
    Malformed,
    Steps,
    is_function_name,
)
from loramux.platform.tool_calls.tags import GLM45, MINIMAX_M2, QWEN3_CODER, SEED_OSS, Tags

_NAME = re.compile(r"""[^\s"<>]*""")
_KEY = re.compile(r"""[^"<>\n]*""")
_MISSED_KEY = rf"""(?P<name>[^"<>\n]{{1,{MAX_NAME_LENGTH}}})"""
_MAX_END = MAX_NAME_LENGTH + 3 * MAX_GAP
"""Longest text that has to be read to see whether a value ends without its tag, in characters."""

_IN_LITERAL = re.compile(r"""\\(?:.|\Z)|["'\n]""")


class TaggedCallParser(CallParser):
    """Reads calls in tags, and forced calls, which have JSON arguments.

    `schemas` decides which values are strings. Strings are passed on piece by piece, other values once they are
    complete.
    """

    tags: ClassVar[Tags]

    def __init__(self) -> None:
        super().__init__()
        tags = self.tags
        self._types: dict[tuple[str, str], frozenset[str] | None] = {}
        self._has: dict[tuple[str, str], bool] = {}
        self._tags = (tags.key, tags.key_end, tags.value_begin, tags.end)
        self._stops = (tags.value_end, tags.missed_line + tags.key, tags.end)
        self._stop = re.compile("|".join(map(re.escape, self._stops)))
        after = tags.after_calls(self.markers, self.ends[0])
        call_end = tags.call_end("|".join([*map(re.escape, after), r"\Z"]))
        line = r"(?(line)\n)" if tags.has_lines else ""
        self._end_without_tag = re.compile(rf"(?P<line>\n)?{tags.next_argument(_MISSED_KEY)}{line}|{call_end}")
        cut_value = rf"{re.escape(tags.key_end)}{SPACE}*{_beginning(tags.value_begin)}"
        self._cut_end = re.compile(
            rf"""\n?{re.escape(tags.key)}[^"<>\n]*(?:{cut_value}|{_beginning(tags.key_end)})\Z"""
            rf"|{re.escape(tags.end)}{SPACE}*(?:{'|'.join(map(_beginning, after))})\Z"
        )

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
        before, keys = "{", {key}
        while True:
            self._argue(f"{before}{json.dumps(key, ensure_ascii=False)}: ")
            if (name, key) not in self._types:
                self._types[name, key] = argument_types(self.schemas.get(name, {}), key)
            yield from self._value(self._types[name, key], name, keys)
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
            keys.add(key)
        if not (yield from reader.literal(tags.end)) and reader.ends_within(*self._tags):
            raise Malformed
        # A call with text in place of its end is complete, too.
        self._argue("}")

    def _value(self, types: frozenset[str] | None, name: str, keys: AbstractSet[str]) -> Steps[None]:
        """Read a value and the tag after it. `keys` are the names of the call's arguments so far. Raises Malformed."""
        reader, tags = self._reader, self.tags
        if tags.has_lines:
            yield from reader.literal("\n")
        if types != STRING:
            pieces: list[str] = []
            can_quote = types is not None and "string" not in types
            yield from self._value_text(pieces.append, name, keys, can_quote=can_quote)
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
        yield from self._value_text(argue, name, keys, can_quote=False)
        self._argue('"')

    def _value_text(
        self, on_piece: Callable[[str], None], name: str, keys: AbstractSet[str], *, can_quote: bool
    ) -> Steps[None]:
        """Read the text of a value up to its end, and the tag there unless the model left it out. Raises Malformed.

        With `can_quote`, a list or an object in JSON or Python does not end within a string. Such a string contains no
        line break. In case the model wrote a quote too many, a tag is the end nevertheless if a line break comes before
        or after it, or if the next argument or the end of the call follows.
        """
        reader, tags = self._reader, self.tags
        is_literal: bool | None = None if can_quote else False
        quote, is_escaped = "", False

        def pass_on(piece: str) -> None:
            nonlocal is_literal, quote, is_escaped
            if is_literal is None and (begin := piece.lstrip(WHITESPACE)[:1]):
                is_literal = begin in "[{"
            marks = _IN_LITERAL.findall(piece, int(is_escaped)) if is_literal else []
            is_escaped = marks[-1:] == ["\\"]
            for mark in marks:
                if mark in (quote, "\n"):
                    quote = ""
                elif not quote and mark in ('"', "'"):
                    quote = mark
            on_piece(piece)

        while True:
            yield from reader.before(self._stop, self._stops, pass_on)
            if (yield from reader.literal(tags.value_end)):
                if not quote or (yield from reader.peek()) == "\n" or (yield from self._ends_without_tag(name, keys)):
                    return
                on_piece(tags.value_end)
                continue
            has_line = reader.text.startswith("\n", reader.at)
            is_end = (has_line or not quote) and (yield from self._ends_without_tag(name, keys))
            if is_end and not (has_line and tags.has_lines):
                return
            pass_on(reader.take(reader.at + 1))
            if is_end:
                return

    def _ends_without_tag(self, name: str, keys: AbstractSet[str]) -> Steps[bool]:
        """Return whether a value ends here although its tag is missing: before an argument that the function has and
        the call does not have yet, or before the end of the call. Raises Malformed if the answer was cut off there.
        """
        reader = self._reader
        while len(reader.text) - reader.at < _MAX_END and (yield from reader.more()):
            pass
        found = self._end_without_tag.match(reader.text, reader.at)
        if found is None and reader.is_ended and self._cut_end.match(reader.text, reader.at):
            reader.take(len(reader.text))
            raise Malformed
        if found is None or (key := found["name"]) is None:
            return found is not None
        if (name, key) not in self._has:
            self._has[name, key] = has_argument(self.schemas.get(name, {}), key)
        return self._has[name, key] and key not in keys


def _beginning(text: str) -> str:
    """Return the pattern of the beginnings of a text, which can be empty."""
    return "".join(f"(?:{re.escape(character)}" for character in text) + ")?" * len(text)


class Qwen3CoderParser(TaggedCallParser):
    """Models sometimes leave out the marker around the call."""

    markers = ("<tool_call>", "<function=")
    ends = ("</tool_call>",)
    tags = QWEN3_CODER


class SeedOssParser(TaggedCallParser):
    markers = ("<seed:tool_call>",)
    ends = ("</seed:tool_call>",)
    tags = SEED_OSS


class Glm45Parser(TaggedCallParser):
    markers = ("<tool_call>",)
    ends = ("</tool_call>", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>")
    tags = GLM45


class MiniMaxM2Parser(TaggedCallParser):
    markers = ("<minimax:tool_call>",)
    ends = ("</minimax:tool_call>",)
    tags = MINIMAX_M2
