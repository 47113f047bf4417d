"""What one grammar may take, so that a stranger's cannot hold up its neighbours."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from llguidance import LLParserLimits

MAX_LEXER_STATES = 20_000
"""Most states of a grammar's lexer, of 1 to 2 kB each."""

STACK_BYTES = 256 << 20
"""Stack of the thread that compiles grammars. The compiler recurses once per nested rule. Memory is taken only as deep
as the stack is used."""


def parser_limits() -> LLParserLimits:
    """The limits of compiling a grammar and of each of its masks."""
    from llguidance import LLParserLimits

    # Messages are shown to the tenant, who knows the grammar; the parser's state would only lengthen them.
    return LLParserLimits(max_lexer_states=MAX_LEXER_STATES, verbose_errors=False)
