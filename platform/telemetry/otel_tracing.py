"""Traces requests with OpenTelemetry."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.sampling import ParentBased, TraceIdRatioBased
from opentelemetry.trace import Link, SpanKind, Status, StatusCode, Tracer
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from loramux.engine.tracing.otel_spans import flush, open_provider
from loramux.engine.tracing.spans import TraceConfig
from loramux.platform.errors import ApiError
from loramux.platform.telemetry.tracing import Attribute, ClientTraces, RequestTrace, Span

CLOSE_S = 2.0
_PROPAGATOR = TraceContextTextMapPropagator()


class OtelTracing:
    """Starts traces. `open` sets the share of traces to sample. The trace ID decides whether a trace is sampled.

    A trace that continues a client's trace follows the client's sampling decision.
    """

    def __init__(self, provider: TracerProvider, clients: ClientTraces = "link") -> None:
        self._provider = provider
        self._tracer = provider.get_tracer("loramux.gateway")
        self._clients = clients

    @staticmethod
    def open(config: TraceConfig, share: float, clients: ClientTraces) -> OtelTracing:
        """Configure tracing. Raises ConfigNotUsable."""
        sampler = ParentBased(TraceIdRatioBased(share))
        return OtelTracing(open_provider(config, "loramux-gateway", sampler), clients)

    def begin(self, name: str, headers: Mapping[str, str]) -> RequestTrace:
        above, links = Context(), []
        if self._clients != "ignore" and "traceparent" in headers:
            # The propagator ignores a malformed header. `tracestate` and `baggage` are not needed, and a client could
            # use them to inflate internal messages, so they are not extracted.
            theirs = _PROPAGATOR.extract({"traceparent": headers["traceparent"]}, Context())
            of_client = trace.get_current_span(theirs).get_span_context()
            if of_client.is_valid and self._clients == "parent":
                above = theirs
            elif of_client.is_valid:
                links = [Link(of_client)]
        root = self._tracer.start_span(name, above, SpanKind.SERVER, links=links)
        return _Trace(self._tracer, root)

    def close(self) -> None:
        flush(self._provider, CLOSE_S)


class _Span:
    def __init__(self, span: trace.Span) -> None:
        self._span = span

    @property
    def traceparent(self) -> str | None:
        context = self._span.get_span_context()
        if not context.trace_flags.sampled:
            return None
        return f"00-{context.trace_id:032x}-{context.span_id:016x}-01"

    def set(self, name: str, value: Attribute) -> None:
        self._span.set_attribute(name, value)

    def end(self, failure: str | None = None) -> None:
        if failure is not None:
            self._span.set_status(Status(StatusCode.ERROR, failure))
        self._span.end()


class _Trace:
    def __init__(self, tracer: Tracer, root: trace.Span) -> None:
        self._tracer = tracer
        self._below = trace.set_span_in_context(root, Context())
        self.root = _Span(root)
        self.trace_id = f"{root.get_span_context().trace_id:032x}"

    def begin(self, name: str) -> Span:
        return _Span(self._tracer.start_span(name, self._below))

    @contextmanager
    def span(self, name: str) -> Iterator[object]:
        span = self.begin(name)
        failure: str | None = None
        try:
            yield span
        except ApiError as error:
            # Messages can quote client input, but codes cannot.
            failure = error.code
            raise
        except BaseException as error:
            failure = type(error).__name__
            raise
        finally:
            span.end(failure)
