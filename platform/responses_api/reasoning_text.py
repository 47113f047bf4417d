"""The form in which a client that keeps only `encrypted_content` sends the model's reasoning back.

The text is encoded and not encrypted, because the same answer shows it. A client must treat it as opaque.
"""

from __future__ import annotations

import base64
import binascii

_MARK = "lmxr1."


def sealed(text: str) -> str:
    return _MARK + base64.urlsafe_b64encode(text.encode()).decode()


def opened(sent: str) -> str:
    """Return the reasoning, or "" for a value that `sealed` did not return."""
    if not sent.startswith(_MARK):
        return ""
    try:
        return base64.b64decode(sent[len(_MARK) :], b"-_", validate=True).decode()
    except (binascii.Error, UnicodeError, ValueError):
        return ""
