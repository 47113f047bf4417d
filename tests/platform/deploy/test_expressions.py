"""The shipped alerts and dashboard: what can be checked without a Prometheus. `make test-prometheus` evaluates them."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from loramux.platform.listener.app import ENDPOINTS

DEPLOY = Path(__file__).parents[3] / "platform" / "deploy"
ALERTS = (DEPLOY / "prometheus" / "alerts.yml").read_text()
EXPRESSIONS = {
    panel["title"]: [target["expr"] for target in panel.get("targets", ())]
    for panel in json.loads((DEPLOY / "grafana" / "loramux.json").read_text())["panels"]
}
COMPUTE_NOTHING = {
    *("files", "batches", "input_tokens", "conversations", "count_tokens", "models", "load_adapter", "unload_adapter"),
    *("tokenize", "detokenize"),
}


def test_alerts_and_the_first_panel_count_every_endpoint_that_computes_answers() -> None:
    computing = set(ENDPOINTS.values()) - COMPUTE_NOTHING
    [calls] = EXPRESSIONS["Calls per second, by status"]
    matchers = re.findall(r'endpoint=~"([^"]*)"', ALERTS + calls)
    assert matchers
    for matcher in matchers:
        assert set(matcher.split("|")) == computing


def test_refusals_of_a_policy_are_added_up_over_gateways() -> None:
    [panel] = EXPRESSIONS["Policies with the most refusals, last 5 to 10 minutes"]
    for text in (ALERTS, panel):
        assert "sum by (policy) (loramux_quota_top_refusals)" in text


def test_the_alert_on_first_tokens_leaves_out_the_tier_that_waits() -> None:
    selectors = re.findall(r"loramux_first_token_seconds_\w+(\{[^}]*\})?", ALERTS)
    assert len(selectors) == 5
    assert all('tier!="flex"' in selector for selector in selectors)


def test_panels_show_each_engine_by_itself() -> None:
    shown = [one for each in EXPRESSIONS.values() for one in each if re.search(r"loramux_(engine|adapter)_", one)]
    assert len(shown) > 25
    for expression in shown:
        assert "instance, engine) (" in expression
        assert "max(" not in expression


@pytest.mark.parametrize("alert", ["EngineNotStepping", "AdaptersFailToLoad", "PoolThrashes", "ComputesAgain"])
def test_alerts_compare_figures_of_one_engine(alert: str) -> None:
    [rule] = re.findall(rf"alert: Loramux{alert}\n(.*?)labels:", ALERTS, re.DOTALL)
    assert rule.count("by (instance, engine) (") == 2
