"""Validates requests before they can reach a kernel."""

from __future__ import annotations

from dataclasses import dataclass

from loramux.engine.drafting.text_index import MAX_PLACES
from loramux.engine.protocol.messages import POOLINGS, Add, SamplingParams, ThinkingBudget
from loramux.engine.protocol.service_tiers import SERVICE_TIERS
from loramux.kernels.layout import MAX_EXTRA_TOKENS

MAX_BIASED_TOKENS = 300
MAX_BIAS = 100.0
MAX_PENALTY = 2.0
MAX_ALLOWED_TOKENS = 1024
MAX_BAD_WORDS = 64
"""Maximum number of bad words. Each has up to two spellings."""
MAX_LOGPROB_TOKEN_IDS = 128
MAX_PREDICTION_TOKENS = 2 * MAX_PLACES
"""Longest prediction, in tokens. An index of its places covers all of it."""
MAX_PROMPT_LOGPROBS = 5
"""Maximum number of most likely tokens reported for each prompt token."""
REPETITION_PENALTIES = (0.01, 100.0)
"""Bounds of the repetition penalty, far beyond practical values. Within them, logits of ordinary magnitude stay finite.
"""


@dataclass(frozen=True, slots=True)
class EngineLimits:
    """Limits set by the model and the operator. They do not include the pool's limits, which depend on pins."""

    vocab_size: int
    max_model_len: int
    eos_token_ids: tuple[int, ...]
    page_tokens: int
    max_waiting_tokens: int = 1 << 62
    """Limit on the tokens (prompt plus grant) of all waiting requests. See `FairQueue.shed_candidate`."""
    max_waiting_s: float = float("inf")
    """Longest time that a request may wait for its first step, in seconds."""
    max_pinned_share: float = 0.5
    """Largest share of the pool's pages, and of the slots, that pinned adapters may take."""
    generates: bool = True
    """False if the base makes only embeddings, because it was saved without a head for tokens."""


def request_problem(add: Add, limits: EngineLimits, max_pool_tokens: int) -> tuple[str, str] | None:
    """Error code and message if a request can never run, or None. The pool has room for `max_pool_tokens` tokens."""
    if add.pooling is None and not limits.generates:
        return "wrong_task", "the base was saved without a head for tokens: call /v1/embeddings"
    if add.pooling is not None:
        problem = _pooling_problem(add)
        if problem is not None:
            return "invalid_request", problem
    elif not add.prompt or add.max_tokens < 1:
        return "invalid_request", "the prompt must not be empty, and max_tokens must be at least 1"
    vocab_size = limits.vocab_size if add.vocab_size is None else add.vocab_size
    if not 0 < vocab_size <= limits.vocab_size + MAX_EXTRA_TOKENS or (add.vocab_size and add.digest is None):
        return "invalid_request", "vocab_size must be the size of the adapter's vocabulary, and null without an adapter"
    if not all(0 <= token < vocab_size for token in add.prompt):
        return "invalid_request", f"token ids must be in [0, {vocab_size})"
    if not 0 <= add.activation < len(add.prompt) or (add.activation and add.digest is None):
        return "invalid_request", "activation must be a position in the prompt, and 0 without an adapter"
    if add.num_labels is not None and (add.num_labels < 1 or add.digest is None or add.pooling != "last"):
        return (
            "invalid_request",
            "num_labels must be at least 1, and needs an adapter and the last token's pooling",
        )
    if len(add.prediction) > MAX_PREDICTION_TOKENS:
        return "invalid_request", f"a prediction must have at most {MAX_PREDICTION_TOKENS} tokens"
    if add.prediction and not 0 <= min(add.prediction) <= max(add.prediction) < vocab_size:
        return "invalid_request", f"the token ids of a prediction must be in [0, {vocab_size})"
    if not 0 <= add.pause_s < float("inf"):
        return "invalid_request", "pause_s must be finite and not negative"
    if add.service_tier not in SERVICE_TIERS:
        return "invalid_request", f"service_tier must be one of {', '.join(SERVICE_TIERS)}"
    if add.host_floor_bytes < 0:
        return "invalid_request", "host_floor_bytes must not be negative"
    problem = sampling_problem(add.sampling, vocab_size)
    if problem is not None:
        return "invalid_request", problem
    total = len(add.prompt) + add.max_tokens
    if total > limits.max_model_len:
        return "prompt_too_long", f"{total} tokens exceed the context of {limits.max_model_len}"
    if total > max_pool_tokens:
        return "request_too_large", "the request needs more pages than the pool can provide"
    return None


def _pooling_problem(add: Add) -> str | None:
    if add.pooling not in POOLINGS:
        return f"pooling must be one of {', '.join(POOLINGS)}"
    if not add.prompt or add.max_tokens:
        return "the prompt must not be empty, and max_tokens must be 0 if the prompt is pooled"
    if add.grammar or add.sampling.num_prompt_logprobs is not None or add.sampling.thinking is not None:
        return "a pooled prompt has neither a grammar, nor log-probabilities, nor a limit on thinking"
    return None


def sampling_problem(params: SamplingParams, vocab_size: int) -> str | None:
    """The problem with these settings for a vocabulary of `vocab_size` tokens, beginning with a field's name, or None.

    If the result is None, kernels can use every token id in the settings as an index.
    """
    low, high = REPETITION_PENALTIES
    # Comparisons with NaN are false, so NaN fails every check.
    checks = {
        "temperature must be finite and not negative": 0 <= params.temperature < float("inf"),
        "top_p must be in [0, 1]": 0 <= params.top_p <= 1,
        "top_k must be in [0, 2147483647]": 0 <= params.top_k < 2**31,
        "min_p must be in [0, 1]": 0 <= params.min_p <= 1,
        f"repetition_penalty must be in [{low:g}, {high:g}]": low <= params.repetition_penalty <= high,
        f"presence_penalty must be within ±{MAX_PENALTY:g}": abs(params.presence_penalty) <= MAX_PENALTY,
        f"frequency_penalty must be within ±{MAX_PENALTY:g}": abs(params.frequency_penalty) <= MAX_PENALTY,
        "num_logprobs must be null or not negative": params.num_logprobs is None or params.num_logprobs >= 0,
        f"num_prompt_logprobs must be null or in [0, {MAX_PROMPT_LOGPROBS}]": (
            0 <= (params.num_prompt_logprobs or 0) <= MAX_PROMPT_LOGPROBS
        ),
        f"logprob_token_ids must have at most {MAX_LOGPROB_TOKEN_IDS} entries": (
            len(params.logprob_token_ids) <= MAX_LOGPROB_TOKEN_IDS
        ),
        f"logprob_token_ids must be in [0, {vocab_size})": all(0 <= i < vocab_size for i in params.logprob_token_ids),
        "min_tokens must not be negative": params.min_tokens >= 0,
        f"stop_token_ids must be in [0, {vocab_size})": all(0 <= one < vocab_size for one in params.stop_token_ids),
        f"logit_bias must have at most {MAX_BIASED_TOKENS} entries": len(params.logit_bias) <= MAX_BIASED_TOKENS,
        f"logit_bias token ids must be in [0, {vocab_size})": all(0 <= i < vocab_size for i, _ in params.logit_bias),
        "logit_bias must not repeat a token": len({i for i, _ in params.logit_bias}) == len(params.logit_bias),
        f"logit_bias must be within ±{MAX_BIAS:g}": all(abs(value) <= MAX_BIAS for _, value in params.logit_bias),
        f"allowed_token_ids must have at most {MAX_ALLOWED_TOKENS} entries": (
            len(params.allowed_token_ids) <= MAX_ALLOWED_TOKENS
        ),
        f"bad_words must have at most {2 * MAX_BAD_WORDS} spellings": len(params.bad_words) <= 2 * MAX_BAD_WORDS,
        "bad_words must not contain an empty spelling": all(params.bad_words),
        f"thinking must have a budget of at least 0 and marker tokens in [0, {vocab_size})": (
            params.thinking is None or _is_usable(params.thinking, vocab_size)
        ),
        f"bad_words token ids must be in [0, {vocab_size})": all(
            0 <= i < vocab_size for word in params.bad_words for i in word
        ),
        f"allowed_token_ids must be in [0, {vocab_size})": all(0 <= i < vocab_size for i in params.allowed_token_ids),
    }
    return next((rule for rule, is_kept in checks.items() if not is_kept), None)


def _is_usable(budget: ThinkingBudget, vocab_size: int) -> bool:
    ids = (*budget.begin, *budget.end)
    return budget.num_tokens >= 0 and bool(budget.begin and budget.end) and all(0 <= i < vocab_size for i in ids)
