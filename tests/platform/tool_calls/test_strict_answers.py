from __future__ import annotations

import json
import random
import re
from collections import Counter
from collections.abc import Sequence

import jsonschema
import msgspec
import pytest
from llguidance import LLMatcher

from loramux.engine.constraints.limits import parser_limits
from loramux.platform.grammars.check import checked_grammar
from loramux.platform.tool_calls.call_syntax import SYNTAXES
from loramux.platform.tool_calls.events import ArgumentsEvent, CallBegun
from loramux.platform.tool_calls.grammar import AnswerRules, Calls, OfferedTool, Thinking
from loramux.platform.tool_calls.parsers import PARSERS
from loramux.platform.tool_calls.reasoning import THINK, ReasoningSplitter
from tests.engine.byte_vocabulary import EOS, vocabulary_with_markers

STRICT = {
    "type": "object",
    "properties": {
        "x": {"type": "integer"},
        "s": {"type": "string", "maxLength": 60},
        "l": {"type": "array", "items": {"type": "string"}, "maxItems": 2},
    },
    "required": ["x"],
    "additionalProperties": False,
}
SCHEMAS = {"f": STRICT, "g": {"type": "object"}}
VALIDATORS = {name: jsonschema.Draft202012Validator(schema) for name, schema in SCHEMAS.items()}
"""Unlike `jsonschema.validate`, they do not check their schema again for each value."""
TOOLS = tuple(OfferedTool(name, schema) for name, schema in SCHEMAS.items())
ENDS = {"<|python_end|>", "<|tool_response>", *(end for parser in PARSERS.values() for end in parser.ends)}
BEGINNINGS = {one for parser in PARSERS.values() for one in parser.markers} - {"<function="}
"""No model has a token for `<function=`, which other formats write as text."""
MARKERS = tuple(sorted({"<think>", "</think>", *ENDS, *BEGINNINGS}))
IS_MARKER = re.compile("(" + "|".join(map(re.escape, sorted(MARKERS, key=len, reverse=True))) + ")")
NUM_WALKS = 25
ARGUMENTS = ('{"x": 1}', '{"y": "bad"}', '{"x": "bad"}', "{}", "null", '"{}"')
NAMED = '{"name": "%s", "arguments": %s}'
PARAMETERS = NAMED.replace("arguments", "parameters")
BLOCKS = {
    "functiongemma": ("<start_function_call>call:%s%s<end_function_call>",),
    "gemma4": ("<|tool_call>call:%s%s<tool_call|>", "<|tool_call> call:%s%s"),
    "glm45": (
        "<tool_call>%s\n%s\n</tool_call>",
        "<tool_call>%s<arg_key>x</arg_key><arg_value>%s</arg_value></tool_call>",
    ),
    "hermes": (f"<tool_call>\n{NAMED}\n</tool_call>", f"<tool_call>{NAMED}"),
    "llama3_json": (PARAMETERS, f"<|python_tag|>{PARAMETERS}", f"\n{PARAMETERS}; {NAMED % ('g', 1)}"),
    "minimax_m2": (
        '<minimax:tool_call>\n<invoke name="%s">\n%s\n</invoke>\n</minimax:tool_call>',
        '<minimax:tool_call><invoke name="%s"><parameter name="x">%s</parameter></invoke></minimax:tool_call>',
    ),
    "mistral": (f"[TOOL_CALLS][{NAMED}]", "[TOOL_CALLS]%s[ARGS]%s"),
    "phi": (f"<|tool_call|>[{NAMED}]<|/tool_call|>", f"functools[{NAMED}]"),
    "pythonic": (f"[{NAMED}]", f"<|python_start|>[{NAMED}]<|python_end|>", f"[{NAMED}, {NAMED % ('g', 1)}]"),
    "qwen3_coder": (
        "<tool_call>\n<function=%s>\n%s\n</function>\n</tool_call>",
        "<function=%s>\n%s\n</function>",
        "<tool_call>\n<function=%s>\n<parameter=x>\n%s\n</parameter>\n</function>\n</tool_call>",
    ),
    "seed_oss": (
        "<seed:tool_call>\n<function=%s>\n%s\n</function>\n</seed:tool_call>",
        "<seed:tool_call><function=%s><parameter=x>%s</parameter></function></seed:tool_call>",
    ),
}
SHARED = (
    *('[f(y="bad")]', "[f(x=1)]", "[f(x=1), f(x=2)]", "{", "}", "[", "]", "; ", ", ", "f[ARGS]", "call:f"),
    *("functools", "Sure.", "<tool", "_call>", "[TOOL", "_CALLS]", "</thin", "k>", "<|python_", "tag|>"),
    *("\n", "\n\n", " ", "\t", "\r\n", " " * 70, "\x0b", "\x0c", "\x1c", "\x85", "\xa0", "\u2003", "\u2028"),
)


def tagged_parts(format_name: str) -> list[str]:
    """Return parts of calls with arguments between tags: whole arguments, their halves, and tags at wrong places."""
    syntax = SYNTAXES[format_name]
    tags = syntax.tags
    if tags is None:
        return []
    marker, block = next(iter(syntax.blocks.items()))
    line = "\n" if tags.has_lines else ""
    begin = f"{marker}{block.before}{syntax.before_arguments.rstrip(chr(10))}"
    f, g = (f"{begin.replace('NAME', name)}\n" for name in "fg")
    end = f"{syntax.after_arguments.lstrip()}{block.after}{block.end}"
    x, s, items = (f"{tags.key}{name}{tags.key_end}{tags.value_begin}{line}" for name in "xsl")
    value_end = f"{line}{tags.value_end}\n"
    return [
        *(f, g, x, s, items, value_end, end),
        *(tags.key, tags.key_end, tags.value_end, tags.end, '["', '"', '", "', '"]', "5"),
        *(f"{f}{x}5{value_end}", f"{s}a{value_end}", f'{items}["a"]{value_end}'),
        *[f"{f}{x}5{value_end}{end}", f"{g}{end}"] * 4,
        *(f"{f}{x}bad{value_end}{end}", f"{g}{s}", f"{end}{g}", f'{items}["{tags.value_end}"]{value_end}', f"{s}{end}"),
    ]


TAGGED = {name: tagged_parts(name) for name in PARSERS}


def fragment(dice: random.Random, format_name: str) -> list[int]:
    """Return the tokens of a part of an answer, with markers as special tokens or spelled with ordinary ones."""
    block = dice.choice(BLOCKS[format_name]) % (dice.choice(("f", "g", "never")), dice.choice(ARGUMENTS))
    text = dice.choice((block, block, dice.choice(MARKERS), dice.choice(SHARED), "hm</think>", "<think>"))
    if TAGGED[format_name] and dice.random() < 0.7:
        text = dice.choice(TAGGED[format_name])
    if dice.random() < 0.3:
        return list(text.encode())
    parts = (MARKERS.index(part) + EOS + 1 if part in MARKERS else part for part in IS_MARKER.split(text))
    return [token for part in parts for token in ([part] if isinstance(part, int) else part.encode())]


def text_of(tokens: Sequence[int]) -> str:
    return b"".join(bytes([one]) if one < EOS else MARKERS[one - EOS - 1].encode() for one in tokens).decode()


def calls_in(answer: str, format_name: str, thinking: Thinking | None) -> list[tuple[str, str]]:
    if thinking is not None:
        splitter = ReasoningSplitter(is_open=thinking.is_open)
        answer = splitter.feed(answer)[1] + splitter.flush()[1]
    parser, calls = PARSERS[format_name](), []
    parser.schemas = SCHEMAS
    for event in [*parser.feed(answer), *parser.finish()]:
        if isinstance(event, CallBegun):
            calls.append((event.name, ""))
        elif isinstance(event, ArgumentsEvent):
            calls[event.index] = (calls[event.index][0], calls[event.index][1] + event.text)
    return calls


@pytest.mark.parametrize("are_tokens", [True, False], ids=["tokens", "plain"])
@pytest.mark.parametrize("is_parallel", [True, False], ids=["parallel", "single"])
@pytest.mark.parametrize("is_open", [None, True, False], ids=["silent", "open", "optional"])
@pytest.mark.parametrize("format_name", PARSERS)
def test_no_spelling_of_a_call_escapes_the_rules(
    format_name: str, is_open: bool | None, is_parallel: bool, are_tokens: bool
) -> None:
    dice = random.Random(f"{format_name} {is_open} {is_parallel} {are_tokens}")
    thinking = None if is_open is None else Thinking(THINK.begin, THINK.end, is_open)
    parser = PARSERS[format_name]
    used = {*parser.markers, *parser.ends, THINK.begin, THINK.end}
    rules = AnswerRules(
        thinking=thinking,
        calls=Calls(format_name, TOOLS, is_forced=False, is_parallel=is_parallel),
        special_tokens={one: EOS + 1 + i for i, one in enumerate(MARKERS) if one in used} if are_tokens else {},
    )
    vocabulary = vocabulary_with_markers(MARKERS)
    grammar = checked_grammar("answer", msgspec.json.encode(rules).decode(), vocabulary)
    start, num_calls = LLMatcher(vocabulary, grammar, limits=parser_limits(), log_level=0), Counter[int]()
    for _ in range(NUM_WALKS):
        matcher, tokens = start.deep_copy(), list[int]()
        for added in (fragment(dice, format_name) for _ in range(30)):
            if matcher.validate_tokens(added) < len(added):
                continue
            assert matcher.consume_tokens(added)
            tokens += added
            if matcher.is_accepting():
                answer = text_of(tokens)
                calls = calls_in(answer, format_name, thinking)
                for name, arguments in calls:
                    VALIDATORS[name].validate(json.loads(arguments))
                assert is_parallel or len(calls) <= 1, answer
                num_calls[len(calls)] += 1
    assert min(num_calls[0], num_calls[1]) > 0, num_calls
