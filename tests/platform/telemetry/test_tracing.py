from __future__ import annotations

import gzip
import http.server
import threading
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import structlog
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from loramux.admin.server.logs import hide_secrets
from loramux.engine.tracing.spans import TraceConfig
from loramux.migrations.database import Database
from loramux.platform.telemetry import otel_tracing
from loramux.platform.telemetry.otel_tracing import OtelTracing
from loramux.platform.telemetry.tracing import CURRENT, ClientTraces, begin_span, describe, traced
from loramux.platform.tokenizer.model_tokenizer import ModelTokenizer
from tests.platform.gateways import Gateway, open_gateway

pytestmark = pytest.mark.anyio

THEIRS = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"
CALL = {"model": "base", "prompt": [5, 6], "max_tokens": 3}


@pytest.fixture
def kept() -> InMemorySpanExporter:
    return InMemorySpanExporter()


def tracing_of(kept: InMemorySpanExporter, clients: ClientTraces) -> OtelTracing:
    provider = TracerProvider(shutdown_on_exit=False)
    provider.add_span_processor(SimpleSpanProcessor(kept))
    return OtelTracing(provider, clients)


@pytest.fixture
async def traced_gateway(
    accounts: Database,
    tokenizer: ModelTokenizer,
    threads: ThreadPoolExecutor,
    kept: InMemorySpanExporter,
    anyio_backend: str,
) -> AsyncIterator[Gateway]:
    async with open_gateway(accounts, tokenizer, threads, tracing=tracing_of(kept, "link")) as gateway:
        yield gateway


def by_name(kept: InMemorySpanExporter) -> dict[str, ReadableSpan]:
    spans = {span.name: span for span in kept.get_finished_spans()}
    assert len(spans) == len(kept.get_finished_spans())
    return spans


async def test_request_is_one_trace_that_the_engine_continues(
    traced_gateway: Gateway, kept: InMemorySpanExporter
) -> None:
    response = await traced_gateway.http.post("/v1/completions", json=CALL)
    assert response.status_code == 200
    assert await traced_gateway.services.run.requests.drain(60)
    spans = by_name(kept)
    root = spans.pop("POST /v1/completions")
    assert list(spans) == ["authenticate", "resolve", "tokenise", "reserve", "generate", "settle"]
    assert root.context is not None
    for span in spans.values():
        assert span.parent is not None
        assert (span.parent.span_id, span.parent.trace_id) == (root.context.span_id, root.context.trace_id)
    assert root.attributes is not None
    assert root.attributes["loramux.request_id"] == response.headers["x-request-id"]
    assert root.attributes["loramux.model"] == "base"
    assert root.attributes["http.response.status_code"] == 200
    generate = spans["generate"].context
    assert generate is not None
    (add,) = traced_gateway.engine.adds
    assert add.traceparent == f"00-{root.context.trace_id:032x}-{generate.span_id:016x}-01"
    assert CURRENT.get() is None


async def test_log_lines_carry_the_request_and_trace_ids(
    traced_gateway: Gateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    nowhere = Database("postgresql://nobody:canary-password@127.0.0.1:1/none")
    monkeypatch.setattr(traced_gateway.database, "read", nowhere.read)
    with structlog.testing.capture_logs(processors=[structlog.contextvars.merge_contextvars, hide_secrets]) as lines:
        refused = await traced_gateway.http.post("/v1/completions", json={**CALL, "model": "support"})
    nowhere.close()
    assert refused.status_code == 503
    assert [line["request_id"] for line in lines] == [refused.headers["x-request-id"]] * len(lines)
    assert lines
    assert len(lines[0]["trace_id"]) == 32
    assert "canary-password" not in str(lines)


def test_api_keys_are_redacted_in_every_log() -> None:
    key = "sk-lmx-isrZAAUrcNz4Yb2d-W4oiuOgRRvqctiVbkrfv2V9JO58kQ9ryZESCp2VWwE5"
    shown = hide_secrets(None, "info", {"event": f"got {key}", "error": "Authorization: Bearer abc", "count": 3})
    assert shown == {"event": "got [hidden]", "error": "Authorization: [hidden]", "count": 3}


async def test_failed_spans_carry_the_error_code(traced_gateway: Gateway, kept: InMemorySpanExporter) -> None:
    assert (await traced_gateway.http.post("/v1/completions", json={**CALL, "model": "nope"})).status_code == 404
    spans = by_name(kept)
    assert spans["resolve"].status.description == "model_not_found"
    assert spans["POST /v1/completions"].status.is_unset, "a client's mistake is not a server failure"
    kept.clear()
    traced_gateway.engine.die()
    assert (await traced_gateway.http.post("/v1/completions", json=CALL)).status_code == 503
    assert by_name(kept)["POST /v1/completions"].status.description == "engine_unavailable"
    kept.clear()
    await traced_gateway.http.get("/health/live")
    await traced_gateway.http.get("/v1/nothing")
    assert kept.get_finished_spans() == ()


@pytest.mark.parametrize(
    ("clients", "header", "trace", "links"),
    [
        pytest.param("ignore", THEIRS, "ours", 0, id="ignored"),
        pytest.param("link", THEIRS, "ours", 1, id="a link"),
        pytest.param("parent", THEIRS, "theirs", 0, id="the parent"),
        pytest.param("parent", "00-" + "0" * 32 + "-00f067aa0ba902b7-01", "ours", 0, id="no trace"),
        pytest.param("parent", "x" * 10_000, "ours", 0, id="nonsense"),
        pytest.param("link", "00-é-1-1", "ours", 0, id="not ASCII"),
    ],
)
def test_client_trace_is_ignored_linked_or_continued(
    kept: InMemorySpanExporter, clients: ClientTraces, header: str, trace: str, links: int
) -> None:
    begun = tracing_of(kept, clients).begin("POST /v1/completions", {"traceparent": header, "tracestate": "a=b"})
    begun.root.end()
    (span,) = kept.get_finished_spans()
    assert len(span.links) == links
    assert (begun.trace_id == THEIRS.split("-")[1]) == (trace == "theirs")
    assert span.context is not None
    assert len(span.context.trace_state) == 0


def test_unsampled_client_trace_is_respected_only_as_a_parent(kept: InMemorySpanExporter) -> None:
    unsampled = {"traceparent": THEIRS.removesuffix("1") + "0"}
    below = tracing_of(kept, "parent").begin("x", unsampled)
    assert below.begin("generate").traceparent is None
    assert tracing_of(kept, "link").begin("x", unsampled).begin("generate").traceparent is not None


def test_tracing_does_nothing_outside_a_traced_request() -> None:
    with traced("reserve") as span:
        assert span is None
    assert begin_span("generate") is None
    describe(model="base")


class Collector(http.server.BaseHTTPRequestHandler):
    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["content-length"]))
        if self.headers.get("content-encoding") == "gzip":
            body = gzip.decompress(body)
        self.server.received.append((self.path, ExportTraceServiceRequest.FromString(body)))  # type: ignore[attr-defined]
        self.send_response(200)
        self.end_headers()

    def log_message(self, *arguments: Any) -> None:
        return


@pytest.fixture
def collector() -> Iterator[Any]:
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Collector) as server:
        server.received = []  # type: ignore[attr-defined]
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def test_collector_receives_spans_over_otlp(collector: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(otel_tracing, "CLOSE_S", 60.0)
    url = f"http://127.0.0.1:{collector.server_port}/v1/traces"
    tracing = OtelTracing.open(TraceConfig(exporter="otlp", target=url), 1.0, "link")
    tracing.begin("POST /v1/completions", {}).root.end()
    tracing.close()
    ((path, request),) = collector.received
    assert path == "/v1/traces"
    (resource,) = request.resource_spans
    assert {"service.name": "loramux-gateway"}.items() <= {
        one.key: one.value.string_value for one in resource.resource.attributes
    }.items()
    assert resource.scope_spans[0].spans[0].name == "POST /v1/completions"


def test_unreachable_collector_causes_no_delay() -> None:
    tracing = OtelTracing.open(TraceConfig(exporter="otlp", target="http://127.0.0.1:9/v1/traces"), 0.0, "link")
    begun = tracing.begin("POST /v1/completions", {})
    assert begun.begin("generate").traceparent is None, "the request is not sampled"
    begun.root.end()
    tracing.close()
