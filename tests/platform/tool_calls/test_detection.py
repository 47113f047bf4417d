from __future__ import annotations

import pytest

from loramux.adapter_store.formats.version_files import answer_parsers
from loramux.platform.tool_calls import harmony
from loramux.platform.tool_calls.detection import last_marker, parser_name_of
from loramux.platform.tool_calls.parsers import PARSERS
from loramux.platform.tool_calls.reasoning import REASONING_MARKERS, SEED_THINK

SHOWN = {
    "Llama 3.1, in JSON": (
        'Respond in the format {"name": function name, "parameters": dictionary of argument name and its value}. '
        "<|python_tag|>",
        "llama3_json",
    ),
    "Llama 3.2, pythonic": (
        "Respond in the format [func_name1(params_name1=params_value1, params_name2=params_value2...), "
        "func_name2(params)] Do not use variables.",
        "pythonic",
    ),
    "Llama 4, pythonic": (
        "- Use exact format: [func_name1(param1=value1, param2=value2), func_name2(...)]",
        "pythonic",
    ),
    "in JSON, with the marker of Llama 4": (
        'Respond in the format {"name": function name, "parameters": dictionary of argument name and its value}. '
        "{{- '<|python_start|>' + content + '<|python_end|>' -}}",
        "llama3_json",
    ),
    "Llama 4, by its marker": ("{{- '<|python_start|>' -}}", "pythonic"),
    "FunctionGemma": ("{{- '<start_function_call>call:' + function['name'] + '{' -}}", "functiongemma"),
    "Gemma 4": ("{{- '<|tool_call>call:' + function['name'] + '{' -}}", "gemma4"),
    "gpt-oss": (
        "{%- if '<tool_call>' in message.content %}{% endif %}"
        "{{- '<|start|>assistant<|channel|>analysis<|message|>' + message.thinking + '<|end|>' }}",
        "harmony",
    ),
    "Qwen3-Coder": ("<tool_call>\n<function=example_function_name>", "qwen3_coder"),
    "Seed-OSS": ("<seed:tool_call>\n<function=example_function_name>", "seed_oss"),
    "GLM-4.5": ("<tool_call>{function-name}\n<arg_key>{arg-key-1}</arg_key>", "glm45"),
    "MiniMax-M2": ('<minimax:tool_call>\n<invoke name="tool-name-1">', "minimax_m2"),
    "MiniMax-M3, whose calls are not parsed": ("]<]minimax[>[<tool_call>\n]<]minimax[>[<invoke name=", None),
    "no tools": ("{{ message.content }}", None),
}


def test_settings_name_every_parser() -> None:
    names = answer_parsers.PARSERS
    assert names["tool_call_parser"] == tuple(sorted([*PARSERS, harmony.NAME]))
    assert names["reasoning_parser"] == tuple(sorted(REASONING_MARKERS))


@pytest.mark.parametrize(("source", "name"), SHOWN.values(), ids=SHOWN.keys())
def test_template_decides_the_parser(source: str, name: str | None) -> None:
    assert parser_name_of(source) == name
    assert name in (None, harmony.NAME, *PARSERS)


def test_thinking_is_open_after_a_budget_of_zero() -> None:
    prompt = "<seed:bos>assistant\n<seed:think><seed:cot_budget_reflect>"
    assert last_marker(prompt, SEED_THINK) == SEED_THINK.begin
    assert last_marker(prompt + "Answer.</seed:cot_budget_reflect>\n</seed:think>", SEED_THINK) == SEED_THINK.end
