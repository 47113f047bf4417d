"""Spans of traced requests in the engine: queue, adapter load, grammar compilation, prefill and decode."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

from loramux.engine.adapters.adapter_load import AdapterLoad
from loramux.engine.sequences.sequence import Sequence
from loramux.engine.tracing.spans import SpanRecord, SpanSink


@dataclass(slots=True)
class _Life:
    """When a sequence reached each stage, or None for stages not reached yet."""

    added_ns: int
    began_ns: int | None = None
    first_token_ns: int | None = None


class SequenceTraces:
    """Records spans as the engine's loop reports events. Sequences without a `traceparent` are skipped.

    A sequence has the consecutive spans `engine.queue`, `engine.prefill` and `engine.decode`. If the adapter was not in
    the pool, a span `engine.load_adapter` overlaps the first span. If the grammar was not compiled yet, a span
    `engine.compile_grammar` overlaps it too.
    """

    def __init__(self, sink: SpanSink, clock_ns: Callable[[], int] = time.time_ns) -> None:
        self._sink = sink
        self._clock_ns = clock_ns
        self._lives: dict[Sequence, _Life] = {}

    def added(self, sequence: Sequence) -> None:
        """Record a sequence's arrival. This must be called before any work for the sequence starts."""
        if sequence.add.traceparent is not None:
            self._lives[sequence] = _Life(self._clock_ns())

    def began(self, sequence: Sequence) -> None:
        """Record that the first step with this sequence was submitted."""
        life = self._lives.get(sequence)
        if life is not None:
            life.began_ns = self._clock_ns()

    def committed(self, sequence: Sequence) -> None:
        life = self._lives.get(sequence)
        if life is not None and life.first_token_ns is None:
            life.first_token_ns = self._clock_ns()

    def loaded(self, load: AdapterLoad, waiting: Iterable[Sequence]) -> None:
        """Record that an adapter became resident or failed to load. `waiting` contains the sequences that need it."""
        now_ns = self._clock_ns()
        for sequence in waiting:
            life = self._lives.get(sequence)
            if life is not None and life.began_ns is None and sequence.add.traceparent is not None:
                self._sink.record(sequence.add.traceparent, _load_span(load, life.added_ns, now_ns))

    def compiled(self, sequence: Sequence, failure: str | None) -> None:
        life = self._lives.get(sequence)
        if life is not None and sequence.add.traceparent is not None:
            span = SpanRecord(
                name="engine.compile_grammar",
                scope="loramux.engine",
                started_ns=life.added_ns,
                ended_ns=self._clock_ns(),
                failure=failure,
            )
            self._sink.record(sequence.add.traceparent, span)

    def ended(self, sequence: Sequence, reason: str, code: str | None) -> None:
        life = self._lives.pop(sequence, None)
        traceparent = sequence.add.traceparent
        if life is None or traceparent is None:
            return
        now_ns = self._clock_ns()
        queue = SpanRecord(
            name="engine.queue",
            scope="loramux.engine",
            started_ns=life.added_ns,
            ended_ns=life.began_ns or now_ns,
        )
        spans = [queue]
        if life.began_ns is not None:
            prefill = SpanRecord(
                name="engine.prefill",
                scope="loramux.engine",
                started_ns=life.began_ns,
                ended_ns=life.first_token_ns or now_ns,
                attributes={
                    "loramux.prompt_tokens": sequence.num_prompt,
                    "loramux.cached_tokens": sequence.num_cached,
                },
            )
            spans.append(prefill)
        if life.first_token_ns is not None:
            decode = SpanRecord(
                name="engine.decode",
                scope="loramux.engine",
                started_ns=life.first_token_ns,
                ended_ns=now_ns,
                attributes={"loramux.completion_tokens": sequence.num_completion, "loramux.reason": reason},
            )
            spans.append(decode)
        if reason == "error":
            # Attribute the failure to the stage in which the sequence ended.
            spans[-1] = replace(spans[-1], failure=code or reason)
        for span in spans:
            self._sink.record(traceparent, span)


def _load_span(load: AdapterLoad, added_ns: int, ended_ns: int) -> SpanRecord:
    is_its_own = added_ns <= load.started_ns
    stages = tuple(
        SpanRecord(
            name=f"store.{passed.tier}.{passed.stage}",
            scope="loramux.adapter_store",
            started_ns=passed.started_ns,
            ended_ns=passed.ended_ns,
            attributes={"loramux.bytes": passed.num_bytes},
        )
        for passed in load.stages
    )
    return SpanRecord(
        name="engine.load_adapter",
        scope="loramux.engine",
        # A sequence that arrived during the load waited only for the rest of the load, so its span has no stages.
        started_ns=max(added_ns, load.started_ns),
        ended_ns=ended_ns,
        attributes={"loramux.digest": load.digest, "loramux.pages": load.num_pages, "loramux.joined": not is_its_own},
        failure=load.failure,
        children=stages if is_its_own else (),
    )
