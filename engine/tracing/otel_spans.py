"""Exports spans to OpenTelemetry. No other engine module imports OpenTelemetry, and this module is imported only if
tracing is on."""

from __future__ import annotations

import os
import queue
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import get_args

from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult
from opentelemetry.sdk.trace.sampling import Sampler
from opentelemetry.trace import Status, StatusCode
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from loramux.engine.protocol.errors import ConfigNotUsable
from loramux.engine.tracing.spans import Scope, SpanRecord, TraceConfig

MAX_WAITING = 4096
"""Maximum number of spans waiting for export. Further spans are dropped."""

EXPORT_INTERVAL_MS = 500.0


class FileSpanExporter(SpanExporter):
    """Appends each span to a file as a line of JSON. Several processes can share the file."""

    def __init__(self, path: Path) -> None:
        # Spans reveal who requests what, so only the file's owner may read it.
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        try:
            for span in spans:
                # Use one write per line. Otherwise, lines from two processes could interleave.
                os.write(self._file, span.to_json(indent=None).encode() + b"\n")
        except OSError:
            return SpanExportResult.FAILURE
        return SpanExportResult.SUCCESS


def open_provider(config: TraceConfig, service: str, sampler: Sampler | None = None) -> TracerProvider:
    """Create a tracer provider that exports spans as configured. Raises ConfigNotUsable if that fails."""
    resource = Resource.create({"service.name": service, "process.pid": os.getpid()})
    provider = TracerProvider(sampler, resource, shutdown_on_exit=False)
    processor = BatchSpanProcessor(_open_exporter(config), MAX_WAITING, EXPORT_INTERVAL_MS)
    provider.add_span_processor(processor)
    return provider


def flush(provider: TracerProvider, timeout_s: float) -> None:
    """Export all waiting spans, or give up after `timeout_s` seconds."""
    # The SDK's own timeout does not stop an exporter that hangs.
    flushing = threading.Thread(target=provider.force_flush, name="span-flush", daemon=True)
    flushing.start()
    flushing.join(timeout_s)


class OtelSpanSink:
    """A SpanSink that passes spans to OpenTelemetry on its own thread."""

    def __init__(self, provider: TracerProvider) -> None:
        self._provider = provider
        # The SDK changes the process's warning filters here, which is not safe on the sink's thread.
        self._tracers = {scope: provider.get_tracer(scope) for scope in get_args(Scope)}
        self._waiting: queue.Queue[tuple[str, SpanRecord] | None] = queue.Queue(MAX_WAITING)
        self._thread = threading.Thread(target=self._run, name="spans", daemon=True)
        self._thread.start()

    def record(self, traceparent: str, span: SpanRecord) -> None:
        try:
            self._waiting.put_nowait((traceparent, span))
        except queue.Full:
            # An incomplete trace is better than a delayed step.
            return

    def close(self, timeout_s: float) -> None:
        """Export all waiting spans, or give up after at most three times `timeout_s` seconds."""
        try:
            self._waiting.put(None, timeout=timeout_s)
        except queue.Full:
            return
        self._thread.join(timeout_s)
        flush(self._provider, timeout_s)

    def _run(self) -> None:
        propagator = TraceContextTextMapPropagator()
        while (item := self._waiting.get()) is not None:
            traceparent, span = item
            self._emit(span, propagator.extract({"traceparent": traceparent}))

    def _emit(self, record: SpanRecord, parent: Context) -> None:
        span = self._tracers[record.scope].start_span(
            record.name, parent, attributes=record.attributes, start_time=record.started_ns
        )
        if record.failure is not None:
            span.set_status(Status(StatusCode.ERROR, record.failure))
        for child in record.children:
            self._emit(child, trace.set_span_in_context(span, parent))
        span.end(record.ended_ns)


def _open_exporter(config: TraceConfig) -> SpanExporter:
    if config.exporter == "file":
        assert config.target is not None
        try:
            return FileSpanExporter(Path(config.target))
        except OSError as error:
            reason = f"the trace file cannot be written ({error.strerror}); change traces_target"
            raise ConfigNotUsable(reason) from None
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter

    return OTLPSpanExporter(endpoint=config.target)
