"""Grammars of answers that contain tool calls or reasoning, in llguidance's variant of Lark.

See https://github.com/guidance-ai/llguidance/blob/main/docs/syntax.md.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

import msgspec

from loramux.platform.tool_calls.call_syntax import SYNTAXES, Block, CallSyntax
from loramux.platform.tool_calls.parsers import PARSERS, find_parser
from loramux.platform.tool_calls.reader import MAX_GAP, SPACE


class OfferedTool(msgspec.Struct, frozen=True, omit_defaults=True):
    name: str
    schema: dict[str, Any]
    param: str = "tools"
    """The request field that contains the schema, for error messages."""


class Thinking(msgspec.Struct, frozen=True):
    """The markers around the reasoning. `is_open` is True if the prompt ends inside the reasoning."""

    begin: str
    end: str
    is_open: bool


class CallLayout(msgspec.Struct, frozen=True):
    """The facts about a format that a grammar needs: see `CallParser` and `CallSyntax`."""

    markers: tuple[str, ...]
    openers: str
    syntax: CallSyntax


class Calls(msgspec.Struct, frozen=True):
    format: str
    tools: tuple[OfferedTool, ...]
    is_forced: bool
    """True if the answer must consist of calls."""
    is_parallel: bool
    """True if the answer can contain several calls."""
    layout: CallLayout | None = None
    """The layout of an extension's format, because the confined process does not import extensions. Otherwise None."""


class OpenChannels(msgspec.Struct, frozen=True):
    """The place in the harmony format where the prompt ends."""

    has_start: bool
    """True if the prompt ends after `<|start|>assistant`."""
    channel: str | None
    """The channel of the message in which the prompt ends, or None."""


class AnswerRules(msgspec.Struct, frozen=True, kw_only=True):
    thinking: Thinking | None = None
    channels: OpenChannels | None = None
    """If set, `harmony_grammar.py` builds the grammar."""
    calls: Calls | None = None
    grammar: tuple[str, str] | None = None
    """Kind and text of the constraint on the part of the answer that is neither reasoning nor calls."""
    special_tokens: dict[str, int] = {}
    """IDs of the model's special tokens that are markers or parts of markers."""


_ANY = r"(.|\n)*"


def added_layout(format_name: str) -> CallLayout | None:
    """Return the layout of an extension's format, or None for a built-in format. Raises ExtensionRefused."""
    parser = None if format_name in PARSERS else find_parser(format_name)
    if parser is None or parser.syntax is None:
        return None
    # Only plain dictionaries can be sent to the confined process.
    syntax = replace(parser.syntax, blocks=dict(parser.syntax.blocks))
    return CallLayout(parser.markers, parser.openers, syntax)


def _layout(calls: Calls) -> CallLayout:
    if calls.layout is not None:
        return calls.layout
    parser = PARSERS[calls.format]
    return CallLayout(parser.markers, parser.openers, SYNTAXES[calls.format])


def lark_of(rules: AnswerRules, json_options: Mapping[str, Any], other: str | None) -> str:
    """Return the grammar of an answer. `other` names the subgrammar for the rest of the answer, such as `@answer`.

    Each tool's schema is compiled with llguidance's `json_options`.

    Free text cannot contain a marker or opener that the parser would read as a call or that the splitter would read as
    thinking. This includes markers that are special tokens, because other tokens can spell the same text.
    """
    lines = ["%llguidance {}"]
    thinking, calls, ids = rules.thinking, rules.calls, rules.special_tokens
    lines += [f"LEAD: /{SPACE}{{0,{MAX_GAP}}}/", r"BREAK: /\n{0,2}/"]
    if calls is None:
        answer = other or f"/{_ANY}/"
    else:
        _add_objects(lines, calls, json_options)
        if calls.is_forced:
            answer = _forced_calls(lines, calls, ids)
        elif other is not None:
            answer = f"({_forced_calls(lines, calls, ids)} | {other})"
        else:
            answer = _text_and_calls(lines, calls, thinking, ids)
    if thinking is None:
        start = answer
    else:
        thought = _thought(lines, thinking, ids)
        start = f"{thought} BREAK {answer}" if thinking.is_open else f"({thought} BREAK)? {answer}"
    return "\n".join([*lines, f"start: {start}", ""])


def _thought(lines: list[str], thinking: Thinking, ids: Mapping[str, int]) -> str:
    lines.append(f"THOUGHT: {_text_without(thinking.end)}")
    rest = _joined(lines, "REST_OF_THOUGHT", "THOUGHT", thinking.end, ids)
    return rest if thinking.is_open else f"{_joined(lines, 'THINK', 'LEAD', thinking.begin, ids)} {rest}"


def _add_objects(lines: list[str], calls: Calls, json_options: Mapping[str, Any]) -> None:
    """Add the rule `objects`, which matches the calls of one block."""
    syntax = _layout(calls).syntax
    for index, tool in enumerate(calls.tools):
        before = syntax.before_arguments.replace("NAME", tool.name)
        lines.append(f"object_{index}: {_text(before)} arguments_{index} {_text(syntax.after_arguments)}")
        lines.append(f"arguments_{index}: {json_rule(tool, json_options)}")
    lines.append("object: " + " | ".join(f"object_{index}" for index in range(len(calls.tools))))
    has_several = calls.is_parallel and syntax.is_grouped
    lines.append(f"objects: object ({_text(syntax.separator)} object)*" if has_several else "objects: object")


def json_rule(tool: OfferedTool, json_options: Mapping[str, Any]) -> str:
    """Return the expression for a tool's arguments."""
    return f"%json {json.dumps({**tool.schema, 'x-guidance': dict(json_options)})}"


def _forced_calls(lines: list[str], calls: Calls, ids: Mapping[str, int]) -> str:
    """Add the rules of an answer that consists of calls, and return the rule's name."""
    syntax = _layout(calls).syntax
    marker, block = next(iter(syntax.blocks.items()))
    group = f"{_marker(marker, ids)} {_block(block, ids)}"
    repeats = calls.is_parallel and not syntax.is_grouped
    lines.append(f"calls: {group}" + (f" ({_text(syntax.separator)} {group})*" if repeats else ""))
    return "calls"


def _text_and_calls(lines: list[str], calls: Calls, thinking: Thinking | None, ids: Mapping[str, int]) -> str:
    """Add the rules of free text with calls, and return the expression.

    Calls begin at a marker, or with an opener at the start of the text.
    """
    layout = _layout(calls)
    syntax = layout.syntax
    assert {*layout.markers} == {*syntax.blocks} - {""}
    # Like calls without a marker, thinking can begin only at the start of an answer.
    starts = [*layout.openers, *([] if thinking is None or thinking.is_open else [thinking.begin])]
    lines.append(f"TEXT: {_text_without(*layout.markers)}")
    lines.append(f"START: TEXT & ~/{SPACE}*{_any_of(starts)}{_ANY}/" if starts else "START: TEXT")
    first, later = [], []
    for index, marker in enumerate(layout.markers):
        block = _block(syntax.blocks[marker], ids)
        first.append(f"{_joined(lines, f'FIRST_{index}', 'START', marker, ids)} {block}")
        later.append(f"{_joined(lines, f'LATER_{index}', 'TEXT', marker, ids)} {block}")
    if layout.openers:
        # The parsers of these formats may continue reading after a block, so the grammar allows nothing after it.
        return f"(LEAD {_block(syntax.blocks[''], ids)} | {' | '.join(first)} | START)"
    more = f"({' | '.join(later)})*" if calls.is_parallel else ""
    return f"(({' | '.join(first)}) {more} TEXT | START)"


def _joined(lines: list[str], name: str, before: str, marker: str, ids: Mapping[str, int]) -> str:
    """Return the expression for the terminal `before` and a marker.

    Text at the start of the marker must be part of the same terminal, because the lexer takes the longest match. `name`
    names that terminal.
    """
    first, *rest = _marker_parts(marker, ids)
    if first in ids:
        name, rest = before, [first, *rest]
    else:
        lines.append(f"{name}: {before} {_text(first)}")
    return " ".join([name, *(_part(one, ids) for one in rest)])


def _block(block: Block, ids: Mapping[str, int]) -> str:
    return f"{_text(block.before)} objects {_text(block.after)} {_marker(block.end, ids)}"


def _text_without(*markers: str) -> str:
    return f"/{_ANY}/ & ~/{_ANY}{_any_of(markers)}{_ANY}/"


def _any_of(texts: Iterable[str]) -> str:
    return "(" + "|".join(re.escape(text).replace("/", r"\/") for text in texts) + ")"


def _marker(marker: str, ids: Mapping[str, int]) -> str:
    return " ".join(_part(one, ids) for one in _marker_parts(marker, ids))


def _marker_parts(marker: str, ids: Mapping[str, int]) -> list[str]:
    """Split a marker into special tokens and the text around them."""
    longest_first = sorted(ids, key=len, reverse=True)
    parts = re.split(f"({'|'.join(map(re.escape, longest_first))})", marker) if ids else [marker]
    return [part for part in parts if part] or [""]


def _part(part: str, ids: Mapping[str, int]) -> str:
    return f"<[{ids[part]}]>" if part in ids else _text(part)


def _text(text: str) -> str:
    return json.dumps(text) if text else ""
