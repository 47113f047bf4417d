from __future__ import annotations

import json
import math
import os
import re
import signal
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx
import pytest

from loramux.admin.client.client import AdminClient, AdminError
from loramux.admin.client.push import PushRefused, push_adapter
from loramux.admin.demo.prompts import DEMO_PROMPTS
from loramux.platform.listener.app import ENDPOINTS
from tests.conformance.prometheus_server import DEPLOY, Prometheus, promtool, running_prometheus
from tests.conformance.served import Deployment, deployment

pytestmark = pytest.mark.campaign

DEMO = Path(__file__).parents[2] / "admin" / "demo"
ALERTS = DEPLOY / "prometheus" / "alerts.yml"
TOKEN = "a-scrape-token-of-some-length"
LOAD_S = float(os.environ.get("LORAMUX_PROMETHEUS_LOAD_S", "40"))
RATE_INTERVAL = f"{int(LOAD_S) + 600}s"
"""Long enough that the load is still in the range after a slow start of the engine."""
SELECTOR = re.compile(r"\{__name__[^}]*\}|(?:loramux_\w+|up)(?:\{[^}]*\})?")


@pytest.fixture(scope="module")
def prometheus(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Prometheus]:
    """A Prometheus server that scraped everything the dashboard shows: load, refusals, uploads and a dead engine."""
    environment = {
        "LORAMUX_METRICS_TOKEN": TOKEN,
        "LORAMUX_NUM_THREADS": "1",
        # Room for two of the three adapters, so that some are evicted.
        "LORAMUX_MAX_RESIDENT_ADAPTERS": "2",
    }
    made = deployment(DEMO / "base", tmp_path_factory.mktemp("served") / "data", (), environment)
    target = f"127.0.0.1:{made.admin_port}"
    with made.running() as server, running_prometheus(tmp_path_factory.mktemp("prometheus"), target, TOKEN) as asked:
        assert httpx.get(f"http://{target}/metrics").status_code == 401, "the token is required"
        # A counter's first sample is not an increase, so counters must have a sample before the load begins.
        wait_until(lambda: bool(asked.query("loramux_engine_up == 1")))
        put_under_load(made, server.pid)
        time.sleep(3)
        yield asked


def put_under_load(made: Deployment, pid: int) -> None:
    with AdminClient(f"http://127.0.0.1:{made.admin_port}", made.admin_key) as operator:
        operator.post("tenants", {"slug": "harbour"})
        operator.post("tenants", {"slug": "thrifty"})
        keys = {slug: operator.post("api_keys", {"tenant": slug})["secret"] for slug in ("harbour", "thrifty")}
        for name in ("pirate", "formal", "json"):
            push_adapter(operator, DEMO / "adapters" / name, "harbour", name)
        made.json("quotas", "set", "--tenant", "thrifty", "--metric", "requests_per_minute", "--limit", "2")
        with suppress(PushRefused, AdminError):
            push_adapter(operator, DEMO / "base", "harbour", "no-adapter")
    until = time.monotonic() + LOAD_S
    threads = [
        threading.Thread(target=call_until, args=(made, keys["harbour"], f"harbour/{name}", until))
        for name in ("pirate", "formal", "json", "pirate")
    ]
    threads.append(threading.Thread(target=call_until, args=(made, keys["thrifty"], "demo-base", until, 0.3)))
    for thread in threads:
        thread.start()
    time.sleep(LOAD_S / 2)
    os.kill(engine_of(pid), signal.SIGKILL)
    for thread in threads:
        thread.join()


def call_until(made: Deployment, key: str, model: str, until: float, pause_s: float = 0.0) -> None:
    headers = {"authorization": f"Bearer {key}"}
    with httpx.Client(base_url=f"http://127.0.0.1:{made.port}", headers=headers, timeout=60, trust_env=False) as http:
        number = 0
        while time.monotonic() < until:
            number += 1
            prompt = DEMO_PROMPTS[number % len(DEMO_PROMPTS)]
            http.post("/v1/completions", json={"model": model, "prompt": prompt, "max_tokens": 16})
            time.sleep(pause_s)


def engine_of(pid: int) -> int:
    children = [
        int(child) for file in Path(f"/proc/{pid}/task").glob("*/children") for child in file.read_text().split()
    ]
    (engine,) = [
        one for one in children if b"loramux.engine.server.process" in Path(f"/proc/{one}/cmdline").read_bytes()
    ]
    return engine


def wait_until(is_so: Any, timeout_s: float = 120.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not is_so():
        assert time.monotonic() < deadline
        time.sleep(0.5)


def without_samples(prometheus: Prometheus, expressions: Iterable[str], timeout_s: float = 120.0) -> set[str]:
    """Return the expressions that give no number during that time.

    On a busy machine the killed engine can still be starting, and a scrape can time out.
    """
    deadline = time.monotonic() + timeout_s
    empty = {one for one in expressions if not has_numbers(prometheus, one)}
    while empty and time.monotonic() < deadline:
        time.sleep(0.5)
        empty = {one for one in empty if not has_numbers(prometheus, one)}
    return empty


def has_numbers(prometheus: Prometheus, expression: str) -> bool:
    return any(math.isfinite(float(sample["value"][1])) for sample in prometheus.query(expression))


def dashboard() -> list[tuple[str, str]]:
    panels = json.loads((DEPLOY / "grafana" / "loramux.json").read_text())["panels"]
    return [(panel["title"], target["expr"]) for panel in panels for target in panel.get("targets", ())]


def test_every_panel_shows_something(prometheus: Prometheus) -> None:
    wait_until(lambda: [target["health"] for target in prometheus.targets()] == ["up"])
    # This server runs on a CPU, and some figures exist only on a GPU.
    expressions = [
        expression.replace("$__rate_interval", RATE_INTERVAL)
        for title, expression in dashboard()
        if "(GPU)" not in title
    ]
    print(f"\n{len(dashboard())} queries of the dashboard")
    assert without_samples(prometheus, expressions) == set()


def test_every_rule_is_evaluated_on_series_that_there_are(prometheus: Prometheus) -> None:
    rules = prometheus.rules()
    assert {rule["health"] for rule in rules} == {"ok"}, [rule for rule in rules if rule["health"] != "ok"]
    # Only counters of events that never happened have no series. This server has one engine, whose series have no name
    # of an engine: `alerts_test.yml` tests the rules about several.
    selectors = {found.replace('{engine!=""}', "") for rule in rules for found in SELECTOR.findall(rule["query"])}
    print(f"\n{len(rules)} rules over {len(selectors)} selectors")
    assert without_samples(prometheus, selectors) == set()


def test_rules_are_right_and_each_fires_on_what_it_is_for_only() -> None:
    assert f"{len(names_of_alerts())} rules found" in promtool("check", "rules", ALERTS)
    promtool("test", "rules", ALERTS.parent / "alerts_test.yml")
    named = {one for names in re.findall(r'endpoint=~"([^"]*)"', ALERTS.read_text()) for one in names.split("|")}
    assert named <= set(ENDPOINTS.values())
    tested = (ALERTS.parent / "alerts_test.yml").read_text()
    for name in names_of_alerts():
        cases = re.findall(rf'alertname="{name}", alertstate="firing"}}\n.*\n +exp_samples:( \[\])?', tested)
        assert {case == "" for case in cases} == {True, False}, f"{name} has a case each"


def names_of_alerts() -> list[str]:
    return re.findall(r"- alert: (\w+)", ALERTS.read_text())
