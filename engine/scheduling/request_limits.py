"""What a request is checked against before it can reach a kernel."""

from __future__ import annotations

from dataclasses import dataclass

from loramux.engine.messages import Add, SamplingParams, is_duration

MAX_BIASED_TOKENS = 300
MAX_BIAS = 100.0
MAX_PENALTY = 2.0
REPETITION_PENALTIES = (0.01, 100.0)
"""Wider than any use, and narrow enough to keep every logit of a sane model finite."""


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


def sampling_problem(params: SamplingParams, vocab_size: int) -> str | None:
    """Why these settings cannot be used with a model of `vocab_size` tokens, beginning with the field; else None.

    Every token id in them is one that a kernel may use as an index once this says None.
    """
    low, high = REPETITION_PENALTIES
    # No comparison with NaN holds.
    checks = {
        "temperature is a finite number from 0": 0 <= params.temperature < float("inf"),
        "top_p lies in 0 to 1": 0 <= params.top_p <= 1,
        "top_k lies in 0 to 2147483647": 0 <= params.top_k < 2**31,
        "min_p lies in 0 to 1": 0 <= params.min_p <= 1,
        f"repetition_penalty lies in {low:g} to {high:g}": low <= params.repetition_penalty <= high,
        f"presence_penalty lies in {-MAX_PENALTY:g} to {MAX_PENALTY:g}": abs(params.presence_penalty) <= MAX_PENALTY,
        f"frequency_penalty lies in {-MAX_PENALTY:g} to {MAX_PENALTY:g}": abs(params.frequency_penalty) <= MAX_PENALTY,
        "num_logprobs is none or a number from 0": params.num_logprobs is None or params.num_logprobs >= 0,
        "min_tokens is a number from 0": params.min_tokens >= 0,
        f"stop_token_ids lie in 0 to {vocab_size - 1}": all(0 <= one < vocab_size for one in params.stop_token_ids),
        f"logit_bias has at most {MAX_BIASED_TOKENS} entries": len(params.logit_bias) <= MAX_BIASED_TOKENS,
        f"logit_bias names token ids in 0 to {vocab_size - 1}": all(0 <= i < vocab_size for i, _ in params.logit_bias),
        "logit_bias names each token once": len({i for i, _ in params.logit_bias}) == len(params.logit_bias),
        f"logit_bias adds {-MAX_BIAS:g} to {MAX_BIAS:g}": all(abs(value) <= MAX_BIAS for _, value in params.logit_bias),
    }
    return next((rule for rule, is_kept in checks.items() if not is_kept), None)
