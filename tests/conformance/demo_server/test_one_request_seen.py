"""A server's traces, logs and metrics show everything about a request except private data."""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

from loramux.admin.client.client import AdminClient
from loramux.admin.client.push import push_adapter
from tests.adapter_store.waiting import wait_until
from tests.conformance.served import Deployment
from tests.demo_base import DEMO_BASE

CANARY = "xylophone-canary-7731"
PARENT = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"


@dataclass(frozen=True, slots=True)
class Seen:
    made: Deployment
    logs: str
    metrics: str
    spans: list[dict[str, Any]]
    request_id: str
    key: str


@pytest.fixture(scope="module")
def seen(demo_server: Deployment, server_log: Path, tmp_path_factory: pytest.TempPathFactory) -> Seen:
    """The server after it has answered a cold request, with canaries in its body, key and headers, and refused a few
    others.
    """
    made, traces, start = demo_server, demo_server.data_dir / "traces.jsonl", server_log.stat().st_size
    with AdminClient(f"http://127.0.0.1:{made.admin_port}", made.admin_key) as operator:
        operator.post("tenants", {"slug": "watched"})
        key = operator.post("api_keys", {"tenant": "watched"})["secret"]
        push_adapter(operator, unseen_adapter(tmp_path_factory.mktemp("adapter")), "watched", "pirate")
    with httpx.Client(base_url=f"http://127.0.0.1:{made.port}", timeout=60, trust_env=False) as http:
        headers = {"authorization": f"Bearer {key}", "traceparent": PARENT, "x-canary": CANARY}
        body = {"model": "watched/pirate", "prompt": f"{CANARY} says", "max_tokens": 8, "guided_choice": [CANARY]}
        done = http.post("/v1/completions", json=body, headers=headers)
        assert done.status_code == 200, done.text
        wrong_key = {"authorization": f"Bearer sk-lmx-{CANARY}"}
        assert http.post("/v1/completions", json=body, headers=wrong_key).status_code == 401
        for fault in ({"model": CANARY}, {"prompt": {CANARY: 1}}, {CANARY: 1}, {"max_tokens": 10**9}):
            assert http.post("/v1/completions", json=body | fault, headers=headers).status_code in (400, 404)
        metrics = http.get(f"http://127.0.0.1:{made.admin_port}/metrics").text
    request_id = done.headers["x-request-id"]
    # The gateway and the engine write their spans every few seconds.
    wait_until(lambda: {request_id, "engine.decode"} <= last_spans(spans_of_trace(traces)), 60)
    return Seen(made, server_log.read_bytes()[start:].decode(), metrics, spans_of_trace(traces), request_id, key)


def unseen_adapter(directory: Path) -> Path:
    """A copy of the demo's pirate with another scale, which no other module has loaded."""
    adapter = shutil.copytree(DEMO_BASE.parent / "adapters" / "pirate", directory / "pirate")
    config = json.loads((adapter / "adapter_config.json").read_text())
    config["lora_alpha"] += 1
    (adapter / "adapter_config.json").write_text(json.dumps(config))
    return adapter


def spans_of_trace(file: Path) -> list[dict[str, Any]]:
    spans = [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []
    return [span for span in spans if span["context"]["trace_id"] == "0x" + PARENT.split("-")[1]]


def last_spans(spans: list[dict[str, Any]]) -> set[str]:
    """The request identifiers of the gateway's spans, which it writes last, and the names of all spans."""
    return {span["attributes"].get("loramux.request_id", "") for span in spans} | {span["name"] for span in spans}


def test_one_trace_crosses_gateway_engine_and_store(seen: Seen) -> None:
    spans = seen.spans
    (root,) = [span for span in spans if span["attributes"].get("loramux.request_id") == seen.request_id]
    assert root["context"]["trace_id"] == "0x" + PARENT.split("-")[1]
    assert root["parent_id"] == "0x" + PARENT.split("-")[2]
    by_id = {span["context"]["span_id"]: span for span in spans}
    below: dict[str, list[str]] = {}
    for span in spans:
        above = span
        while above["parent_id"] in by_id:
            above = by_id[above["parent_id"]]
        if above is root and span is not root:
            below.setdefault(by_id[span["parent_id"]]["name"], []).append(span["name"])
            assert span["context"]["trace_id"] == root["context"]["trace_id"]
    assert set(below) == {"POST /v1/completions", "generate", "engine.load_adapter"}
    assert below["POST /v1/completions"] == [
        *("authenticate", "resolve", "tokenise", "constrain", "reserve", "generate", "settle")
    ]
    # The first two spans run concurrently, in either order.
    assert sorted(below["generate"][:2]) == ["engine.compile_grammar", "engine.load_adapter"]
    assert below["generate"][2:] == ["engine.queue", "engine.prefill", "engine.decode"]
    stages = below["engine.load_adapter"]
    assert {"store.host.lookup", "store.disk.lookup", "store.blobs.fetch", "store.pool.copy"} <= set(stages)
    services = {span["resource"]["attributes"]["service.name"] for span in spans}
    processes = {span["resource"]["attributes"]["process.pid"] for span in spans}
    assert services == {"loramux-gateway", "loramux-engine"}
    assert len(processes) == 2


def test_every_line_of_the_log_is_json_and_a_requests_lines_name_it(seen: Seen) -> None:
    lines = [json.loads(line) for line in seen.logs.splitlines()]
    assert {"event", "level", "timestamp"} <= set.intersection(*(set(line) for line in lines))
    answers = [line for line in lines if line["event"] == "answered" and line["endpoint"] == "completions"]
    assert [line["status"] for line in answers] == [200, 401, 404, 400, 400, 400]
    assert answers[0]["request_id"] == seen.request_id
    assert {line["trace_id"] for line in answers[:1]} == {PARENT.split("-")[1]}
    assert len({line["request_id"] for line in answers}) == 6


def test_the_log_says_whose_request_was_answered_with_which_model(seen: Seen) -> None:
    lines = [json.loads(line) for line in seen.logs.splitlines()]
    answers = [line for line in lines if line["event"] == "answered" and line["endpoint"] == "completions"]
    assert [line["tenant"] for line in answers] == ["watched", None, *["watched"] * 4]
    assert [line["model"] for line in answers[:3]] == ["watched/pirate@1", None, None]
    assert seen.key.split("-")[2] not in answers[0]["key_id"]
    assert answers[0]["key_id"].startswith("key_")
    assert answers[1]["key_id"] is None


def test_nothing_that_is_written_repeats_prompts_or_keys(seen: Seen) -> None:
    written = [seen.logs.encode(), seen.metrics.encode()]
    written += [path.read_bytes() for path in seen.made.data_dir.rglob("*") if path.is_file()]
    assert sum(map(len, written)) > 100_000
    for text in written:
        for secret in (CANARY, seen.key, seen.key.rsplit("-", 1)[1], seen.made.admin_key):
            assert secret.encode() not in text
