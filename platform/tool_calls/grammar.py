"""Grammars of answers that contain tool calls or reasoning, in llguidance's variant of Lark.

See https://github.com/guidance-ai/llguidance/blob/main/docs/syntax.md.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import msgspec


class OfferedTool(msgspec.Struct, frozen=True):
    name: str
    schema: dict[str, Any]


class Thinking(msgspec.Struct, frozen=True):
    """The markers around the reasoning. `is_open` is True if the prompt ends inside the reasoning."""

    begin: str
    end: str
    is_open: bool


class Calls(msgspec.Struct, frozen=True):
    format: str
    tools: tuple[OfferedTool, ...]
    is_forced: bool
    """True if the answer must consist of calls."""
    is_parallel: bool
    """True if the answer can contain several calls."""


class AnswerRules(msgspec.Struct, frozen=True, kw_only=True):
    thinking: Thinking | None = None
    calls: Calls | None = None
    grammar: tuple[str, str] | None = None
    """Kind and text of the constraint on the part of the answer that is neither reasoning nor calls."""
    special_tokens: dict[str, int] = {}
    """IDs of the markers that are special tokens of the model."""


@dataclass(frozen=True, slots=True)
class _CallSyntax:
    """How a format writes calls. Objects are joined by `separator`. `begin` and `end` enclose each group of them."""

    begin: str
    after_begin: str
    separator: str
    before_end: str
    end: str
    before_arguments: str = '{"name": "NAME", "arguments": '
    """The start of an object. NAME stands for the function's name, which has only letters, digits, `_` and `-`."""
    after_arguments: str = "}"
    is_grouped: bool = True
    """True if one pair of markers encloses all calls."""


def _gemma(begin: str, end: str) -> _CallSyntax:
    # The arguments are JSON, because Gemma's own syntax cannot be derived from a schema.
    return _CallSyntax(begin, "", "", "", end, "call:NAME", "", is_grouped=False)


_SYNTAXES = {
    "functiongemma": _gemma("<start_function_call>", "<end_function_call>"),
    "gemma4": _gemma("<|tool_call>", "<tool_call|>"),
    "hermes": _CallSyntax("<tool_call>", "\n", "\n", "\n", "</tool_call>", is_grouped=False),
    "llama3_json": _CallSyntax("", "", "; ", "", "", '{"name": "NAME", "parameters": '),
    "mistral": _CallSyntax("[TOOL_CALLS]", "[", ", ", "]", ""),
    "phi": _CallSyntax("<|tool_call|>", "[", ", ", "]", "<|/tool_call|>"),
    # Of the parser's two forms, this one can express every schema.
    "pythonic": _CallSyntax("", "[", ", ", "]", ""),
}

_ANY = r"/(.|\n)*/"


def lark_of(rules: AnswerRules, json_options: Mapping[str, Any], other: str | None) -> str:
    """Return the grammar of an answer. `other` names the subgrammar for the rest of the answer, such as `@answer`.

    Each tool's schema is compiled with llguidance's `json_options`.
    """
    lines = ["%llguidance {}"]
    answer = other or "any_text"
    if rules.calls is not None:
        answer = _add_calls(lines, rules.calls, rules.special_tokens, json_options, other)
    elif other is None:
        lines.append(f"any_text: {_ANY}")
    start = answer
    if rules.thinking is not None:
        thought = _add_thinking(lines, rules.thinking, rules.special_tokens)
        start = f"{thought} BREAK {answer}" if rules.thinking.is_open else f"({thought} BREAK)? {answer}"
        lines.append(r"BREAK: /\n{0,2}/")
    return "\n".join([*lines, f"start: {start}", ""])


def _add_thinking(lines: list[str], thinking: Thinking, special_tokens: Mapping[str, int]) -> str:
    end = special_tokens.get(thinking.end)
    if end is None:
        lines.append(f"rest_of_thought[suffix={json.dumps(thinking.end)}]: {_ANY}")
    else:
        lines.append(f"rest_of_thought: {_ANY} <[{end}]>")
    if thinking.is_open:
        return "rest_of_thought"
    lines.append(f"thought: {_marker(thinking.begin, special_tokens)} rest_of_thought")
    return "thought"


def _add_calls(
    lines: list[str],
    calls: Calls,
    special_tokens: Mapping[str, int],
    json_options: Mapping[str, Any],
    other: str | None,
) -> str:
    syntax = _SYNTAXES[calls.format]
    for index, tool in enumerate(calls.tools):
        before = json.dumps(syntax.before_arguments.replace("NAME", tool.name))
        lines.append(f"object_{index}: {before} arguments_{index} {_text(syntax.after_arguments)}")
        lines.append(f"arguments_{index}: %json {json.dumps({**tool.schema, 'x-guidance': dict(json_options)})}")
    lines.append("object: " + " | ".join(f"object_{index}" for index in range(len(calls.tools))))
    objects = "object"
    if calls.is_parallel and syntax.is_grouped:
        objects = f"object ({json.dumps(syntax.separator)} object)*"
    parts = [_text(syntax.after_begin), objects, _text(syntax.before_end), _marker(syntax.end, special_tokens)]
    lines.append("after_begin: " + " ".join(part for part in parts if part))
    begin = _marker(syntax.begin, special_tokens)
    if calls.is_forced or other is not None:
        group = f"{begin} after_begin"
        repeats = calls.is_parallel and not syntax.is_grouped
        lines.append(f"calls: {group}" + (f" ({_text(syntax.separator)} {group})*" if repeats else ""))
        return "calls" if calls.is_forced else f"(calls | {other})"
    return _add_text_and_calls(lines, syntax, calls, special_tokens)


def _add_text_and_calls(lines: list[str], syntax: _CallSyntax, calls: Calls, special_tokens: Mapping[str, int]) -> str:
    """Add the rules of free text in which a marker begins calls."""
    lines.append(f"any_text: {_ANY}")
    if not syntax.begin:
        opener = syntax.after_begin or "{"
        lines.append(rf"no_call: /([^\{opener}](.|\n)*)?/")
        return "(after_begin | no_call)"
    if syntax.begin in special_tokens:
        group = f"{_marker(syntax.begin, special_tokens)} after_begin"
        return f"any_text ({group} any_text)*" if calls.is_parallel else f"any_text ({group})?"
    lines.append(f"up_to_marker[lazy]: {_ANY[:-1]}{_escaped(syntax.begin)}/")
    return "(up_to_marker after_begin)* any_text" if calls.is_parallel else "(up_to_marker after_begin | any_text)"


def _marker(marker: str, special_tokens: Mapping[str, int]) -> str:
    return f"<[{special_tokens[marker]}]>" if marker in special_tokens else _text(marker)


def _text(text: str) -> str:
    return json.dumps(text) if text else ""


def _escaped(marker: str) -> str:
    return re.escape(marker).replace("/", r"\/")
