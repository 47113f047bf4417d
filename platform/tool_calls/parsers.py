"""The parsers of tool calls in text."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from loramux.platform.tool_calls.call_parser import CallParser
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
