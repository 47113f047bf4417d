"""The token that tells gpt-oss's harmony format from others."""

from __future__ import annotations

HARMONY_CHANNEL = "<|channel|>"
"""Precedes the channel of a message, in answers and in the templates of gpt-oss."""
