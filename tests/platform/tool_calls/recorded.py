"""Answers as each family writes them, with the text and the calls that they contain."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Recorded:
    """One answer. `calls` are names with the arguments' JSON."""

    format_name: str
    answer: str
    text: str
    calls: tuple[tuple[str, str], ...] = ()


ROME = '{"city": "Rome"}'
BRACES = r'{"code": "if (a) { return \"]}\"; } </tool_call>", "n": [1, {"m": null}]}'

RECORDED = {
    "hermes: one call": Recorded(
        "hermes",
        f'<tool_call>\n{{"name": "get_weather", "arguments": {ROME}}}\n</tool_call>',
        "",
        (("get_weather", ROME),),
    ),
    "hermes: text, then two calls": Recorded(
        "hermes",
        f'I will look.\n\n<tool_call>\n{{"name": "a", "arguments": {ROME}}}\n</tool_call>\n<tool_call>\n'
        '{"name": "b", "arguments": {}}\n</tool_call>',
        "I will look.",
        (("a", ROME), ("b", "{}")),
    ),
    "hermes: arguments before the name": Recorded(
        "hermes", f'<tool_call>{{"arguments": {ROME}, "name": "a"}}</tool_call>', "", (("a", ROME),)
    ),
    "hermes: brackets and a marker in strings": Recorded(
        "hermes", f'<tool_call>{{"name": "run", "arguments": {BRACES}}}</tool_call>', "", (("run", BRACES),)
    ),
    "hermes: arguments as a string": Recorded(
        "hermes",
        r'<tool_call>{"name": "a", "arguments": "{\"city\": \"Rome\"}"}</tool_call>',
        "",
        (("a", ROME),),
    ),
    "hermes: no arguments": Recorded("hermes", '<tool_call>{"name": "now"}</tool_call>', "", (("now", "{}"),)),
    "hermes: no end": Recorded("hermes", f'<tool_call>\n{{"name": "a", "arguments": {ROME}}}', "", (("a", ROME),)),
    "hermes: cut within the arguments": Recorded(
        "hermes", '<tool_call>\n{"name": "a", "arguments": {"city": "Ro', "", (("a", '{"city": "Ro'),)
    ),
    "hermes: cut before the name": Recorded("hermes", 'Hm. <tool_call>\n{"na', 'Hm. <tool_call>\n{"na'),
    "hermes: no object": Recorded("hermes", "a <tool_call>oops</tool_call> b", "a <tool_call>oops</tool_call> b"),
    "hermes: a number as name": Recorded(
        "hermes", '<tool_call>{"name": 5}</tool_call>', '<tool_call>{"name": 5}</tool_call>'
    ),
    "hermes: text with other tags": Recorded("hermes", "a <tool> <tool_cal b {c}", "a <tool> <tool_cal b {c}"),
    "hermes: text of several alphabets": Recorded(
        "hermes",
        '½ <tool_call>{"name": "a", "arguments": {"c": "Zürich 東京 🙂"}}</tool_call>',
        "½",
        (("a", '{"c": "Zürich 東京 🙂"}'),),
    ),
    "llama3: one call": Recorded(
        "llama3_json", f'{{"name": "get_weather", "parameters": {ROME}}}', "", (("get_weather", ROME),)
    ),
    "llama3: typed": Recorded(
        "llama3_json", f'{{"type": "function", "name": "a", "parameters": {ROME}}}', "", (("a", ROME),)
    ),
    "llama3: several": Recorded(
        "llama3_json",
        f'{{"name": "a", "parameters": {ROME}}}; {{"name": "b", "parameters": {{}}}}',
        "",
        (("a", ROME), ("b", "{}")),
    ),
    "llama3: after its tag": Recorded(
        "llama3_json", f'<|python_tag|>{{"name": "a", "parameters": {ROME}}}', "", (("a", ROME),)
    ),
    "llama3: text": Recorded("llama3_json", 'It is {"name": "a"}.', 'It is {"name": "a"}.'),
    "llama3: an answer in JSON": Recorded("llama3_json", '{"answer": 42}', '{"answer": 42}'),
    "mistral: an array": Recorded(
        "mistral",
        f'[TOOL_CALLS][{{"name": "a", "arguments": {ROME}}}, {{"name": "b", "arguments": {{}}}}]',
        "",
        (("a", ROME), ("b", "{}")),
    ),
    "mistral: an array with ids": Recorded(
        "mistral", f'[TOOL_CALLS] [{{"name": "a", "arguments": {ROME}, "id": "bbc5b7ede"}}]', "", (("a", ROME),)
    ),
    "mistral: named": Recorded(
        "mistral", f"Sure.[TOOL_CALLS]a[ARGS]{ROME}[TOOL_CALLS]b[ARGS]{{}}", "Sure.", (("a", ROME), ("b", "{}"))
    ),
    "mistral: named, without the inner marker": Recorded("mistral", f"[TOOL_CALLS]a{ROME}", "", (("a", ROME),)),
    "mistral: text": Recorded("mistral", "[TOOL] [x]", "[TOOL] [x]"),
    "phi: functools": Recorded("phi", f'functools[{{"name": "a", "arguments": {ROME}}}]', "", (("a", ROME),)),
    "phi: markers": Recorded(
        "phi",
        f'<|tool_call|>[{{"name": "a", "arguments": {ROME}}}, {{"name": "b", "arguments": {{}}}}]<|/tool_call|>',
        "",
        (("a", ROME), ("b", "{}")),
    ),
    "phi: text about functools": Recorded("phi", "Use functools.cache here.", "Use functools.cache here."),
}
