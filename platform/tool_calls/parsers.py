"""The parsers of tool calls in text."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from types import MappingProxyType

from loramux.adapter_store.extensions import ExtensionKind
from loramux.adapter_store.formats.version_files.answer_parsers import AUTO, OFF
from loramux.adapter_store.formats.version_files.answer_parsers import PARSERS as NAMES
from loramux.platform.tool_calls.call_parser import CallParser
from loramux.platform.tool_calls.call_syntax import CallSyntax
from loramux.platform.tool_calls.gemma import FunctionGemmaParser, Gemma4Parser
from loramux.platform.tool_calls.hermes import HermesParser
from loramux.platform.tool_calls.llama3_json import Llama3JsonParser
from loramux.platform.tool_calls.mistral import MistralParser
from loramux.platform.tool_calls.phi import PhiParser
from loramux.platform.tool_calls.pythonic import PythonicParser

PARSERS: Mapping[str, type[CallParser]] = MappingProxyType(
    {
        "functiongemma": FunctionGemmaParser,
        "gemma4": Gemma4Parser,
        "hermes": HermesParser,
        "llama3_json": Llama3JsonParser,
        "mistral": MistralParser,
        "phi": PhiParser,
        "pythonic": PythonicParser,
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
