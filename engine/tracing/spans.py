"""What an engine tells of traced requests: spans as plain records, so that nothing here needs OpenTelemetry."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, Protocol

import msgspec

Scope = Literal["loramux.engine", "loramux.adapter_store"]
"""Who did the work."""


class TraceConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Where spans go: `file` appends JSON lines to the file `target`, `otlp` posts to the URL `target`.

    Without a target, `otlp` follows OpenTelemetry's own variables (OTEL_EXPORTER_OTLP_ENDPOINT and the others).
    """

    exporter: Literal["file", "otlp"]
    target: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class SpanRecord:
    """A part of a request that is over. Times are nanoseconds since 1970."""

    name: str
    scope: Scope
    started_ns: int
    ended_ns: int
    attributes: Mapping[str, str | int | float | bool] = field(default_factory=dict)
    failure: str | None = None
    children: tuple[SpanRecord, ...] = ()


class SpanSink(Protocol):
    """Takes spans from the engine's loop."""

    def record(self, traceparent: str, span: SpanRecord) -> None:
        """Take a span below the one that `traceparent` (W3C Trace Context) names. Never waits; may drop it."""
