from __future__ import annotations

from typing import Any

import pytest

from loramux.platform.telemetry.top_refusals import MAX_POLICIES, REFUSALS_WINDOW_S, TopRefusals

pytestmark = pytest.mark.anyio


async def test_metrics_count_answers_and_tokens_without_naming_anyone(gateway: Any) -> None:
    gateway.add_adapter("acme", "support")
    await gateway.openai.completions.create(model="support", prompt=[5, 6], max_tokens=3)
    await gateway.http.post("/v1/completions", json={"model": "nope", "prompt": "a"})
    await gateway.http.get("/" + "x" * 100)
    text = gateway.services.metrics.render().decode()
    for line in (
        'loramux_requests_total{endpoint="completions",status="200"} 1.0',
        'loramux_requests_total{endpoint="completions",status="404"} 1.0',
        'loramux_requests_total{endpoint="other",status="404"} 1.0',
        'loramux_tokens_total{kind="prompt"} 2.0',
        'loramux_tokens_total{kind="completion"} 3.0',
        'loramux_first_token_seconds_count{endpoint="completions",tier="default"} 1.0',
        "loramux_running_requests 0.0",
    ):
        assert line in text.splitlines()
    assert "acme" not in text
    assert "xxx" not in text


async def test_metrics_report_refusals_failures_and_token_latency(gateway: Any) -> None:
    gateway.limit("requests_per_minute", 2)
    ok = {"model": "base", "prompt": [5, 6], "max_tokens": 4}
    statuses = [(await gateway.http.post("/v1/completions", json=ok)).status_code for _ in range(3)]
    assert statuses == [200, 200, 429]
    await gateway.http.post("/v1/completions", json={"model": "nope", "prompt": "a"})
    lines = gateway.services.metrics.render().decode().splitlines()
    for line in (
        'loramux_errors_total{code="rate_limit_exceeded",endpoint="completions",status="429"} 1.0',
        'loramux_errors_total{code="model_not_found",endpoint="completions",status="404"} 1.0',
        'loramux_quota_refusals_total{metric="requests_per_minute",mode="hard"} 1.0',
        'loramux_settled_requests_total{status="completed"} 2.0',
        'loramux_token_gap_seconds_count{endpoint="completions"} 6.0',
        "loramux_commit_operations_sum 5.0",
        "loramux_commit_failures_total 0.0",
    ):
        assert line in lines
    top = [line for line in lines if line.startswith("loramux_quota_top_refusals{")]
    assert len(top) == 1
    assert top[0].endswith(" 1.0")


def test_only_the_most_refusing_policies_are_shown_and_they_expire() -> None:
    now = [0.0]
    refusals = TopRefusals(num_shown=2, clock=lambda: now[0])
    for policy, times in (("a", 3), ("b", 1), ("c", 2)):
        for _ in range(times):
            refusals.count(policy)
    assert refusals.top() == [("a", 3), ("c", 2)]
    now[0] += REFUSALS_WINDOW_S
    refusals.count("b")
    assert refusals.top() == [("a", 3), ("b", 2)], "the previous window still counts"
    now[0] += REFUSALS_WINDOW_S
    assert refusals.top() == [("b", 1)]
    now[0] += 5 * REFUSALS_WINDOW_S
    assert refusals.top() == []


def test_a_flood_of_policies_takes_bounded_memory() -> None:
    refusals = TopRefusals(clock=lambda: 0.0)
    for number in range(MAX_POLICIES + 100):
        refusals.count(f"qta_{number}")
    refusals.count("qta_0")
    assert refusals.top()[0] == ("qta_0", 2)
    assert refusals.top()[-1][1] == 1
    assert len(refusals._current) == MAX_POLICIES
