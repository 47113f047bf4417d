"""Spans of traced requests as plain records, so that the engine does not depend on OpenTelemetry."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, Protocol

import msgspec

Scope = Literal["loramux.engine", "loramux.adapter_store"]
"""The component that did the work."""


class TraceConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Destination of exported spans: `file` appends JSON lines to the file `target`, and `otlp` posts to the URL
    `target`.

    Without a target, `otlp` uses OpenTelemetry's environment variables (such as OTEL_EXPORTER_OTLP_ENDPOINT).
    """

    exporter: Literal["file", "otlp"]
    target: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class SpanRecord:
    """A finished part of a request. Times are in nanoseconds since 1970."""

    name: str
    scope: Scope
    started_ns: int
    ended_ns: int
    attributes: Mapping[str, str | int | float | bool] = field(default_factory=dict)
    failure: str | None = None
    children: tuple[SpanRecord, ...] = ()


class SpanSink(Protocol):
    def record(self, traceparent: str, span: SpanRecord) -> None:
        """Record a child span of `traceparent` (W3C Trace Context). Never blocks, but may drop the span."""
