"""The current request's trace in the gateway, with negligible cost if tracing is disabled.

This module does not import OpenTelemetry. `otel_tracing.py` does, and it is imported only if tracing is enabled.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from contextvars import ContextVar
from typing import Literal, Protocol

Attribute = str | int | float | bool
ClientTraces = Literal["ignore", "link", "parent"]
"""What to do with a client's trace: ignore it, link to it, or use it as the parent."""


class Span(Protocol):
    @property
    def traceparent(self) -> str | None:
        """The header value that identifies this span (W3C Trace Context). None if the trace is not sampled."""

    def set(self, name: str, value: Attribute) -> None: ...

    def end(self, failure: str | None = None) -> None: ...


class RequestTrace(Protocol):
    @property
    def trace_id(self) -> str: ...

    @property
    def root(self) -> Span: ...

    def begin(self, name: str) -> Span: ...

    def span(self, name: str) -> AbstractContextManager[object]:
        """Time a block. An exception that leaves the block marks the span as failed."""


class Tracing(Protocol):
    def begin(self, name: str, headers: Mapping[str, str]) -> RequestTrace:
        """Start a trace for a request with these headers, which come from the client and are untrusted."""

    def close(self) -> None:
        """Export pending spans, with a short timeout."""


# Tracing does not affect behaviour, so this is a context variable rather than an argument. Tasks and calls started by a
# request inherit it.
CURRENT: ContextVar[RequestTrace | None] = ContextVar("loramux_request_trace", default=None)
_UNTRACED: AbstractContextManager[object] = nullcontext()


def traced(name: str) -> AbstractContextManager[object]:
    """Time a block as a span of the current request. Does nothing if the request is not traced."""
    trace = CURRENT.get()
    return _UNTRACED if trace is None else trace.span(name)


def begin_span(name: str) -> Span | None:
    """Begin a span of the current request, which the caller ends. Returns None if the request is not traced."""
    trace = CURRENT.get()
    return None if trace is None else trace.begin(name)


def describe(**attributes: Attribute) -> None:
    """Add attributes to the root span of the current request, if it is traced."""
    trace = CURRENT.get()
    if trace is not None:
        for name, value in attributes.items():
            trace.root.set(f"loramux.{name}", value)
