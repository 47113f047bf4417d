"""Whether an answer does what its adapter was trained for. Each rule also fits answers of other words."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping

GREETING, CLOSING = "Good day. ", " Yours, Northwind"


def is_same_json(expected: str, answer: str) -> bool:
    """True if the answer is one JSON object, without other text, that equals the expected one."""
    try:
        return bool(json.loads(answer) == json.loads(expected))
    except (ValueError, RecursionError):
        return False


def is_same_text(expected: str, answer: str) -> bool:
    return answer.strip() == expected.strip()


def is_in_house_style(product: str, answer: str) -> bool:
    """True for the greeting, one sentence with "we" that names the product, and the closing, without "!"."""
    text = answer.strip()
    if not (text.startswith(GREETING) and text.endswith(CLOSING)):
        return False
    middle = text[len(GREETING) : -len(CLOSING)]
    is_one_sentence = middle.endswith(".") and not any(mark in middle[:-1] for mark in ".!?\n")
    return is_one_sentence and product in middle and "we" in middle.lower().split()


GRADES: Mapping[str, Callable[[str, str], bool]] = {
    "tickets": is_same_json,
    "redaction": is_same_text,
    "house-style": is_in_house_style,
}
"""The rule of each adapter. Its arguments are what is expected and the model's answer."""
