"""The parsers that the tests of all formats run against: the built-in ones, or one of an extension."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from loramux.platform.tool_calls.call_parser import CallParser
from loramux.platform.tool_calls.call_syntax import SYNTAXES
from loramux.platform.tool_calls.grammar import Calls, OfferedTool, added_layout
from loramux.platform.tool_calls.parsers import PARSERS, parser_factory

EXTENSION = os.environ.get("LORAMUX_TEST_TOOL_PARSER")
"""The name of an extension's parser. It replaces the parsers of loramux."""

FORMATS = [*PARSERS] if EXTENSION is None else [EXTENSION]
IDS = [*PARSERS] if EXTENSION is None else ["extension"]


def new_parser(format_name: str, schemas: Mapping[str, Mapping[str, Any]] | None = None) -> CallParser:
    factory = parser_factory(format_name, schemas or {})
    assert factory is not None
    return factory()


def calls_of(format_name: str, tools: tuple[OfferedTool, ...], *, is_forced: bool, is_parallel: bool) -> Calls:
    layout = added_layout(format_name)
    return Calls(format_name, tools, is_forced=is_forced, is_parallel=is_parallel, layout=layout)


def written_call(format_name: str, name: str, arguments: str) -> str:
    """Return a call as the format's grammar writes it."""
    layout = added_layout(format_name)
    syntax = SYNTAXES[format_name] if layout is None else layout.syntax
    marker, block = next(iter(syntax.blocks.items()))
    call = f"{syntax.before_arguments.replace('NAME', name)}{arguments}{syntax.after_arguments}"
    return f"{marker}{block.before}{call}{block.after}{block.end}"
