"""Text of a model or a server, made safe for a terminal."""

from __future__ import annotations

import unicodedata
from collections.abc import Callable

REPLACED = frozenset({"Cc", "Cf", "Cs"})
"""Unicode's categories of control, format and surrogate characters."""

KEPT = frozenset("\n\t\u200c\u200d")
"""Line breaks, tabs, and the joiners of scripts and emoji."""


def safe_text(text: str) -> str:
    """Replace characters with which text could control a terminal or hide its order.

    These are control, format and surrogate characters, such as ESC, the 8-bit CSI and the bidirectional overrides. Each
    becomes U+FFFD, except for the carriage return, which is dropped.
    """
    if text.isascii() and text.isprintable():
        return text
    return replace_unsafe(text.replace("\r", ""), lambda _: "\ufffd")


def replace_unsafe(text: str, replacement: Callable[[str], str]) -> str:
    unsafe = {ord(one): replacement(one) for one in set(text) if not _is_safe(one)}
    return text.translate(unsafe) if unsafe else text


def _is_safe(character: str) -> bool:
    return character in KEPT or unicodedata.category(character) not in REPLACED
