"""Finds the parser and the thinking markers for a chat template."""

from __future__ import annotations

from loramux.adapter_store.formats.version_files.answer_parsers import AUTO, OFF, AnswerParsers
from loramux.platform.tool_calls import harmony
from loramux.platform.tool_calls.reasoning import HARMONY, REASONING_MARKERS, Markers

_SIGNS = (
    # These come first, because their templates contain the marker of Hermes, too, or each other's tags.
    ("]<]minimax[>[", None),
    ("<seed:tool_call>", "seed_oss"),
    ("<function=", "qwen3_coder"),
    ("<arg_key>", "glm45"),
    ("<minimax:tool_call>", "minimax_m2"),
    (harmony.CHANNEL, harmony.NAME),
    ("[TOOL_CALLS]", "mistral"),
    ("<|tool_call>call:", "gemma4"),
    ("<start_function_call>", "functiongemma"),
    ("<|tool_call|>", "phi"),
    ("<|tool|>", "phi"),
    ("functools", "phi"),
    ("<tool_call>", "hermes"),
    ("[func_name1(", "pythonic"),
    ('{"name": function name, "parameters":', "llama3_json"),
    ("<|python_tag|>", "llama3_json"),
    # This text comes after the texts above, because a template that contains it can also ask for JSON.
    ("<|python_start|>", "pythonic"),
)
"""Pairs of a text and the parser's name for templates that contain the text. The first text that matches decides. The
calls of MiniMax-M3 are in a format of their own, which no parser reads.
"""


def parser_name_of(template_source: str) -> str | None:
    """Return the name of the parser for a template's calls, or None if its calls cannot be parsed."""
    return next((name for sign, name in _SIGNS if sign in template_source), None)


def reasoning_markers_of(template_source: str) -> Markers | None:
    """Return the markers of the model's thinking, or None if its template has none."""
    if harmony.CHANNEL in template_source:
        return HARMONY
    # Many templates without thinking contain harmony's end marker.
    markers = (one for one in REASONING_MARKERS.values() if one is not HARMONY)
    return next((one for one in markers if one.begin in template_source or one.end in template_source), None)


def chosen_parser(chosen: AnswerParsers, template_source: str) -> str | None:
    """Return the name of the parser of tool calls, or None if calls are not parsed."""
    name = chosen.tool_call_parser or AUTO
    if name == AUTO:
        return parser_name_of(template_source)
    return None if name == OFF else name


def chosen_markers(chosen: AnswerParsers, template_source: str) -> Markers | None:
    """Return the markers of the thinking, or None if the thinking is not separated from the answer."""
    name = chosen.reasoning_parser or AUTO
    return reasoning_markers_of(template_source) if name == AUTO else REASONING_MARKERS.get(name)


def last_marker(prompt: str, markers: Markers, continued: str = "") -> str | None:
    """Return the last marker in the turn that the answer continues, or None if the turn has none.

    Only the end of the prompt and `continued`, the beginning of the answer if the request contains one, are examined,
    because earlier messages may mention markers.
    """
    text = prompt.rstrip().removesuffix(markers.after_begin).rstrip()
    at_end = next((one for one in (markers.begin, markers.end) if text.endswith(one)), None)
    if at_end is not None:
        return at_end
    begin, end = continued.rfind(markers.begin), continued.rfind(markers.end)
    return None if begin == end else markers.begin if begin > end else markers.end
