"""The tokens that activate an activated LoRA (aLoRA, arXiv:2504.12397), as PEFT stores them in its configuration."""

from __future__ import annotations

import sys
from collections.abc import Sequence

INVOCATION_KEY = "alora_invocation_tokens"
"""The key in PEFT's configuration."""

MAX_INVOCATION_TOKENS = 256
MAX_TOKEN_ID = sys.maxunicode
"""Exclusive upper bound on token IDs: prompts are searched as text, with one character per token."""


def check_invocation_tokens(token_ids: Sequence[int]) -> None:
    """Raise ValueError for an invalid token ID, or for more than `MAX_INVOCATION_TOKENS`. An empty list is valid."""
    if len(token_ids) > MAX_INVOCATION_TOKENS:
        raise ValueError(f"{INVOCATION_KEY} must have at most {MAX_INVOCATION_TOKENS} token ids")
    if not all(0 <= token_id < MAX_TOKEN_ID for token_id in token_ids):
        raise ValueError(f"{INVOCATION_KEY} must contain token ids")
