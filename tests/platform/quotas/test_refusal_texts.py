from __future__ import annotations

from loramux.platform.periods import NO_WINDOW
from loramux.platform.quotas.counters import Counter
from loramux.platform.quotas.decisions import PolicyVerdict, QuotaExceeded, RequestTooLarge
from loramux.platform.quotas.policies import QuotaPolicy
from loramux.platform.quotas.rules import Binding


def _verdict(metric: str, limit: int, cost: int) -> PolicyVerdict:
    policy = QuotaPolicy("qta_1", "tenant", "ten_1", "ten_1", metric, "hard", limit, limit, 0, 0)
    return PolicyVerdict(
        Binding.of(policy, "ten_1", NO_WINDOW), Counter(0, 0, 0, 0, 0), cost, never_admits=False, wait_us=1
    )


def test_refusals_name_money_in_the_currency_and_bytes_in_their_unit() -> None:
    spent = QuotaExceeded(_verdict("cost_per_month", 5_000_000_000, 6_250_000_000)).message
    assert "limit of 5.00" in spent
    assert "would reserve 6.25" in spent
    assert "000" not in spent
    large = RequestTooLarge(_verdict("cost_per_month", 5_000_000_000, 6_250_000_000)).message
    assert "may cost 6.25," in large
    assert "at most 5.00 at once" in large
    assert "nanos" not in large
    assert "1.5 GiB" in QuotaExceeded(_verdict("adapter_bytes", 3 << 29, 1 << 30)).message
    assert "may use 2,000 tokens" in RequestTooLarge(_verdict("tokens_per_day", 1000, 2000)).message
