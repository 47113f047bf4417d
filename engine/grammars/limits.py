"""Limits on one grammar, so that a tenant's costly grammar cannot delay other tenants."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from llguidance import LLParserLimits

MAX_LEXER_STATES = 20_000
"""Maximum number of states of a grammar's lexer. Each takes 1 to 2 kB."""

STACK_BYTES = 256 << 20
"""Stack size of the thread that compiles grammars, in bytes. The compiler recurses once per nested rule. Only the part
of the stack that has been used takes memory."""


def parser_limits() -> LLParserLimits:
    """Limits on compiling a grammar and on computing each of its masks."""
    from llguidance import LLParserLimits

    # The tenant sees the error messages, and has no use for the parser's state.
    return LLParserLimits(max_lexer_states=MAX_LEXER_STATES, verbose_errors=False)
