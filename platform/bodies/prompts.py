"""Prompts in a body: one or more, as text or token ids."""

from __future__ import annotations

from typing import Any

from loramux.platform.bodies.sampling_fields import INT64

MAX_PROMPTS = 2048
"""Maximum number of prompts in one body, as in OpenAI's API."""


def listed_prompts(value: Any) -> tuple[str | tuple[int, ...], ...]:
    """Normalise one or more prompts, given as text or token ids."""
    if isinstance(value, str):
        return (value,)
    if not isinstance(value, list):
        raise ValueError("a prompt must be a string, a list of strings, token ids, or a list of lists of token ids")
    if not value:
        raise ValueError("the prompt is empty")
    if _is_ids(value):
        return (tuple(value),)
    if not isinstance(value[0], int) and len(value) > MAX_PROMPTS:
        raise ValueError(f"at most {MAX_PROMPTS} prompts are allowed")
    if all(isinstance(item, str) for item in value):
        return tuple(value)
    if all(isinstance(item, list) and item and _is_ids(item) for item in value):
        return tuple(tuple(item) for item in value)
    raise ValueError("a list of prompts must contain only strings, or only non-empty lists of token ids")


def _is_ids(value: list[Any]) -> bool:
    return set(map(type, value)) <= {int} and (not value or (min(value) >= 0 and max(value) < INT64))
