"""Grammars of answers that contain tool calls or reasoning, in llguidance's variant of Lark.

See https://github.com/guidance-ai/llguidance/blob/main/docs/syntax.md.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import msgspec

from loramux.platform.tool_calls.call_syntax import SYNTAXES, Block, CallSyntax
from loramux.platform.tool_calls.lark_text import ANY, any_of, joined, literal, spelled, text_without
from loramux.platform.tool_calls.parsers import PARSERS, find_parser
from loramux.platform.tool_calls.reader import MAX_GAP, SPACE
from loramux.platform.tool_calls.tagged_grammar import TaggedCalls


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
        answer = other or f"/{ANY}/"
    else:
        _add_objects(lines, calls, json_options, ids)
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
    lines.append(f"THOUGHT: {text_without(thinking.end)}")
    rest = joined(lines, "REST_OF_THOUGHT", "THOUGHT", thinking.end, ids)
    return rest if thinking.is_open else f"{joined(lines, 'THINK', 'LEAD', thinking.begin, ids)} {rest}"


def _add_objects(lines: list[str], calls: Calls, json_options: Mapping[str, Any], ids: Mapping[str, int]) -> None:
    """Add the rule `objects`, which matches the calls of one block."""
    layout = _layout(calls)
    syntax = layout.syntax
    tagged = None
    if syntax.tags is not None:
        later = syntax.tags.after_calls(layout.markers, next(iter(syntax.blocks.values())).end)
        tagged = TaggedCalls(lines, syntax.tags, later, ids, lambda schema: _json_of(schema, json_options))
    for index, tool in enumerate(calls.tools):
        before, after = syntax.before_arguments.replace("NAME", tool.name), syntax.after_arguments
        arguments = None if tagged is None else tagged.arguments(tool.schema)
        if arguments is None:
            arguments = f"arguments_{index}"
            lines.append(f"{arguments}: {json_rule(tool, json_options)}")
        else:
            before, after = before.rstrip("\n"), after.lstrip("\n")
        lines.append(f"object_{index}: {literal(before)} {arguments} {literal(after)}")
    lines.append("object: " + " | ".join(f"object_{index}" for index in range(len(calls.tools))))
    has_several = calls.is_parallel and syntax.is_grouped
    lines.append(f"objects: object ({literal(syntax.separator)} object)*" if has_several else "objects: object")


def json_rule(tool: OfferedTool, json_options: Mapping[str, Any]) -> str:
    """Return the expression for a tool's arguments."""
    return _json_of(tool.schema, json_options)


def _json_of(schema: Mapping[str, Any], json_options: Mapping[str, Any]) -> str:
    return f"%json {json.dumps({**schema, 'x-guidance': dict(json_options)})}"


def _forced_calls(lines: list[str], calls: Calls, ids: Mapping[str, int]) -> str:
    """Add the rules of an answer that consists of calls, and return the rule's name."""
    syntax = _layout(calls).syntax
    marker, block = next(iter(syntax.blocks.items()))
    group = f"{spelled(marker, ids)} {_block(block, ids)}"
    repeats = calls.is_parallel and not syntax.is_grouped
    lines.append(f"calls: {group}" + (f" ({literal(syntax.separator)} {group})*" if repeats else ""))
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
    lines.append(f"TEXT: {text_without(*layout.markers)}")
    lines.append(f"START: TEXT & ~/{SPACE}*{any_of(starts)}{ANY}/" if starts else "START: TEXT")
    first, later = [], []
    for index, marker in enumerate(layout.markers):
        block = _block(syntax.blocks[marker], ids)
        first.append(f"{joined(lines, f'FIRST_{index}', 'START', marker, ids)} {block}")
        later.append(f"{joined(lines, f'LATER_{index}', 'TEXT', marker, ids)} {block}")
    if layout.openers:
        # The parsers of these formats may continue reading after a block, so the grammar allows nothing after it.
        return f"(LEAD {_block(syntax.blocks[''], ids)} | {' | '.join(first)} | START)"
    more = f"({' | '.join(later)})*" if calls.is_parallel else ""
    return f"(({' | '.join(first)}) {more} TEXT | START)"


def _block(block: Block, ids: Mapping[str, int]) -> str:
    return f"{literal(block.before)} objects {literal(block.after)} {spelled(block.end, ids)}"
