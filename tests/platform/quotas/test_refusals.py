from __future__ import annotations

import re
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from loramux.platform.ledger.prices import Price
from loramux.platform.periods import Window
from loramux.platform.quotas.counters import UNITS, Counter, CounterKey
from loramux.platform.quotas.decisions import QuotaExceeded, RequestTooLarge, decide
from loramux.platform.quotas.demand import PricedDemand
from loramux.platform.quotas.metrics import METRICS, Kind
from loramux.platform.quotas.policies import ADAPTER, QuotaPolicy
from loramux.platform.quotas.rules import Binding

NOW_US = 1_800_000_000_000_000
DAY = Window(NOW_US - 1, NOW_US + 86_400_000_000)
FITTING = re.compile(r"max_tokens (?:of|to) at most (\d+)")

Standing = tuple[Binding, Counter]


def standing(metric: str, limit: int, used: int = 0, reserved: int = 0, *, is_anothers: bool = False) -> Standing:
    scope, caller = (ADAPTER, "ten_caller") if is_anothers else ("tenant", "ten_owner")
    policy = QuotaPolicy(f"pol_{metric}_{scope}", scope, "ten_owner", "ten_owner", metric, "hard", limit, limit, 0, 0)
    binding = Binding(policy, METRICS[metric], CounterKey(policy.id, caller, 0), DAY)
    level = (limit - used) * UNITS if METRICS[metric].kind is Kind.RATE else 0
    return binding, Counter(level, reserved, used, 0, NOW_US)


def demand(prompt: int, max_tokens: int, num_sequences: int = 1, price: Price | None = None) -> PricedDemand:
    return PricedDemand.of_request(price, prompt, num_sequences * max_tokens, num_sequences)


def refusal(standings: Sequence[Standing], wanted: PricedDemand) -> str:
    counters = {binding.key: counter for binding, counter in standings}
    try:
        decide([binding for binding, _ in standings], counters, wanted, NOW_US)
    except (QuotaExceeded, RequestTooLarge) as error:
        return error.message
    return ""


def priced(prompt: int, completion: int) -> Price:
    return Price(
        id="",
        tenant_id=None,
        scope="all",
        currency="USD",
        prompt_nanos=prompt,
        cached_nanos=prompt,
        completion_nanos=completion,
        effective_us=0,
        created_us=0,
    )


@pytest.mark.parametrize(
    ("of", "wanted", "message"),
    [
        pytest.param(
            standing("tokens_per_day", 3000, 52),
            demand(42, 2948),
            "the tenant's limit of 3,000 for tokens_per_day leaves 2,948: 52 are used, running requests reserve 0, and "
            "this request would reserve 2,990; max_tokens of at most 2906 would fit now",
            id="budget with room",
        ),
        pytest.param(
            standing("tokens_per_month", 3000, 2000, 900),
            demand(40, 100, 3),
            "the tenant's limit of 3,000 for tokens_per_month leaves 100: 2,000 are used, running requests reserve "
            "900, and this request would reserve 340; max_tokens of at most 20 would fit now",
            id="several choices",
        ),
        pytest.param(
            standing("tokens_per_day", 3000, 3010),
            demand(42, 1),
            "the tenant's limit of 3,000 for tokens_per_day is reached: 3,010 are used, running requests reserve 0, "
            "and this request would reserve 43",
            id="spent budget",
        ),
        pytest.param(
            standing("tokens_per_minute", 1000, 700, 200),
            demand(60, 100),
            "the tenant's limit of 1,000 for tokens_per_minute leaves 100: running requests reserve 200, and this "
            "request would reserve 160; max_tokens of at most 40 would fit now",
            id="rate",
        ),
        pytest.param(
            standing("tokens_per_minute", 1000, 990),
            demand(60, 1),
            "the tenant's limit of 1,000 for tokens_per_minute leaves 10: running requests reserve 0, and this request "
            "would reserve 61",
            id="prompt alone is too long now",
        ),
        pytest.param(
            standing("tokens_per_minute", 1000),
            demand(60, 1000),
            "the request may use 1,060 tokens, but the tenant's tokens_per_minute admits at most 1,000 at once: set "
            "max_tokens to at most 940, or shorten the prompt",
            id="never",
        ),
        pytest.param(
            standing("tokens_per_minute", 1000),
            demand(1000, 1),
            "the request may use 1,001 tokens, but the tenant's tokens_per_minute admits at most 1,000 at once: "
            "shorten the prompt, or set or lower max_tokens",
            id="prompt alone is too long for ever",
        ),
        pytest.param(
            standing("requests_per_minute", 60, 60),
            demand(10, 10),
            "the tenant's limit of 60 for requests_per_minute is reached",
            id="requests",
        ),
        pytest.param(
            standing("tokens_per_day", 777, 52, is_anothers=True),
            demand(10, 750),
            "the adapter's limit for tokens_per_day is reached",
            id="another tenant's",
        ),
    ],
)
def test_refusal_says_what_is_used_what_is_asked_and_what_fits(
    of: Standing, wanted: PricedDemand, message: str
) -> None:
    assert refusal([of], wanted) == message


def test_suggestion_suits_every_limit() -> None:
    limits = [standing("tokens_per_day", 1000, 400), standing("tokens_per_month", 5000, 4500)]
    assert FITTING.findall(refusal(limits, demand(100, 600))) == ["400"]
    # Fewer tokens do not help against a limit on requests.
    limits.append(standing("concurrent_requests", 1, 0, 1))
    assert FITTING.findall(refusal(limits, demand(100, 600))) == []


def test_suggestion_does_not_reveal_another_tenants_limit() -> None:
    own, theirs = standing("tokens_per_day", 1000, 400), standing("tokens_per_month", 777, is_anothers=True)
    assert FITTING.findall(refusal([own, theirs], demand(100, 600))) == ["500"]
    theirs = standing("tokens_per_month", 500, is_anothers=True)
    assert FITTING.findall(refusal([own, theirs], demand(100, 390))) == []


def test_money_is_converted_to_tokens() -> None:
    price = priced(prompt=2_000_000, completion=6_000_000)
    # The prompt costs 200 nanos, and each token of the answer costs 6.
    of = standing("cost_per_day", 1000, 500)
    message = refusal([of], demand(100, 60, price=price))
    assert FITTING.findall(message) == ["49"]
    assert refusal([of], demand(100, 50, price=price)) == ""
    free = demand(100, 60, price=priced(prompt=20_000_000, completion=0))
    assert FITTING.findall(refusal([of], free)) == []


METRIC = st.sampled_from(["tokens_per_day", "tokens_per_minute", "cost_per_day", "tokens_per_month"])
AMOUNT = st.integers(0, 3000)


@settings(deadline=None)
@given(
    limits=st.dictionaries(METRIC, st.tuples(AMOUNT, AMOUNT, AMOUNT), min_size=1),
    prompt=st.integers(1, 500),
    max_tokens=st.integers(1, 2000),
    num_sequences=st.integers(1, 4),
    prices=st.tuples(st.integers(0, 10**7), st.integers(0, 10**7)),
)
def test_suggested_max_tokens_are_admitted(
    limits: dict[str, tuple[int, int, int]],
    prompt: int,
    max_tokens: int,
    num_sequences: int,
    prices: tuple[int, int],
) -> None:
    standings = [standing(metric, *amounts) for metric, amounts in limits.items()]
    price = priced(*prices)
    message = refusal(standings, demand(prompt, max_tokens, num_sequences, price))
    for found in map(int, FITTING.findall(message)):
        assert 0 < found < max_tokens
        if "at once" in message:
            standings = [standing(metric, limit) for metric, (limit, _, _) in limits.items()]
        assert refusal(standings, demand(prompt, found, num_sequences, price)) == ""
        if "cost_per_day" not in limits:
            assert refusal(standings, demand(prompt, found + 1, num_sequences, price))
