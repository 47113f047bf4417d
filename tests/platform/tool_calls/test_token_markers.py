"""Grammars of models in whose vocabulary the markers, or parts of them, are single tokens."""

from __future__ import annotations

import re

import msgspec
import pytest
from llguidance import LLMatcher, LLTokenizer

from loramux.adapter_store.formats.version_files.added_vocabulary import AddedToken, AddedVocabulary
from loramux.engine.constraints.limits import parser_limits
from loramux.engine.constraints.vocabulary import load_vocabulary
from loramux.platform.bodies.chat_request import ChatRequest
from loramux.platform.generation.plan import Reasoning
from loramux.platform.grammars.check import checked_grammar
from loramux.platform.requests.chat_constraint import chat_constraint
from loramux.platform.requests.endpoint import Prepared
from loramux.platform.tokenizer.model_tokenizer import ModelTokenizer
from loramux.platform.tool_calls.call_syntax import Block, CallSyntax
from loramux.platform.tool_calls.grammar import AnswerRules, CallLayout, Calls, OfferedTool
from loramux.platform.tool_calls.reasoning import HARMONY, REASONING_MARKERS
from tests.demo_base import DEMO_BASE
from tests.engine.byte_vocabulary import EOS, vocabulary_with_markers

MARKERS = {name: markers for name, markers in REASONING_MARKERS.items() if markers is not HARMONY}
SHOWN = (("think", False), ("gemma4", False))
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}, "strict": True}}
TOKEN = re.compile(r"<[^>]*>|\[[A-Z/]*\]")


@pytest.fixture(scope="module")
def vocabulary() -> LLTokenizer:
    return load_vocabulary(DEMO_BASE, 1024, (1,))


def with_tokens(contents: list[str], *, are_special: bool) -> ModelTokenizer:
    base = ModelTokenizer.load(DEMO_BASE)
    flags = {"special": are_special, "lstrip": False, "rstrip": False, "single_word": False, "normalized": False}
    tokens = tuple(AddedToken(base.num_tokens + index, one, **flags) for index, one in enumerate(contents))
    return base.with_vocabulary(AddedVocabulary(base.num_tokens + len(tokens), tokens))


@pytest.mark.parametrize(("name", "are_special"), [*((name, True) for name in MARKERS), *SHOWN])
def test_constrained_answers_can_begin_with_thinking(name: str, are_special: bool, vocabulary: LLTokenizer) -> None:
    markers = MARKERS[name]
    tokens = [*TOKEN.findall(markers.begin), *TOKEN.findall(markers.end), "<tool_call>", "</tool_call>"]
    tokenizer = with_tokens(tokens, are_special=are_special)
    thought = f"{markers.begin}\nWhy?\n{markers.end}"
    bodies = (
        ({"response_format": {"type": "json_object"}}, "{}"),
        ({"tools": [TOOL]}, '<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>'),
        ({"tools": [TOOL], "tool_choice": "required"}, '<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>'),
    )
    for fields, answer in bodies:
        body = ChatRequest.model_validate({"model": "m", "messages": [{"role": "user", "content": "a"}], **fields})
        prepared = Prepared(((1,),), Reasoning(markers, is_open=False), "hermes" if "tools" in fields else None)
        constraint = chat_constraint(tokenizer, body, prepared)
        assert constraint is not None
        grammar = checked_grammar(constraint.kind, constraint.text, vocabulary)
        for text in (thought + answer, f"{thought}\n\n{answer}", answer):
            matcher = LLMatcher(vocabulary, grammar, limits=parser_limits())
            assert matcher.consume_tokens(list(tokenizer.encode(text, add_special_tokens=False))), text
            assert matcher.is_accepting(), text


def test_calls_begin_at_markers_of_several_parts() -> None:
    syntax = CallSyntax({"call<|x|>now": Block(end="<|x|>end")}, is_grouped=False)
    tool = OfferedTool("f", {"type": "object"})
    layout = CallLayout(("call<|x|>now",), "", syntax)
    calls = Calls("own", (tool,), is_forced=False, is_parallel=True, layout=layout)
    rules = AnswerRules(calls=calls, special_tokens={"<|x|>": EOS + 1})
    vocabulary = vocabulary_with_markers(("<|x|>",))
    grammar = checked_grammar("answer", msgspec.json.encode(rules).decode(), vocabulary)
    call = [*b"call", EOS + 1, *b'now{"name": "f", "arguments": {}}', EOS + 1, *b"end"]
    for answer in ([*b"I call"], call, [*b"I call it: ", *call, *b", and ", *call]):
        matcher = LLMatcher(vocabulary, grammar, limits=parser_limits())
        assert matcher.consume_tokens(answer)
        assert matcher.is_accepting()
    matcher = LLMatcher(vocabulary, grammar, limits=parser_limits(), log_level=0)
    assert not matcher.consume_tokens([*b"call", EOS + 1, *b"now{}"])
