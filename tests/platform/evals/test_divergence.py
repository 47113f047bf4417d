"""The divergence between two forms of a model, from the few tokens whose probabilities are known."""

from __future__ import annotations

import math
import random

import pytest

from loramux.engine.protocol.messages import PromptLogprob
from loramux.platform.evals.divergence import mean_divergence


def scored(probabilities: list[float], token: int, num_top: int) -> PromptLogprob:
    logprobs = [math.log(one) for one in probabilities]
    order = sorted(range(len(logprobs)), key=lambda one: -logprobs[one])
    top = tuple((one, logprobs[one]) for one in order[:num_top])
    return PromptLogprob(token, logprobs[token], 1 + order.index(token), top)


def random_distribution(dice: random.Random, size: int) -> list[float]:
    weights = [math.exp(dice.gauss(0, 2)) for _ in range(size)]
    return [weight / sum(weights) for weight in weights]


def whole(exact: list[float], other: list[float]) -> float:
    return sum(p * math.log(p / q) for p, q in zip(exact, other, strict=True))


def test_divergence_is_exact_if_all_tokens_are_known() -> None:
    dice = random.Random(0)
    pairs = [(random_distribution(dice, 6), random_distribution(dice, 6)) for _ in range(50)]
    found = mean_divergence([scored(p, 2, 6) for p, _ in pairs], [scored(q, 2, 6) for _, q in pairs])
    assert found == pytest.approx(sum(whole(p, q) for p, q in pairs) / len(pairs))


def test_divergence_is_at_most_that_over_the_whole_vocabulary() -> None:
    dice = random.Random(1)
    for _ in range(200):
        p, q = random_distribution(dice, 100), random_distribution(dice, 100)
        token = dice.randrange(100)
        found = mean_divergence([scored(p, token, 5)], [scored(q, token, 5)])
        assert found is not None
        assert 0 <= found <= whole(p, q) + 1e-9


def test_equal_forms_do_not_diverge() -> None:
    p = random_distribution(random.Random(2), 100)
    assert mean_divergence([scored(p, 7, 5)], [scored(p, 7, 5)]) == 0


def test_impossible_tokens_and_empty_texts() -> None:
    certain = PromptLogprob(3, 0.0, 1, ((3, 0.0), (4, -math.inf)))
    never = PromptLogprob(3, -math.inf, 2, ((4, 0.0), (3, -math.inf)))
    found = mean_divergence([certain], [never])
    assert found == pytest.approx(-math.log(1e-9), abs=1e-3)
    assert mean_divergence([], []) is None
