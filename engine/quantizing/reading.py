"""The text on which the quality of a quantised model is measured."""

from __future__ import annotations

from pathlib import Path

MAX_TOKENS = 512
"""Number of tokens of the text that are read, so that the measurement takes only seconds."""


def reading_text() -> str:
    """About 1,150 words of plain English prose, with a few lines of code."""
    return Path(__file__).with_suffix(".txt").read_text(encoding="utf-8")
