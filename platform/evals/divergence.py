"""The KL divergence between two forms of a model, from the log-probabilities of a text's tokens."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from loramux.engine.protocol.messages import PromptLogprob

_SMALLEST = 1e-9
"""Smaller probabilities are raised to this, so that their logarithms are finite."""
_LOG_SMALLEST = math.log(_SMALLEST)


def mean_divergence(exact: Sequence[PromptLogprob], other: Sequence[PromptLogprob]) -> float | None:
    """Return the mean divergence of `other` from `exact` over the positions of a text, in nats, or None without one.

    At each position, only the tokens that both name are told apart, and all others count as one. The result is
    therefore at most the divergence over the whole vocabulary, by the data processing inequality.
    """
    if not exact:
        return None
    return sum(map(_divergence, map(_named, exact), map(_named, other))) / len(exact)


def _named(scored: PromptLogprob) -> dict[int, float]:
    named = {scored.token_id: scored.logprob, **dict(scored.top)}
    return {token: max(logprob, _LOG_SMALLEST) for token, logprob in named.items()}


def _divergence(exact: Mapping[int, float], other: Mapping[int, float]) -> float:
    both = exact.keys() & other.keys()
    rests = [max(_SMALLEST, 1.0 - sum(math.exp(named[token]) for token in both)) for named in (exact, other)]
    pairs = [(exact[token], other[token]) for token in both] + [(math.log(rests[0]), math.log(rests[1]))]
    # Rounding can make the sum slightly negative.
    return max(0.0, sum(math.exp(p) * (p - q) for p, q in pairs))
