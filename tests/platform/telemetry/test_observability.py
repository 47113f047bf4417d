"""Health tells the truth, metrics count, and neither needs a key."""

from __future__ import annotations

from typing import Any

import pytest

from loramux.migrations.database import Database
from loramux.platform.engine_link.scripted_engine import ScriptedEngine

pytestmark = pytest.mark.anyio


async def test_ready_means_engine_and_database_answer(gateway: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    del gateway.http.headers["authorization"]
    assert (await gateway.http.get("/health/live")).json() == {"status": "live"}
    ready = await gateway.http.get("/health/ready")
    assert (ready.status_code, ready.json()) == (200, {"status": "ready", "engine": True, "database": True})
    gateway.engine.die()
    down = await gateway.http.get("/health/ready")
    assert (down.status_code, down.json()["engine"]) == (503, False)
    gateway.engine.revive()
    nowhere = Database("postgresql://nobody@127.0.0.1:1/none")
    monkeypatch.setattr(gateway.database, "read", nowhere.read)
    cut = await gateway.http.get("/health/ready")
    assert (cut.status_code, cut.json()["database"]) == (503, False)
    assert (await gateway.http.get("/health/live")).status_code == 200
    nowhere.close()


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
        'loramux_first_token_seconds_count{endpoint="completions"} 1.0',
        "loramux_running_requests 0.0",
    ):
        assert line in text.splitlines()
    assert "acme" not in text
    assert "xxx" not in text


async def test_the_fake_engine_answers_like_an_engine() -> None:
    engine = ScriptedEngine()
    assert (await engine.load("d" * 64, 1)).state == "resident"
    stats = await engine.stats(1)
    assert [adapter.digest for adapter in stats.adapters] == ["d" * 64]
    assert stats.num_free_pages == stats.num_pages - 1
    assert (await engine.unload("d" * 64, 1)).state == "absent"
    await engine.close()
    assert engine.info is None


async def test_metrics_name_what_refused_failed_and_how_fast_tokens_came(gateway: Any) -> None:
    gateway.limit("requests_per_minute", 2)
    ok = {"model": "base", "prompt": [5, 6], "max_tokens": 4}
    statuses = [(await gateway.http.post("/v1/completions", json=ok)).status_code for _ in range(3)]
    assert statuses == [200, 200, 429]
    await gateway.http.post("/v1/completions", json={"model": "nope", "prompt": "a"})
    lines = gateway.services.metrics.render().decode().splitlines()
    for line in (
        'loramux_errors_total{code="rate_limit_exceeded",endpoint="completions"} 1.0',
        'loramux_errors_total{code="model_not_found",endpoint="completions"} 1.0',
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
