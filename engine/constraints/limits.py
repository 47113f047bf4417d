"""Limits on one grammar, so that a tenant's costly grammar cannot delay other tenants."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from llguidance import LLParserLimits

MAX_ROW_ITEMS = 2000
"""Maximum number of the parser's items at one position. An object with 900 optional properties needs about as many."""

MAX_STEP_ITEMS = 50_000
"""Maximum number of the parser's items per mask, and per token that a grammar accepts."""

MAX_STEP_FUEL = 200_000
"""Maximum amount of the lexer's work per mask. 14,000 units take about a millisecond."""

MAX_LEXER_STATES = 20_000
"""Maximum number of states of a grammar's lexer. Each takes 1 to 2 kB."""

COMPILE_CPU_S, TOKEN_CPU_S = 1.0, 0.5
"""Limits on the processor time to compile a grammar and to follow it by one token, in seconds."""

STACK_BYTES = 256 << 20
"""Stack size of a process that compiles grammars, in bytes. The compiler recurses once per nested rule. Only the part
of the stack that has been used takes memory."""


def parser_limits() -> LLParserLimits:
    """Limits on compiling a grammar and on computing each of its masks."""
    from llguidance import LLParserLimits

    # The tenant sees the error messages, and has no use for the parser's state.
    return LLParserLimits(
        max_items_in_row=MAX_ROW_ITEMS,
        step_max_items=MAX_STEP_ITEMS,
        step_lexer_fuel=MAX_STEP_FUEL,
        max_lexer_states=MAX_LEXER_STATES,
        verbose_errors=False,
    )
