"""What a request is checked against before it can reach a kernel."""

from __future__ import annotations

import math
from dataclasses import dataclass

from loramux.engine.messages import Add
from loramux.engine.sampling_limits import sampling_problem


@dataclass(frozen=True, slots=True)
class EngineLimits:
    """The model's and the operator's bounds; those of the pool are the scheduler's."""

    vocab_size: int
    max_model_len: int
    eos_token_ids: tuple[int, ...]
    page_tokens: int
    max_waiting_tokens: int = 1 << 62
    """Prompts and grants that may wait in all; beyond, the share with most waiting for its weight loses its newest."""
    max_waiting_s: float = float("inf")
    """How long a request may wait for its first step."""
    max_pinned_share: float = 0.5
    """Of the pool's pages and of its slots, each: what pinned adapters may take at most."""


def request_problem(add: Add, limits: EngineLimits, max_pool_tokens: int) -> tuple[str, str] | None:
    """The code and reason why a request can never run, else None; the pool can hold `max_pool_tokens` for it."""
    if not add.prompt or add.max_tokens < 1:
        return "invalid_request", "a prompt of at least one token and at least one new token are needed"
    if not all(0 <= token < limits.vocab_size for token in add.prompt):
        return "invalid_request", f"token ids must lie in [0, {limits.vocab_size})"
    if not is_duration(add.timeout_s) or not is_duration(add.pause_s):
        return "invalid_request", "timeout_s and pause_s must be finite and not negative"
    if add.host_floor_bytes < 0:
        return "invalid_request", "host_floor_bytes must not be negative"
    problem = sampling_problem(add.sampling, limits.vocab_size)
    if problem is not None:
        return "invalid_request", problem
    total = len(add.prompt) + add.max_tokens
    if total > limits.max_model_len:
        return "prompt_too_long", f"{total} tokens exceed the context of {limits.max_model_len}"
    if total > max_pool_tokens:
        return "request_too_large", "the request needs more pages than the pool has for it"
    return None


def is_duration(seconds: float | None) -> bool:
    """Whether a timer can be set by it; None is no timer."""
    return seconds is None or (math.isfinite(seconds) and seconds >= 0)
