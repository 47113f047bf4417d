from __future__ import annotations

import json
import time
import warnings
from collections.abc import Mapping
from typing import Any

import pytest

from loramux.platform.tool_calls.events import ArgumentsEvent, CallBegun, TextEvent
from loramux.platform.tool_calls.parsers import PARSERS
from tests.platform.tool_calls.recorded import RECORDED, Recorded
from tests.platform.tool_calls.tested_parsers import FORMATS, IDS, new_parser, written_call


def read(
    format_name: str, pieces: list[str], schemas: Mapping[str, Mapping[str, Any]] | None = None
) -> tuple[str, list[list[str]]]:
    parser, text = new_parser(format_name, schemas), ""
    calls: list[list[str]] = []
    for piece in [*pieces, None]:
        for event in parser.finish() if piece is None else parser.feed(piece):
            match event:
                case TextEvent(shown):
                    text += shown
                case CallBegun(index, name):
                    assert index == len(calls)
                    calls.append([name, ""])
                case ArgumentsEvent(index, shown):
                    assert index == len(calls) - 1
                    calls[index][1] += shown
    return text, calls


@pytest.mark.parametrize("recorded", RECORDED.values(), ids=RECORDED.keys())
def test_every_cut_gives_the_same_calls(recorded: Recorded) -> None:
    answer, expected = recorded.answer, (recorded.text, [list(call) for call in recorded.calls])
    assert read(recorded.format_name, [answer], recorded.schemas) == expected
    assert read(recorded.format_name, list(answer), recorded.schemas) == expected
    for cut in range(len(answer)):
        assert read(recorded.format_name, [answer[:cut], answer[cut:]], recorded.schemas) == expected, cut


@pytest.mark.parametrize("recorded", RECORDED.values(), ids=RECORDED.keys())
def test_an_answer_that_was_cut_off_has_the_calls_that_were_begun(recorded: Recorded) -> None:
    for end in range(len(recorded.answer)):
        text, calls = read(recorded.format_name, [recorded.answer[:end]], recorded.schemas)
        # White space beside calls is dropped. Everything else that is shown as text was written in this order.
        written = iter(recorded.answer)
        assert recorded.answer.startswith(text) or all(character in written for character in text)
        for (name, arguments), (one, whole) in zip(calls, recorded.calls, strict=False):
            assert (name, whole[: len(arguments)]) == (one, arguments)


HOSTILE_OPENINGS = {
    "pythonic": "[f(x=[",
    "functiongemma": "<start_function_call>call:f{x:[",
    "gemma4": "<|tool_call>call:f{x:[",
    "qwen3_coder": "<function=f><parameter=a>",
    "seed_oss": "<seed:tool_call><function=f><parameter=a>",
    "glm45": "<tool_call>f<arg_key>a</arg_key><arg_value>",
    "minimax_m2": '<minimax:tool_call><invoke name="f"><parameter name="a">',
}
"""The start of a call with arguments that the parser rewrites as JSON."""

HOSTILE_UNITS = (
    "[",
    "[],",
    "{1:",
    "-",
    "9",
    "'",
    "'\\\\',",
    "f(x=",
    "1,",
    "),f(y=[",
    "<",
    '<|"|>',
    "<|tool_call>call:f{x:",
    "\n",
    "</function>",
    "</parameter><parameter=a>",
    "</arg_value><arg_key>a</arg_key><arg_value>",
)


@pytest.mark.parametrize("format_name", FORMATS, ids=IDS)
def test_every_cut_of_a_written_call_gives_the_call(format_name: str) -> None:
    arguments = '{"city": "Rome", "days": 3}'
    answer, expected = written_call(format_name, "get_weather", arguments), [["get_weather", arguments]]
    assert read(format_name, list(answer)) == ("", expected)
    for cut in range(len(answer)):
        assert read(format_name, [answer[:cut], answer[cut:]]) == ("", expected), cut
        # A call that is cut off is text, or has begun. Parsing does not raise.
        read(format_name, [answer[:cut]])


@pytest.mark.parametrize("format_name", FORMATS, ids=IDS)
@pytest.mark.parametrize(
    "unit", ["{", "[", '"', "\\", " ", "<tool_call>", "[TOOL_CALLS]", '<tool_call>{"name": "', "functools[", "x"]
)
def test_long_answers_take_linear_time(format_name: str, unit: str) -> None:
    check_linear_time(format_name, "", unit)


@pytest.mark.parametrize("unit", HOSTILE_UNITS)
@pytest.mark.parametrize("format_name", HOSTILE_OPENINGS)
def test_long_literals_take_linear_time(format_name: str, unit: str) -> None:
    check_linear_time(format_name, HOSTILE_OPENINGS[format_name], unit)


def check_linear_time(format_name: str, opening: str, unit: str) -> None:
    def seconds(num: int) -> float:
        pieces = [opening, *[unit] * num]
        began_s = time.thread_time()
        text, calls = read(format_name, pieces)
        longest_escape = 2
        num_read = len(text) + sum(len(arguments) for _, arguments in calls)
        assert num_read <= (num * len(unit) + len(opening)) * longest_escape + 2
        return time.thread_time() - began_s

    long = seconds(4_000)
    # Most answers take so little that they need no comparison.
    if long > 0.025:
        # For eight times the length, a quadratic parser would take sixty-four times as long.
        limit = 20 * min(seconds(500) for _ in range(3)) + 0.025
        assert long < limit or seconds(4_000) < limit


@pytest.mark.parametrize(
    "name", [name for name, one in RECORDED.items() if one.calls and one.format_name != "pythonic"]
)
def test_parser_knows_whether_a_call_was_cut_off(name: str) -> None:
    recorded = RECORDED[name]
    for end in range(len(recorded.answer) + 1):
        parser = new_parser(recorded.format_name, recorded.schemas)
        arguments: dict[int, str] = {}
        for event in [*parser.feed(recorded.answer[:end]), *parser.finish()]:
            if isinstance(event, ArgumentsEvent):
                arguments[event.index] = arguments.get(event.index, "") + event.text
            elif isinstance(event, CallBegun):
                arguments[event.index] = ""
        is_whole = all(map(_is_json, arguments.values()))
        assert is_whole or parser.is_cut_off or "broken" in name


@pytest.mark.parametrize("recorded", RECORDED.values(), ids=RECORDED.keys())
def test_only_an_answer_that_ends_within_a_call_is_cut_off(recorded: Recorded) -> None:
    parser = new_parser(recorded.format_name, recorded.schemas)
    parser.feed(recorded.answer)
    parser.finish()
    assert parser.is_cut_off == recorded.is_cut_off


def _is_json(text: str) -> bool:
    try:
        json.loads(text)
    except ValueError:
        return False
    return True


def test_arguments_are_passed_on_before_the_call_ends() -> None:
    parser = PARSERS["hermes"]()
    parser.feed('<tool_call>{"name": "a", "arguments": {"city"')
    assert parser.feed(': "Ro') == [ArgumentsEvent(0, ': "Ro')]


def test_number_before_a_keyword_is_text_and_causes_no_warning() -> None:
    parser = new_parser("pythonic")
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        events = [*parser.feed("[f(a=1if)]"), *parser.finish()]
    assert seen == []
    assert events
