"""The servers that the harness started, as a suite's process sees them."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass

STAND = "STRANGERS_STAND"
"""The environment variable with one JSON object per base, by name."""


@dataclass(frozen=True)
class ServedBase:
    host: str
    port: int
    key: str
    folder: str
    """The base's directory."""
    model: str
    adapter: str
    adapter_folder: str
    context: int
    vocabulary: int
    classifiers: dict[str, str]
    """The adapter with each number of classes."""


def served_base(name: str) -> ServedBase:
    """Return the base `chat`, which only answers, the same with more in its answers (`telling`) or with a context of
    100 tokens (`chat-100`), or `tools`, which thinks and calls functions.
    """
    return ServedBase(**json.loads(os.environ[STAND])[name])


def is_served(name: str) -> bool:
    return name in json.loads(os.environ[STAND])
