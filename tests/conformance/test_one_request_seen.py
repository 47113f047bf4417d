"""A server's traces, logs and metrics show everything about a request except private data.

The campaign `processes` then starts the same server again.
"""

from __future__ import annotations

import json
import signal
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
from openai import OpenAI

from loramux.admin.client.client import AdminClient
from loramux.admin.client.push import push_adapter
from tests.conformance.served import Deployment, deployment

DEMO = Path(__file__).parents[2] / "admin" / "demo"
CANARY = "xylophone-canary-7731"
QUESTION = "What is the capital of France?"
PARENT = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"


@dataclass(frozen=True, slots=True)
class Seen:
    made: Deployment
    logs: str
    metrics: str
    spans: list[dict[str, Any]]
    request_id: str
    key: str
    answer: str
    """The adapter's greedy answer to QUESTION."""


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> Seen:
    """A server that has answered a cold request, with canaries in its body, key and headers, and refused a few
    others.
    """
    log_file = tmp_path_factory.mktemp("log") / "stderr"
    environment = {
        "LORAMUX_TRACES": "file",
        "LORAMUX_LOG_FORMAT": "json",
        "LORAMUX_LOG_ANSWERS": "true",
        "LORAMUX_TRACES_OF_CLIENTS": "parent",
        "LORAMUX_NUM_THREADS": "1",
    }
    made = deployment(DEMO / "base", tmp_path_factory.mktemp("seen") / "data", (), environment)
    with made.running(log_file):
        with AdminClient(f"http://127.0.0.1:{made.admin_port}", made.admin_key) as operator:
            operator.post("tenants", {"slug": "harbour"})
            key = operator.post("api_keys", {"tenant": "harbour"})["secret"]
            push_adapter(operator, DEMO / "adapters" / "pirate", "harbour", "pirate")
        with httpx.Client(base_url=f"http://127.0.0.1:{made.port}", timeout=60, trust_env=False) as http:
            headers = {"authorization": f"Bearer {key}", "traceparent": PARENT, "x-canary": CANARY}
            body = {"model": "harbour/pirate", "prompt": f"{CANARY} says", "max_tokens": 8, "guided_choice": [CANARY]}
            done = http.post("/v1/completions", json=body, headers=headers)
            assert done.status_code == 200, done.text
            wrong_key = {"authorization": f"Bearer sk-lmx-{CANARY}"}
            assert http.post("/v1/completions", json=body, headers=wrong_key).status_code == 401
            for fault in ({"model": CANARY}, {"prompt": {CANARY: 1}}, {CANARY: 1}, {"max_tokens": 10**9}):
                assert http.post("/v1/completions", json=body | fault, headers=headers).status_code in (400, 404)
            metrics = http.get(f"http://127.0.0.1:{made.admin_port}/metrics").text
        answer = answer_of(made.client(key))
    spans = [json.loads(line) for line in (made.data_dir / "traces.jsonl").read_text().splitlines()]
    return Seen(made, log_file.read_text(), metrics, spans, done.headers["x-request-id"], key, answer)


def answer_of(client: OpenAI) -> str:
    asked: Any = [{"role": "user", "content": QUESTION}]
    answer = client.chat.completions.create(model="harbour/pirate", messages=asked, temperature=0, max_tokens=24)
    return answer.choices[0].message.content or ""


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
    assert [line["tenant"] for line in answers] == ["harbour", None, *["harbour"] * 4]
    assert [line["model"] for line in answers[:3]] == ["harbour/pirate@1", None, None]
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


@pytest.mark.campaign
def test_a_restart_keeps_everything_and_an_interrupt_drains(seen: Seen) -> None:
    with seen.made.running() as server:
        assert answer_of(seen.made.client(seen.key)) == seen.answer != ""
        started = threading.Event()

        def read_on() -> str | None:
            reason = None
            for chunk in seen.made.client(seen.key).completions.create(
                model="pirate",
                prompt="Arr",
                max_tokens=200,
                temperature=0,
                stream=True,
                extra_body={"ignore_eos": True},
            ):
                started.set()
                reason = chunk.choices[0].finish_reason or reason
            return reason

        with ThreadPoolExecutor(1) as threads:
            reading = threads.submit(read_on)
            assert started.wait(30)
            server.send_signal(signal.SIGINT)
            assert reading.result() == "length"
        assert server.wait(60) == 0
