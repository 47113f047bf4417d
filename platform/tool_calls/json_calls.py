"""Calls as JSON objects with a name and arguments, alone or in an array, in the forms of several model families."""

from __future__ import annotations

import re

from loramux.platform.tool_calls.call_parser import CallParser
from loramux.platform.tool_calls.reader import JSON_SYNTAX, MAX_NAME_LENGTH, Malformed, Steps, is_function_name

_ARGUMENTS = ("arguments", "parameters")
_NAME = re.compile(r"[\w.-]*")


class JsonCallParser(CallParser):
    """Reads objects such as `{"name": "f", "arguments": {"x": 1}}`. `parameters` can replace `arguments`."""

    def _call_object(self, *, is_marked: bool) -> Steps[None]:
        """Read one object. Raises Malformed.

        If `is_marked`, the object can have any other members and can lack arguments. Otherwise, it may be an answer in
        JSON, so it must have arguments, and until the call has begun, its only other members can be a type and an ID.
        """
        reader = self._reader
        name: str | None = None
        arguments: str | None = None
        yield from reader.expect("{")
        is_first, has_begun = True, False
        while True:
            yield from reader.spaces()
            if (yield from reader.literal("}")):
                break
            if not is_first and not (yield from reader.literal(",")):
                if has_begun:
                    break  # only the closing brace is missing
                raise Malformed
            is_first = False
            yield from reader.spaces()
            key = yield from reader.json_string()
            yield from reader.spaces()
            yield from reader.expect(":")
            yield from reader.spaces()
            if key == "name" and name is None:
                name = yield from reader.json_string()
                if not is_function_name(name):
                    raise Malformed
            elif key in _ARGUMENTS and arguments is None:
                if name is not None and not has_begun and (yield from reader.peek()) == "{":
                    self._begin(name)
                    has_begun, arguments = True, ""
                    yield from reader.enclosed(JSON_SYNTAX, self._argue)
                    continue
                arguments = yield from self._held_arguments()
            elif is_marked or has_begun or key in ("id", "type"):
                yield from reader.json_value()
            else:
                raise Malformed
            if name is not None and arguments is not None and not has_begun:
                self._begin(name)
                self._argue(arguments)
                has_begun = True
        if not has_begun:
            if name is None or not is_marked:
                raise Malformed
            self._begin(name)
            self._argue("{}")
        yield from self._end_of_call()

    def _end_of_call(self) -> Steps[None]:
        """Read to the next text after a call. Small models write more closing braces than opening ones."""
        reader = self._reader
        yield from reader.spaces()
        while (yield from reader.literal("}")):
            yield from reader.spaces()
        self._complete()
        reader.mark()

    def _held_arguments(self) -> Steps[str]:
        """Read arguments that cannot be passed on yet: an object before the name, a string with JSON, or null.

        Raises Malformed.
        """
        reader = self._reader
        first = yield from reader.peek()
        if first == '"':
            return (yield from reader.json_string())
        if first == "{":
            pieces: list[str] = []
            yield from reader.enclosed(JSON_SYNTAX, pieces.append)
            return "".join(pieces)
        yield from reader.expect("null")
        return "{}"

    def _call_array(self) -> Steps[None]:
        """Read an array of at least one object. Raises Malformed."""
        yield from self._reader.expect("[")
        yield from self._rest_of_array(is_marked=True)

    def _rest_of_array(self, *, is_marked: bool) -> Steps[None]:
        reader = self._reader
        while True:
            yield from reader.spaces()
            yield from self._call_object(is_marked=is_marked)
            yield from reader.spaces()
            if not (yield from reader.literal(",")):
                yield from reader.literal("]")
                return


class HermesParser(JsonCallParser):
    """Hermes, Qwen2.5 and Qwen3: `<tool_call>{"name": "f", "arguments": {"x": 1}}</tool_call>`."""

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


class PhiParser(JsonCallParser):
    """Phi-4-mini: `functools[{"name": "f", "arguments": {"x": 1}}]`, or `<|tool_call|>[...]<|/tool_call|>`."""

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


class Llama3JsonParser(JsonCallParser):
    """Llama 3.1 to 3.3: `{"name": "f", "parameters": {"x": 1}}`. Several calls are separated by `;`.

    The objects are at the start of the answer or after `<|python_tag|>`.
    """

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


class MistralParser(JsonCallParser):
    """Mistral: `[TOOL_CALLS][{"name": "f", "arguments": {"x": 1}}]`, and since 2025 `[TOOL_CALLS]f[ARGS]{"x": 1}`."""

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
