"""`did you mean`: suggests the closest valid word."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """Return `: did you mean X?`, or an empty string if no known word is close."""
    close = difflib.get_close_matches(word, list(known), n=1, cutoff=0.7)
    return f": did you mean {close[0]}?" if close else ""
