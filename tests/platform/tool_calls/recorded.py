from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Recorded:
    """`calls` has each call's name and the JSON of its arguments. `schemas` are those of the request's functions.

    `is_cut_off` says whether the answer ends within a call that has begun.
    """

    format_name: str
    answer: str
    text: str
    calls: tuple[tuple[str, str], ...] = ()
    schemas: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    is_cut_off: bool = False


ROME = '{"city": "Rome"}'
BRACES = r'{"code": "if (a) { return \"]}\"; } </tool_call>", "n": [1, {"m": null}]}'

ORDER = {
    "order": {
        "type": "object",
        "properties": {
            "code": {"type": "string"},
            "count": {"type": "integer"},
            "is_urgent": {"$ref": "#/$defs/flag"},
            "note": {"type": ["string"]},
            "items": {"anyOf": [{"type": "array"}, {"type": "null"}]},
        },
        "$defs": {"flag": {"type": "boolean"}},
    }
}

EDIT = {"edit": {"properties": {"edits": {"type": "array"}, "path": {"type": "string"}}}}

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
    "hermes: two calls in one block": Recorded(
        "hermes",
        f'<tool_call>\n{{"name": "a", "arguments": {ROME}}}\n{{"name": "b", "arguments": {{}}}}\n</tool_call>',
        "",
        (("a", ROME), ("b", "{}")),
    ),
    "hermes: two calls with a comma between them": Recorded(
        "hermes",
        f'<tool_call>{{"name": "a", "arguments": {ROME}}}, {{"name": "b", "arguments": {{}}}}</tool_call>',
        "",
        (("a", ROME), ("b", "{}")),
    ),
    "hermes: a second call with other members": Recorded(
        "hermes",
        f'<tool_call>{{"name": "a", "arguments": {ROME}}}\n{{"name": "b", "arguments": {{}}, "why": 1}}</tool_call>',
        "",
        (("a", ROME), ("b", "{}")),
    ),
    "hermes: an object after a call": Recorded(
        "hermes",
        f'<tool_call>\n{{"name": "a", "arguments": {ROME}}}\n{{"foo": 1}}\n</tool_call>',
        '{"foo": 1}\n</tool_call>',
        (("a", ROME),),
    ),
    "hermes: an answer in JSON after a call without an end": Recorded(
        "hermes",
        f'<tool_call>\n{{"name": "a", "arguments": {ROME}}}\n{{"name": "Bob", "age": 3}}',
        '{"name": "Bob", "age": 3}',
        (("a", ROME),),
    ),
    **{
        f"hermes: cut between calls at {cut!r}": Recorded(
            "hermes", f'<tool_call>\n{{"name": "a", "arguments": {ROME}}}\n{cut}', cut, (("a", ROME),)
        )
        for cut in ("{", '{"na', ",")
    },
    "hermes: cut within the second call": Recorded(
        "hermes",
        f'<tool_call>\n{{"name": "a", "arguments": {ROME}}}\n{{"name": "b", "arguments": {{"x',
        "",
        (("a", ROME), ("b", '{"x')),
        is_cut_off=True,
    ),
    "hermes: braces too many after spaces": Recorded(
        "hermes", f'<tool_call>\n{{"name": "a", "arguments": {ROME}}}\n}} }}\n</tool_call>', "", (("a", ROME),)
    ),
    "hermes: a brace too many": Recorded(
        "hermes",
        f'<tool_call>\n{{"name": "a", "arguments": {ROME}}}}}\n</tool_call> Well.',
        "Well.",
        (("a", ROME),),
    ),
    "hermes: a malformed call before a call": Recorded(
        "hermes",
        f'<tool_call>\n{{"name": "a",", "arguments": {ROME}}}\n</tool_call>\n'
        f'<tool_call>\n{{"name": "b", "arguments": {ROME}}}\n</tool_call>',
        f'<tool_call>\n{{"name": "a",", "arguments": {ROME}}}\n</tool_call>',
        (("b", ROME),),
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
        "hermes",
        '<tool_call>\n{"name": "a", "arguments": {"city": "Ro',
        "",
        (("a", '{"city": "Ro'),),
        is_cut_off=True,
    ),
    "hermes: cut before the name": Recorded("hermes", 'Hm. <tool_call>\n{"na', 'Hm. <tool_call>\n{"na'),
    "hermes: no object": Recorded("hermes", "a <tool_call>oops</tool_call> b", "a <tool_call>oops</tool_call> b"),
    **{
        f"hermes: name {name!r:.20}": Recorded("hermes", text, text)
        for name in ("", "a\\nb", "a\\u200bb", "a" * 257)
        for text in (f'<tool_call>{{"name": "{name}"}}</tool_call>',)
    },
    "hermes: other names and keys": Recorded(
        "hermes",
        '<tool_call>{"name": "weather.get()", "arguments": {"a": 1, "a": 2}}</tool_call>',
        "",
        (("weather.get()", '{"a": 1, "a": 2}'),),
    ),
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
    "llama3: a brace too many": Recorded("llama3_json", f'{{"name": "a", "parameters": {ROME}}}}}', "", (("a", ROME),)),
    "llama3: a brace too many after a space": Recorded(
        "llama3_json", f'{{"name": "a", "parameters": {ROME}}} }}', "", (("a", ROME),)
    ),
    "llama3: an object after a call": Recorded(
        "llama3_json", f'{{"name": "a", "parameters": {ROME}}}; {{"foo": 1}}', '; {"foo": 1}', (("a", ROME),)
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
    "llama3: after a space that JSON does not have": Recorded(
        "llama3_json", '\xa0{"name": "a", "parameters": {}}', '\xa0{"name": "a", "parameters": {}}'
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
    "mistral: an array with another object": Recorded(
        "mistral",
        f'[TOOL_CALLS][{{"name": "a", "arguments": {ROME}}}, {{"foo": 1}}]',
        ', {"foo": 1}]',
        (("a", ROME),),
    ),
    "mistral: named, with a brace too many": Recorded(
        "mistral", f"[TOOL_CALLS]a[ARGS]{ROME}}}[TOOL_CALLS]b[ARGS]{{}}}}", "", (("a", ROME), ("b", "{}"))
    ),
    "mistral: named, without the inner marker": Recorded("mistral", f"[TOOL_CALLS]a{ROME}", "", (("a", ROME),)),
    **{
        f"mistral: text {text!r}": Recorded("mistral", text, text)
        for text in ("[TOOL] [x]", "[TOOL_CALLS][TOOL", "See [TOOL_CALLS][TOOL_CALLS] docs")
    },
    "phi: functools": Recorded("phi", f'functools[{{"name": "a", "arguments": {ROME}}}]', "", (("a", ROME),)),
    "phi: markers": Recorded(
        "phi",
        f'<|tool_call|>[{{"name": "a", "arguments": {ROME}}}, {{"name": "b", "arguments": {{}}}}]<|/tool_call|>',
        "",
        (("a", ROME), ("b", "{}")),
    ),
    **{
        f"phi: text {text!r}": Recorded("phi", text, text)
        for text in ("Use functools.cache here.", "functools [0]", "functools[0]")
    },
    "pythonic: one call": Recorded("pythonic", '[get_weather(city="Rome")]', "", (("get_weather", ROME),)),
    "pythonic: two calls between markers": Recorded(
        "pythonic", "<|python_start|>[a(city='Rome'), b()]<|python_end|>", "", (("a", ROME), ("b", "{}"))
    ),
    "pythonic: text before the marker": Recorded(
        "pythonic", 'I look.\n<|python_start|>[a(city="Rome")]', "I look.", (("a", ROME),)
    ),
    "pythonic: every literal": Recorded(
        "pythonic",
        "[f(a=-1, b=2.5e3, c=.5, d=1_000, e=True, f=None, g=[1, 'x', [],], h={'k': {}, 2: false}, i=null, )]\n",
        "",
        (
            (
                "f",
                '{"a": -1, "b": 2.5e3, "c": 0.5, "d": 1000, "e": true, "f": null, "g": [1, "x", []], '
                '"h": {"k": {}, "2": false}, "i": null}',
            ),
        ),
    ),
    "pythonic: brackets, quotes and escapes in strings": Recorded(
        "pythonic",
        r"""[run(code='if (a) { return ")]}"; } \'\\d\' \d', t="\x41\u00fc\ud83d\ude42\0")]""",
        "",
        (("run", r"""{"code": "if (a) { return \")]}\"; } '\\d' \\d", "t": "Aü🙂\u0000"}"""),),
    ),
    "pythonic: a line break in a string": Recorded(
        "pythonic", '[say(text="Zürich\n東京 🙂")]', "", (("say", r'{"text": "Zürich\n東京 🙂"}'),)
    ),
    "pythonic: names that Python reserves": Recorded(
        "pythonic", '[get-mail(from="a", class="b")]', "", (("get-mail", '{"from": "a", "class": "b"}'),)
    ),
    "pythonic: an integer that Python would not convert": Recorded(
        "pythonic", f"[f(x={'9' * 5000})]", "", (("f", f'{{"x": {"9" * 5000}}}'),)
    ),
    "pythonic: objects": Recorded(
        "pythonic",
        f'[{{"name": "a", "arguments": {ROME}}}, {{"name": "b", "parameters": {{}}}}]',
        "",
        (("a", ROME), ("b", "{}")),
    ),
    **{
        f"pythonic: text {text!r:.40}": Recorded("pythonic", text, text)
        for text in (
            'It is [get_weather(city="Rome")].',
            '[get_weather(city="Rome")](https://example.com)',
            '[get_weather(city="Rome"), and so on]',
            '[get_weather("Rome")]',
            "[f(x=1, x=2)]",
            "[f(x=g(1))]",
            "[f(x=1+1)]",
            "[f(x=(1, 2))]",
            "[f(x=__import__)]",
            "[f(x=f'{1}')]",
            '[f(x="a" "b")]',
            '[f(x="""a "quoted" b""")]',
            r'[f(x="\ud83d")]',
            "[f(x=1e999_9)]",
            "[f(x=1j)]",
            "[f(x=" + "-" * 50 + "1)]",
            "[f(x=" + "[" * 80 + "]" * 80 + ")]",
            "[f(x={1: {}: 2})]",
            "[f(x=[1}])]",
            "[f.g](x)",
            "[1, 2, 3]",
            "[]",
            '[{"name": "Rome"}]',
            "<|python_start|>2+2<|python_end|>",
            '[f(x="Ro',
        )
    },
    "functiongemma: one call": Recorded(
        "functiongemma",
        "<start_function_call>call:get_weather{city:<escape>Rome<escape>}<end_function_call><start_function_response>",
        "",
        (("get_weather", ROME),),
    ),
    "functiongemma: text, then two calls": Recorded(
        "functiongemma",
        "I look.\n<start_function_call>call:a{city:<escape>Rome<escape>}<end_function_call>\n"
        "<start_function_call>\ncall:b{}\n<end_function_call>",
        "I look.",
        (("a", ROME), ("b", "{}")),
    ),
    "functiongemma: every value": Recorded(
        "functiongemma",
        "<start_function_call>call:f{a:-1,b:2.5,c:true,d:None,e:[1,<escape>x<escape>,[]], g:{k:{},<escape>l<escape>:0},"
        "h:some words }<end_function_call>",
        "",
        (
            (
                "f",
                '{"a": -1, "b": 2.5, "c": true, "d": null, "e": [1, "x", []], "g": {"k": {}, "l": 0}, '
                '"h": "some words"}',
            ),
        ),
    ),
    "functiongemma: text": Recorded("functiongemma", "<start_function call:f{}", "<start_function call:f{}"),
    "functiongemma: no call": Recorded("functiongemma", "<start_function_call>f{}", "<start_function_call>f{}"),
    "gemma4: one call": Recorded(
        "gemma4",
        'Hm.<|tool_call>call:get_weather{city:<|"|>Rome<|"|>}<tool_call|><|tool_response>',
        "Hm.",
        (("get_weather", ROME),),
    ),
    "gemma4: two calls": Recorded(
        "gemma4",
        '<|tool_call>call:a{city:<|"|>Rome<|"|>}<tool_call|><|tool_call>call:b{}<tool_call|>',
        "",
        (("a", ROME), ("b", "{}")),
    ),
    "gemma4: brackets, quotes, lines and part of a marker in a string": Recorded(
        "gemma4",
        '<|tool_call>call:run{code:<|"|>if (a) { return "]}\\"; }\n<|"|" <tool_call|> 🙂<|"|>,'
        "n:[{m:null}]}<tool_call|>",
        "",
        (("run", r'{"code": "if (a) { return \"]}\\\"; }\n<|\"|\" <tool_call|> 🙂", "n": [{"m": null}]}'),),
    ),
    "gemma4: arguments in JSON": Recorded(
        "gemma4", f"<|tool_call>call:run{BRACES}<tool_call|>", "", (("run", BRACES),)
    ),
    "gemma4: no end": Recorded("gemma4", '<|tool_call>call:a{city:<|"|>Rome<|"|>}', "", (("a", ROME),)),
    "gemma4: cut within a string": Recorded(
        "gemma4", '<|tool_call>call:a{city:<|"|>Ro<|"', "", (("a", '{"city": "Ro'),), is_cut_off=True
    ),
    "gemma4: cut within a key": Recorded(
        "gemma4", '<|tool_call>call:a{city:<|"|>Rome<|"|>,da', "", (("a", '{"city": "Rome", '),), is_cut_off=True
    ),
    "gemma4: text after broken arguments": Recorded(
        "gemma4", "<|tool_call>call:a{x:1,>} b", ">} b", (("a", '{"x": 1, '),)
    ),
    "qwen3_coder: two calls with all types": Recorded(
        "qwen3_coder",
        "I will look.\n\n<tool_call>\n<function=order>\n<parameter=code>\n01234\n</parameter>\n<parameter=count>\n5\n"
        '</parameter>\n<parameter=is_urgent>\nTrue\n</parameter>\n<parameter=note>\nline 1\n\n  "line" 2 '
        "</tool_call>\n\n"
        '</parameter>\n<parameter=items>\n["a", {"b": 1.50}]\n</parameter>\n</function>\n</tool_call>\n'
        "<tool_call>\n<function=now>\n</function>\n</tool_call>",
        "I will look.",
        (
            (
                "order",
                '{"code": "01234", "count": 5, "is_urgent": true, '
                '"note": "line 1\\n\\n  \\"line\\" 2 </tool_call>\\n", "items": ["a", {"b": 1.50}]}',
            ),
            ("now", "{}"),
        ),
        ORDER,
    ),
    "qwen3_coder: without the marker": Recorded(
        "qwen3_coder",
        "<function=order>\n<parameter=count>\n5\n</parameter>\n</function>\n</tool_call>",
        "",
        (("order", '{"count": 5}'),),
        ORDER,
    ),
    "qwen3_coder: arguments in JSON": Recorded(
        "qwen3_coder",
        f"<tool_call>\n<function=get_weather>\n{ROME}\n</function>\n</tool_call>",
        "",
        (("get_weather", ROME),),
    ),
    "qwen3_coder: no function": Recorded(
        "qwen3_coder", "a <tool_call>oops</tool_call> b", "a <tool_call>oops</tool_call> b"
    ),
    "qwen3_coder: no key": Recorded(
        "qwen3_coder", "<function=f><parameter=\n</function> b", "<function=f><parameter=\n</function> b"
    ),
    "qwen3_coder: text in place of the end": Recorded(
        "qwen3_coder",
        "<tool_call><function=order><parameter=count>5</parameter></tool_call> b",
        "b",
        (("order", '{"count": 5}'),),
        ORDER,
    ),
    "qwen3_coder: types that nobody stated": Recorded(
        "qwen3_coder",
        "<function=f><parameter=a>5</parameter><parameter=b>five</parameter>"
        "<parameter=c>{'x': None}</parameter></function>",
        "",
        (("f", '{"a": 5, "b": "five", "c": {"x": null}}'),),
    ),
    "qwen3_coder: no arguments, and no end": Recorded(
        "qwen3_coder", "<tool_call>\n<function=now>\n</tool_call>", "", (("now", "{}"),)
    ),
    "qwen3_coder: keys in quotes": Recorded(
        "qwen3_coder",
        '<function=order><parameter="code">5</parameter><parameter="count">5</parameter></function>',
        "",
        (("order", '{"code": "5", "count": 5}'),),
        ORDER,
    ),
    "qwen3_coder: a later key is broken": Recorded(
        "qwen3_coder",
        "<function=order><parameter=count>5</parameter><parameter=<x>1</parameter></function>",
        "<parameter=<x>1</parameter></function>",
        (("order", '{"count": 5}'),),
        ORDER,
    ),
    "qwen3_coder: a missing tag before an argument": Recorded(
        "qwen3_coder",
        "<tool_call>\n<function=order>\n<parameter=code>\na <\n<parameter=count>\n5\n<parameter=items>\n[1]\n"
        "</parameter>\n</function>\n</tool_call>",
        "",
        (("order", '{"code": "a <", "count": 5, "items": [1]}'),),
        ORDER,
    ),
    "qwen3_coder: other arguments in a value": Recorded(
        "qwen3_coder",
        "<function=order><parameter=code>a<parameter=code>b<parameter=x>c</parameter></function>",
        "",
        (("order", '{"code": "a<parameter=code>b<parameter=x>c"}'),),
        ORDER,
    ),
    "qwen3_coder: a missing tag before the end of the call": Recorded(
        "qwen3_coder",
        "<tool_call>\n<function=order>\n<parameter=note>\nf()\n</function>\n</tool_call>\n<tool_call>\n"
        "<function=order>\n<parameter=count>\n5\n</function>\n",
        "",
        (("order", '{"note": "f()"}'), ("order", '{"count": 5}')),
        ORDER,
    ),
    "qwen3_coder: tags in strings of a list": Recorded(
        "qwen3_coder",
        '<tool_call>\n<function=edit>\n<parameter=edits>\n[{"old": "</parameter>\\"</parameter>", '
        '"new": "<parameter=path>"}]\n</parameter>\n<parameter=path>\na\n</parameter>\n</function>\n</tool_call>',
        "",
        (("edit", '{"edits": [{"old": "</parameter>\\"</parameter>", "new": "<parameter=path>"}], "path": "a"}'),),
        EDIT,
    ),
    "qwen3_coder: a list with a quote too many": Recorded(
        "qwen3_coder",
        '<function=edit>\n<parameter=edits>\n["]\n</parameter>\n<parameter=path>\na\n</parameter>\n</function>',
        "",
        (("edit", '{"edits": "[\\"]", "path": "a"}'),),
        EDIT,
    ),
    "qwen3_coder: another argument's tag within a line": Recorded(
        "qwen3_coder",
        "<function=order>\n<parameter=code>\na <parameter=count> b\n<parameter=count> c\n</parameter>\n"
        "<parameter=count>\n5\n</parameter>\n</function>",
        "",
        (("order", '{"code": "a <parameter=count> b\\n<parameter=count> c", "count": 5}'),),
        ORDER,
    ),
    "seed_oss: another argument's tag within a line": Recorded(
        "seed_oss",
        "<seed:tool_call><function=order><parameter=code>a <parameter=count> b</parameter>"
        "<parameter=count>5</parameter></function>",
        "",
        (("order", '{"code": "a <parameter=count> b", "count": 5}'),),
        ORDER,
    ),
    "qwen3_coder: a list with a quote too many on one line": Recorded(
        "qwen3_coder",
        '<function=edit><parameter=edits>["]</parameter><parameter=path>a</parameter></function>',
        "",
        (("edit", '{"edits": "[\\"]", "path": "a"}'),),
        EDIT,
    ),
    "seed_oss: tags in strings of Python, after a line break": Recorded(
        "seed_oss",
        "<seed:tool_call><function=edit><parameter=edits>\n['</parameter>\"', \"'</parameter>\"]</parameter>"
        "<parameter=path>a</parameter></function>",
        "",
        (("edit", '{"edits": ["</parameter>\\"", "\'</parameter>"], "path": "a"}'),),
        EDIT,
    ),
    "seed_oss: a list with a quote too many": Recorded(
        "seed_oss",
        '<seed:tool_call><function=edit><parameter=edits>["]</parameter>\n<parameter=path>a</parameter></function>',
        "",
        (("edit", '{"edits": "[\\"]", "path": "a"}'),),
        EDIT,
    ),
    "seed_oss: missing tags": Recorded(
        "seed_oss",
        "<seed:tool_call>\n<function=order>\n<parameter=code>a\n<parameter=count>5</function>\n<function=now>\n"
        "</function>\n</seed:tool_call>",
        "",
        (("order", '{"code": "a", "count": 5}'), ("now", "{}")),
        ORDER,
    ),
    "seed_oss: two calls in a block": Recorded(
        "seed_oss",
        "<seed:tool_call>\n<function=order>\n<parameter=note>\nkept\n</parameter>\n<parameter=count>5</parameter>\n"
        "</function>\n<function=now>\n</function>\n</seed:tool_call>",
        "",
        (("order", '{"note": "\\nkept\\n", "count": 5}'), ("now", "{}")),
        ORDER,
    ),
    "glm45: two calls": Recorded(
        "glm45",
        "Hm.\n<tool_call>order\n<arg_key>code</arg_key>\n<arg_value>01234</arg_value>\n<arg_key>count</arg_key>\n"
        "<arg_value>5</arg_value>\n</tool_call>\n<tool_call>now</tool_call>",
        "Hm.",
        (("order", '{"code": "01234", "count": 5}'), ("now", "{}")),
        ORDER,
    ),
    "glm45: missing tags": Recorded(
        "glm45",
        "<tool_call>order<arg_key>code</arg_key><arg_value>a<arg_key>count</arg_key><arg_value>5</tool_call>\n"
        "<tool_call>now</tool_call>",
        "",
        (("order", '{"code": "a", "count": 5}'), ("now", "{}")),
        ORDER,
    ),
    "glm45: another argument's name in a value": Recorded(
        "glm45",
        "<tool_call>order<arg_key>code</arg_key><arg_value>see <arg_key>count</arg_key> b</arg_value>"
        "<arg_key>count</arg_key><arg_value>5</arg_value></tool_call>",
        "",
        (("order", '{"code": "see <arg_key>count</arg_key> b", "count": 5}'),),
        ORDER,
    ),
    "glm45: quotes in strings of Python": Recorded(
        "glm45",
        "<tool_call>edit<arg_key>edits</arg_key><arg_value>['5\" pipe']</arg_value>"
        "<arg_key>path</arg_key><arg_value>a</arg_value></tool_call>",
        "",
        (("edit", '{"edits": ["5\\" pipe"], "path": "a"}'),),
        EDIT,
    ),
    "glm45: a list with a quote too many": Recorded(
        "glm45",
        '<tool_call>edit<arg_key>edits</arg_key><arg_value>["]</arg_value>'
        "<arg_key>path</arg_key><arg_value>a</arg_value></tool_call>",
        "",
        (("edit", '{"edits": "[\\"]", "path": "a"}'),),
        EDIT,
    ),
    "glm45: on one line": Recorded(
        "glm45",
        "<tool_call>order<arg_key>code</arg_key><arg_value>a < b\n</arg_value></tool_call>",
        "",
        (("order", '{"code": "a < b\\n"}'),),
        ORDER,
    ),
    "glm45: arguments in JSON": Recorded(
        "glm45", f"<tool_call>get_weather\n{ROME}\n</tool_call>", "", (("get_weather", ROME),)
    ),
    "minimax_m2: missing tags": Recorded(
        "minimax_m2",
        '<minimax:tool_call>\n<invoke name="order">\n<parameter name="code">a\n<parameter name="count">5\n</invoke>\n'
        "</minimax:tool_call>",
        "",
        (("order", '{"code": "a", "count": 5}'),),
        ORDER,
    ),
    "minimax_m2: two calls in a block": Recorded(
        "minimax_m2",
        '<minimax:tool_call>\n<invoke name="order">\n<parameter name="code">01234</parameter>\n'
        '<parameter name="items">[1, 2]</parameter>\n</invoke>\n<invoke name="now">\n</invoke>\n</minimax:tool_call>',
        "",
        (("order", '{"code": "01234", "items": [1, 2]}'), ("now", "{}")),
        ORDER,
    ),
}
