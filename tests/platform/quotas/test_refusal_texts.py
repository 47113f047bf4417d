from __future__ import annotations

from loramux.platform.periods import NO_WINDOW
from loramux.platform.quotas.decisions import QuotaExceeded, RequestTooLarge
from loramux.platform.quotas.policies import QuotaPolicy
from loramux.platform.quotas.rules import Binding


def _binding(metric: str, limit: int) -> Binding:
    policy = QuotaPolicy("qta_1", "tenant", "ten_1", "ten_1", metric, "hard", limit, limit, 0, 0)
    return Binding.of(policy, "ten_1", NO_WINDOW)


def test_refusals_name_money_in_the_currency_and_bytes_in_their_unit() -> None:
    money = _binding("cost_per_month", 5_000_000_000)
    assert "5.00" in QuotaExceeded(money, 1).message
    assert "5000000000" not in QuotaExceeded(money, 1).message
    large = RequestTooLarge(money, 6_250_000_000).message
    assert "may cost 6.25," in large
    assert "at most 5.00 at once" in large
    assert "nanos" not in large
    assert "1.5 GiB" in QuotaExceeded(_binding("adapter_bytes", 3 << 29), 1).message
    assert "may use 2,000 tokens" in RequestTooLarge(_binding("tokens_per_day", 1000), 2000).message
