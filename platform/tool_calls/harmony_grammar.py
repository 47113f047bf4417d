"""Grammars of answers in the harmony format, in llguidance's variant of Lark."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from loramux.platform.tool_calls import harmony
from loramux.platform.tool_calls.grammar import AnswerRules, json_rule


def harmony_lark(rules: AnswerRules, json_options: Mapping[str, Any], other: str | None) -> str:
    """Return the grammar of an answer. `other` names the subgrammar for the text of the final message.

    An answer is any number of messages that reason or announce a call, and then one call or the final message. gpt-oss
    waits for the result of each call, so an answer never contains several calls.
    """
    assert rules.channels is not None
    channels, calls = rules.channels, rules.calls
    marker = {name: f"<[{rules.special_tokens[name]}]>" for name in harmony.MARKERS}
    channel, message, end = marker[harmony.CHANNEL], marker[harmony.MESSAGE], marker[harmony.END]
    start = f'{marker[harmony.START]} "assistant"'
    lines = [
        "%llguidance {}",
        r"TEXT: /(.|\n)*/",
        f'before: {channel} ("{harmony.ANALYSIS}" | "{harmony.COMMENTARY}") {message} TEXT {end} {start}',
        f"final_text: {other or 'TEXT'}",
        f'final: {channel} "{harmony.FINAL}" {message} final_text',
        # The model was trained with three forms: without a type, and with either spelling of the type `json`.
        f'arguments_begin: (" json" | " " {marker[harmony.CONSTRAIN]} "json")? {message}',
    ]
    last, forced = "final", False
    if calls is not None:
        for index, tool in enumerate(calls.tools):
            to = f"to=functions.{tool.name}"
            in_channel = f'{channel} "{harmony.COMMENTARY} {to}"'
            in_role = f'" {to}" {channel} "{harmony.COMMENTARY}"'
            lines.append(f"call_{index}: ({in_channel} | {in_role}) arguments_begin arguments_{index}")
            lines.append(f"arguments_{index}: {json_rule(tool, json_options)}")
        lines.append("call: " + " | ".join(f"call_{index}" for index in range(len(calls.tools))))
        last, forced = ("call", True) if calls.is_forced else ("(final | call)", False)
    lines.append(f"messages: before* {last}")
    if channels.channel is None:
        whole = "messages" if channels.has_start else f"{start} messages"
    elif channels.channel == harmony.FINAL and not forced:
        whole = "final_text"
    else:
        whole = f"TEXT {end} {start} messages"
    return "\n".join([*lines, f"start: {whole}", ""])
