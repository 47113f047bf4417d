"""Says in plain words why a grammar failed. Texts of llguidance that are not known to suit a tenant are replaced."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from llguidance import LLMatcher

UNUSABLE = "the grammar cannot be used"
"""Replaces texts about the library's internals, such as panics."""

MAX_CHARS = 500
"""Longest problem, in characters."""

_MAX_REGEX_CHARS = 100
"""Longest part of a regular expression that a problem repeats, in characters."""

_PLACE = re.compile(r"(?:at )?(\d+)\((\d+)\): |(at EOF): ")
_WRAPPING = re.compile(r"(?:(?:[Pp]arser [Ee]rror|lexer error|failed to compile JSON schema): )*")
_REGEX = re.compile(r'invalid regex "((?:[^"\\]|\\.)*)" \(in [^)]*\): ')
_CARETS = re.compile(r"^ {4}( *)\^+$", re.MULTILINE)

_LIMITS = {
    "at one position, it can continue in too many ways": r"Current row has \d+ items|Too many items \(limit",
    "its regular expressions and terminals need too many states": r"too many states: ",
    "its regular expressions and terminals are too large": (
        r"too many expressions constructed|maximum relevance check fuel|fuel exhausted|lexer precomputation failed"
        r"|initial lexer configuration|class too large|Unable to determine if regex is empty|DNF too large"
        r"|[Cc]ompiled regex exceeds size limit|Pattern exceeds"
    ),
    "it has too many rules": r"grammar size |schema too large",
    "it is nested too deeply": (
        r"lark grammar too deeply nested|recursion limit exceeded|Schema intersection stack level"
        r"|exceed(ed)? the maximum number of nested"
    ),
}
"""The limits that a grammar can exceed, and the library's texts about them."""

_REWORDED = {
    r"oneOf constraints are not supported.*": "oneOf is supported only if its schemas cannot overlap; use anyOf",
    r"lookarounds not supported yet.*": "look-around, word boundaries and anchors are not supported here",
    r"Resource ('[^']*') is not present in a registry.*": r"the reference to \1 is outside the schema",
    r"Unsatisfiable schema: Regex is empty.*": "Unsatisfiable schema: no string matches a pattern",
    r"(unknown special token: .*?); following special tokens are available.*": r"\1",
    r"Expected f64 for (.*)": r"Expected number for \1",
    r"lexer error": "unrecognized text",
}
"""Texts that speak of the library's options or internals, and their replacements."""

_KNOWN = re.compile(
    # A syntax error in a Lark or GBNF grammar.
    r"unknown (name|grammar|special token): |unknown grammar @|Unknown (common regex|attribute): "
    r"|circular reference in token |duplicate (rule|token)|rule .* (not found|is parametric|is not parametric)"
    r"|no \S+ rule found|failed to parse \S+: |no fields set on %regex|only one field can be set on %regex"
    r"|Expected |expected |expecting |invalid (range|token range)|unsupported operator"
    r"|Invalid token range|Token range end too large|empty token range|range (start|end) must|ranges not supported"
    r"|number \d+ is too large|End number in range|Unmatched %lark|Unexpected (expression|condition) "
    r"|Failed to convert the grammar from GBNF to Lark: |.* (cannot be used in terminals|not supported yet)$"
    r"|.*-flag is not supported|.* is only supported for |negat(ed|ion) .* is not supported|.* cannot be used together$"
    # An unsupported or contradictory schema.
    r"|Unimplemented keys: |Unsatisfiable schema: |Invalid type: |Unknown format: |Pointer '.*' does not exist"
    r"|Definition not found: |\S+ must be an? |Value .* is too large|Value for 'multipleOf' |invalid multiple of"
    r"|circular references with sibling keys|patternProperty regexes |can't determine if patternProperty"
    r"|\$id is supported only|no value satisfies|oneOf is supported|the reference to "
    # A regular expression that this library does not support.
    r"|look-around, |unrecognized text$",
    re.DOTALL,
)


def problem_of(matcher: LLMatcher) -> str:
    """Describe in one line why a matcher failed."""
    return plain_problem(matcher.get_error())


def plain_problem(text: str) -> str:
    """Describe in one line the problem that a text of the library reports, with its position in the grammar."""
    place = _PLACE.match(text)
    problem = _without_place(text[place.end() :] if place else text)[:MAX_CHARS]
    if place is None:
        return problem
    return f"{'at the end' if place[3] else f'line {place[1]}, column {place[2]}'}: {problem}"


def _without_place(text: str) -> str:
    body = text[_WRAPPING.match(text).end() :]  # type: ignore[union-attr] # it matches an empty string too
    regex = _REGEX.match(body)
    if regex is not None:
        shown = regex[1] if len(regex[1]) <= _MAX_REGEX_CHARS else regex[1][:_MAX_REGEX_CHARS] + "..."
        return f'invalid regex "{shown}": {_without_place(body[regex.end() :])}'
    for limit, texts in _LIMITS.items():
        if re.match(texts, body):
            return f"the grammar is too complex: {limit}"
    if body.startswith("regex parse error:"):
        return _regex_problem(body)
    first = body.partition("\n")[0]
    for old, new in _REWORDED.items():
        first = re.sub(f"^{old}$", new, first)
    return first if _KNOWN.match(first) else UNUSABLE


def _regex_problem(text: str) -> str:
    """Return the error of regex-syntax, which follows the pattern and a line that marks the position."""
    shown, found, error = text.partition("\nerror: ")
    if not found:
        return UNUSABLE
    error = error.partition("\n")[0]
    carets = _CARETS.search(shown)
    return error if carets is None else f"{error} (character {len(carets[1]) + 1})"
