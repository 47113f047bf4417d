from __future__ import annotations

import ast
import threading
import time
from pathlib import Path

import pytest
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from loramux.adapter_store.tiers.staged_adapter import NotStaged, StagedAdapter
from loramux.adapter_store.tiers.tier_figures import PassedStage
from loramux.engine.protocol.messages import Add
from loramux.engine.tracing.otel_spans import MAX_WAITING, OtelSpanSink
from loramux.engine.tracing.sequence_traces import SequenceTraces
from loramux.engine.tracing.spans import SpanRecord
from tests.engine.byte_vocabulary import EOS
from tests.engine.simulated_engine import GREEDY, Simulate, Simulation

TRACE = "00-{}-00f067aa0ba902b7-01"
FIRST, SECOND = TRACE.format("a" * 32), TRACE.format("b" * 32)


class Spans:
    def __init__(self) -> None:
        self.records: list[tuple[str, SpanRecord]] = []

    def record(self, traceparent: str, span: SpanRecord) -> None:
        self.records.append((traceparent, span))

    def of(self, traceparent: str) -> list[str]:
        return [span.name for parent, span in self.records if parent == traceparent]

    def find(self, traceparent: str, name: str) -> SpanRecord:
        (found,) = [span for parent, span in self.records if parent == traceparent and span.name == name]
        return found


def traced(simulation: Simulation) -> Spans:
    """Start recording the simulation's spans. Every staged adapter appears to have been read from the disk."""
    spans = Spans()
    simulation.engine._traces = simulation.engine._commits._traces = SequenceTraces(spans)
    poll = simulation.stager.poll

    def read() -> list[StagedAdapter | NotStaged]:
        found = poll()
        for one in found:
            if isinstance(one, StagedAdapter):
                now_ns = time.time_ns()
                one.stages = [
                    PassedStage(tier="disk", stage="read", started_ns=now_ns, ended_ns=now_ns, num_bytes=4096)
                ]
        return found

    simulation.stager.poll = read  # type: ignore[method-assign]
    return spans


def test_cold_request_records_load_queue_prefill_and_decode_spans(simulate: Simulate) -> None:
    simulation = simulate(adapters={"a": 2})
    spans = traced(simulation)
    simulation.add("cold", digest="a", traceparent=FIRST)
    simulation.add("joins", digest="a", traceparent=SECOND)
    simulation.add("nobody asks")
    simulation.run()
    assert len(spans.records) == 8, "the untraced sequence has no spans"
    assert spans.of(FIRST) == ["engine.load_adapter", "engine.queue", "engine.prefill", "engine.decode"]
    queue, prefill, decode = (spans.find(FIRST, f"engine.{part}") for part in ("queue", "prefill", "decode"))
    assert queue.started_ns <= queue.ended_ns == prefill.started_ns <= prefill.ended_ns == decode.started_ns
    assert decode.attributes == {"loramux.completion_tokens": 4, "loramux.reason": "length"}
    load, joined = (spans.find(trace, "engine.load_adapter") for trace in (FIRST, SECOND))
    assert queue.started_ns <= load.started_ns <= load.ended_ns <= queue.ended_ns
    assert [child.name for child in load.children] == ["store.disk.read"]
    assert (load.attributes["loramux.joined"], joined.attributes["loramux.joined"]) == (False, True)
    assert joined.children == ()
    simulation.add("warm", digest="a", traceparent=TRACE.format("c" * 32))
    simulation.run()
    assert spans.of(TRACE.format("c" * 32)) == ["engine.queue", "engine.prefill", "engine.decode"]
    assert simulation.engine._traces is not None
    assert not simulation.engine._traces._lives


def test_failed_load_fails_the_wait_span(simulate: Simulate) -> None:
    simulation = simulate()
    spans = traced(simulation)
    simulation.add("lost", digest="gone", traceparent=FIRST)
    simulation.run()
    assert spans.of(FIRST) == ["engine.load_adapter", "engine.queue"]
    assert spans.find(FIRST, "engine.load_adapter").failure == "the store has no such adapter"
    assert spans.find(FIRST, "engine.queue").failure == "adapter_unavailable"


@pytest.mark.parametrize(
    ("grammar", "names"),
    [
        pytest.param("start: /[a-z]/", ["engine.queue", "engine.prefill", "engine.decode"], id="compiled"),
        pytest.param("start: undefined", ["engine.queue"], id="failed"),
    ],
)
def test_compiling_a_grammar_is_a_span(simulate: Simulate, grammar: str, names: list[str]) -> None:
    simulation = simulate(eos=(EOS,))
    spans = traced(simulation)
    add = Add(sequence_id="first", prompt=(1, 2), max_tokens=4, sampling=GREEDY, grammar=grammar, traceparent=FIRST)
    simulation.engine.add(b"tenant", add)
    while simulation.engine.has_work:
        simulation.engine.step()
    assert spans.of(FIRST) == ["engine.compile_grammar", *names]
    compiled, queue = spans.find(FIRST, "engine.compile_grammar"), spans.find(FIRST, "engine.queue")
    assert queue.started_ns <= compiled.started_ns <= compiled.ended_ns <= queue.ended_ns
    assert (compiled.failure is None) == (queue.failure is None)


def test_exported_spans_keep_their_times() -> None:
    kept, provider = InMemorySpanExporter(), TracerProvider(shutdown_on_exit=False)
    provider.add_span_processor(SimpleSpanProcessor(kept))
    sink = OtelSpanSink(provider)
    child = SpanRecord(name="store.disk.read", scope="loramux.adapter_store", started_ns=5, ended_ns=7)
    sink.record(
        FIRST,
        SpanRecord(
            name="engine.load_adapter", scope="loramux.engine", started_ns=3, ended_ns=9, children=(child,), failure="x"
        ),
    )
    sink.close(60.0)
    inner, outer = kept.get_finished_spans()
    assert (outer.start_time, outer.end_time, inner.start_time, inner.end_time) == (3, 9, 5, 7)
    assert outer.parent is not None
    assert f"{outer.parent.span_id:016x}" == "00f067aa0ba902b7"
    assert inner.parent is not None
    assert outer.context is not None
    assert inner.parent.span_id == outer.context.span_id
    assert f"{outer.context.trace_id:032x}" == "a" * 32
    assert not outer.status.is_ok


def test_hanging_exporter_does_not_delay_the_engine() -> None:
    may_export, has_exported = threading.Event(), threading.Event()

    class Stuck(InMemorySpanExporter):
        def export(self, spans: object) -> object:  # type: ignore[override]
            may_export.wait(60)
            has_exported.set()
            return super().export(())

    provider = TracerProvider(shutdown_on_exit=False)
    provider.add_span_processor(SimpleSpanProcessor(Stuck()))
    sink = OtelSpanSink(provider)
    span = SpanRecord(name="engine.queue", scope="loramux.engine", started_ns=1, ended_ns=2)
    for _ in range(2 * MAX_WAITING):
        sink.record(FIRST, span)
    assert not has_exported.is_set(), "excess spans are dropped"
    started_s = time.monotonic()
    sink.close(0.1)
    assert not has_exported.is_set(), "spans that wait are given up"
    assert time.monotonic() - started_s < 30
    may_export.set()


def imported(statements: list[ast.stmt]) -> set[str]:
    """The modules imported when a module's top-level statements run."""
    found: set[str] = set()
    for statement in statements:
        match statement:
            case ast.Import(names=names):
                found |= {alias.name for alias in names}
            case ast.ImportFrom(module=str(module)):
                found.add(module)
            case ast.Try(body=body, handlers=handlers):
                found |= imported(body) | imported([line for handler in handlers for line in handler.body])
            case ast.If(test=ast.Name(id="TYPE_CHECKING")):
                continue
            case ast.If(body=body, orelse=orelse):
                found |= imported(body) | imported(orelse)
    return found


def test_only_otel_spans_imports_opentelemetry() -> None:
    root = Path(__file__).parents[3]
    users = {
        path.relative_to(root).as_posix()
        for folder in ("kernels", "adapter_store", "engine")
        for path in (root / folder).rglob("*.py")
        for name in imported(ast.parse(path.read_text()).body)
        if name.split(".")[0] == "opentelemetry" or name == "loramux.engine.tracing.otel_spans"
    }
    assert users == {"engine/tracing/otel_spans.py"}


@pytest.fixture(autouse=True)
def no_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OTEL_SDK_DISABLED", raising=False)
