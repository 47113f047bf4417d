"""The trace of a request in the gateway: which one is current, and what it costs where none is.

Nothing here imports OpenTelemetry; `otel_tracing.py` does, and is imported only where traces are on.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from contextvars import ContextVar
from typing import Literal, Protocol

Attribute = str | int | float | bool
ClientTraces = Literal["ignore", "link", "parent"]
"""What becomes of a trace that the client began: nothing, a link to it, or ours goes on below it."""


class Span(Protocol):
    """A part of a request that is under way; `end` it once."""

    @property
    def traceparent(self) -> str | None:
        """What names this span to another process (W3C Trace Context); None where the trace is not sampled."""

    def set(self, name: str, value: Attribute) -> None: ...

    def end(self, failure: str | None = None) -> None: ...


class RequestTrace(Protocol):
    """The trace of one request; spans that are begun in it are below its root."""

    @property
    def trace_id(self) -> str: ...

    @property
    def root(self) -> Span: ...

    def begin(self, name: str) -> Span: ...

    def span(self, name: str) -> AbstractContextManager[object]:
        """A span for the length of a block; an exception that leaves the block is its failure."""


class Tracing(Protocol):
    """Where the traces of this gateway begin."""

    def begin(self, name: str, headers: Mapping[str, str]) -> RequestTrace:
        """A trace for a request with these headers, which are the client's and may say anything."""

    def close(self) -> None:
        """Export what waits, for a moment at most."""


# Not passed along by hand, as it has no part in what the code does: a task that a request starts inherits it, and so
# does what it calls.
CURRENT: ContextVar[RequestTrace | None] = ContextVar("loramux_request_trace", default=None)
_UNTRACED: AbstractContextManager[object] = nullcontext()


def traced(name: str) -> AbstractContextManager[object]:
    """A span of the current request for the length of a block; nothing where the request is not traced."""
    trace = CURRENT.get()
    return _UNTRACED if trace is None else trace.span(name)


def begin_span(name: str) -> Span | None:
    """A span of the current request, to be ended by the caller; None where the request is not traced."""
    trace = CURRENT.get()
    return None if trace is None else trace.begin(name)


def describe(**attributes: Attribute) -> None:
    """Add to the root span of the current request, where it is traced."""
    trace = CURRENT.get()
    if trace is not None:
        for name, value in attributes.items():
            trace.root.set(f"loramux.{name}", value)
