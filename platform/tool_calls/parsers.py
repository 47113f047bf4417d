"""The parsers of tool calls in text."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

from loramux.adapter_store.extensions import ExtensionKind
from loramux.adapter_store.formats.version_files.answer_parsers import AUTO, OFF
from loramux.adapter_store.formats.version_files.answer_parsers import PARSERS as NAMES
from loramux.platform.tool_calls.call_parser import CallParser
from loramux.platform.tool_calls.call_syntax import CallSyntax
from loramux.platform.tool_calls.gemma import FunctionGemmaParser, Gemma4Parser
from loramux.platform.tool_calls.json_calls import HermesParser, Llama3JsonParser, MistralParser, PhiParser
from loramux.platform.tool_calls.pythonic import PythonicParser
from loramux.platform.tool_calls.tagged import Glm45Parser, MiniMaxM2Parser, Qwen3CoderParser, SeedOssParser

PARSERS: Mapping[str, type[CallParser]] = MappingProxyType(
    {
        "functiongemma": FunctionGemmaParser,
        "gemma4": Gemma4Parser,
        "glm45": Glm45Parser,
        "hermes": HermesParser,
        "llama3_json": Llama3JsonParser,
        "minimax_m2": MiniMaxM2Parser,
        "mistral": MistralParser,
        "phi": PhiParser,
        "pythonic": PythonicParser,
        "qwen3_coder": Qwen3CoderParser,
        "seed_oss": SeedOssParser,
    }
)
"""Maps names to parsers. Parsers that also exist in vLLM have the same names there. Each answer needs a new parser.

Harmony is not listed, because `harmony.py` reads token IDs instead of text.
"""


def _problem(value: object) -> str | None:
    """Return why a value is not the parser of an extension, or None."""
    if not isinstance(value, type) or not issubclass(value, CallParser):
        return "is not a subclass of CallParser"
    if inspect.isabstract(value):
        return "has no method _block"
    if not isinstance(value.syntax, CallSyntax):
        return "has no syntax"
    begins = {*value.markers, *([""] if value.openers else [])}
    return None if begins == {*value.syntax.blocks} else "has markers that its syntax lacks, or the reverse"


TOOL_PARSERS = ExtensionKind[CallParser](
    "tool_parsers", "tool parser", CallParser, taken=(AUTO, OFF, *NAMES["tool_call_parser"]), problem=_problem
)
"""Parsers of extensions: subclasses of CallParser with a `syntax`."""


def find_parser(name: str) -> type[CallParser] | None:
    """Return the parser of this name, or None for harmony. Raises ExtensionRefused."""
    if name in PARSERS:
        return PARSERS[name]
    extension = TOOL_PARSERS.find(name)
    found: type[CallParser] | None = None if extension is None else extension.value
    return found


def parser_factory(name: str | None, schemas: Mapping[str, Mapping[str, Any]]) -> Callable[[], CallParser] | None:
    """Return a function that makes a new parser of this name for a request with these functions, or None for None and
    harmony. Raises ExtensionRefused.
    """
    found = None if name is None else find_parser(name)
    if found is None:
        return None

    def new_parser() -> CallParser:
        parser = found()
        parser.schemas = schemas
        return parser

    return new_parser
