"""The signatures of thinking blocks, which Anthropic's clients send back together with the blocks.

A signature begins with a digest of the model's thinking, so a block that was changed, cut or made by another server is
noticed. It is no secret: a client may write any reasoning into a conversation, as it may with chat completions. If the
thinking was left out of the answer (`display: "omitted"`), the signature also carries it, so that the model sees it
again in the next request although the server keeps nothing.
"""

from __future__ import annotations

import base64
import binascii
import hashlib

_DIGEST_BYTES = 16
_PURPOSE = b"loramux thinking"


def sign(thinking: str, *, is_omitted: bool = False) -> str:
    """Return the signature of a block. With `is_omitted`, the block is sent without its text."""
    text = thinking.encode()
    return base64.b64encode(_digest(text) + (text if is_omitted else b"")).decode()


def signed_thinking(thinking: str, signature: str) -> str | None:
    """Return the thinking of a block that a client sent back, or None if the signature does not belong to it."""
    try:
        raw = base64.b64decode(signature, validate=True)
        digest, carried = raw[:_DIGEST_BYTES], raw[_DIGEST_BYTES:].decode()
    except (binascii.Error, ValueError):
        return None
    if carried and thinking:
        return None
    text = carried or thinking
    return text if digest == _digest(text.encode()) else None


def _digest(text: bytes) -> bytes:
    return hashlib.blake2b(text, digest_size=_DIGEST_BYTES, person=_PURPOSE).digest()
