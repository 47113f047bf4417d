"""What sampling settings may be. The gateway refuses others by field, and an engine does not rely on that."""

from __future__ import annotations

from loramux.engine.messages import SamplingParams

MAX_BIASED_TOKENS = 300
MAX_BIAS = 100.0
MAX_PENALTY = 2.0
REPETITION_PENALTIES = (0.01, 100.0)
"""Wider than any use, and narrow enough to keep every logit of a sane model finite."""
LEAST_TEMPERATURE, MOST_TEMPERATURE = 1e-30, 1e20
"""Beyond these, float32 loses the temperature or what it divides. The sampling kernel has the same lower bound."""


def used_temperature(temperature: float) -> float:
    """The temperature that a token is drawn at; 0 stays greedy, and nothing else becomes so."""
    return min(max(temperature, LEAST_TEMPERATURE), MOST_TEMPERATURE) if temperature > 0 else 0.0


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
