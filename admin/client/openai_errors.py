"""What an OpenAI API's error says, as text that is safe to show."""

from __future__ import annotations

import json
from typing import Any

from loramux.admin.client.safe_text import safe_text

MAX_SHOWN = 500
"""Longest error text, in characters."""


def error_text(status: int, body: bytes) -> str:
    """Return the message of an error's body. Other bodies are shown as they are, after the status."""
    message = _message(body)
    if message is None:
        shown = " ".join(body[: 4 * MAX_SHOWN].decode(errors="replace").split())
        message = f"the server returned {status}" + (f": {shown}" if shown else "")
    return safe_text(message)[:MAX_SHOWN]


def _message(body: bytes) -> str | None:
    try:
        document: Any = json.loads(body)
        error = document["error"]
        return str(error["message"] if isinstance(error, dict) else error)
    except (ValueError, KeyError, TypeError, RecursionError):
        return None
