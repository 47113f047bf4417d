"""Runs steps and places adapters on all workers of a tensor-parallel engine."""

from __future__ import annotations

import queue
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from loramux.adapter_store.formats.packed.packing import PackedAdapter
from loramux.adapter_store.tiers.staged_adapter import StagedAdapter
from loramux.engine.adapters.adapter_load import AdapterLoad
from loramux.engine.adapters.page_copier import QUICK_COPY_BYTES, Copier
from loramux.engine.device.device_faults import reason_of
from loramux.engine.execution.executor import Executor, Forward
from loramux.engine.execution.graph_executor import GraphExecutor
from loramux.engine.parallel.sharded_adapters import AdapterDivider
from loramux.engine.parallel.worker_messages import PlaceAdapter, RunStep, WarmUp
from loramux.engine.parallel.workers import Workers
from loramux.engine.sequences.batch import Batch

END_WAIT_S = 1.0
"""How long to wait for the end of a worker after a failed exchange, in seconds."""


class ParallelExecutor:
    """Runs each batch on all workers, and samples on worker 0, whose executor is `executor`.

    All workers execute the same messages in the same order, so their pools have the same contents in the same pages,
    each with its own heads.
    """

    def __init__(self, executor: Executor, workers: Workers) -> None:
        self._executor = executor
        self._workers = workers

    def submit(self, batch: Batch) -> Forward:
        """Raises WorkerLost if a worker has ended."""
        self._workers.send(RunStep.of(batch))
        try:
            return self._executor.submit(batch)
        except RuntimeError:
            # An exchange fails as soon as a worker has ended, perhaps before its connection is closed.
            self._workers.check(END_WAIT_S)
            raise

    def warm_up(self, max_batch_tokens: int, max_sequences: int) -> None:
        """Warm up all workers, each of which has a GraphExecutor."""
        assert isinstance(self._executor, GraphExecutor)
        message = WarmUp(max_batch_tokens, max_sequences)
        self._workers.send(message)
        self._executor.warm_up(message.shapes)


@dataclass(frozen=True, slots=True, eq=False)
class _Divided:
    """The share of worker 0 in an adapter, and the messages with the shares of the others."""

    own: PackedAdapter
    messages: Sequence[bytes]


class ParallelCopier:
    """Divides adapters with `divider`, sends the other workers their shares, and copies the share of worker 0 with
    `copier`.

    Adapters are divided on a separate thread, which calls `wake` at the end. A worker copies and publishes an adapter
    before it reads further messages. Worker 0 may publish it later. No step reads the adapter before that. Steps wait
    while the workers copy, so a poll sends no further adapter once those that it has sent exceed QUICK_COPY_BYTES.
    """

    def __init__(self, copier: Copier, workers: Workers, divider: AdapterDivider, wake: Callable[[], None]) -> None:
        self._copier = copier
        self._workers = workers
        self._divider = divider
        self._wake = wake
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="adapter-divider")
        self._divided: queue.SimpleQueue[tuple[AdapterLoad, _Divided | str]] = queue.SimpleQueue()

    def copy(self, load: AdapterLoad) -> None:
        assert load.staged is not None
        self._thread.submit(self._divide, load, load.staged)

    def poll(self) -> list[tuple[AdapterLoad, str | None]]:
        settled: list[tuple[AdapterLoad, str | None]] = []
        num_bytes = 0
        while num_bytes <= QUICK_COPY_BYTES and not self._divided.empty():
            load, divided = self._divided.get()
            if isinstance(divided, str):
                settled.append((load, divided))
            else:
                num_bytes += self._place(load, divided)
        if not self._divided.empty():
            self._wake()
        return [*settled, *self._copier.poll()]

    def close(self) -> None:
        self._thread.shutdown(wait=True, cancel_futures=True)
        self._copier.close()

    def _place(self, load: AdapterLoad, divided: _Divided) -> int:
        """Send the shares of an adapter, and return its size in bytes.

        Only the engine's thread sends messages, so each worker reads them in the order of steps.
        """
        staged = load.staged
        assert staged is not None
        load.staged = StagedAdapter(divided.own, lambda digest: None, staged.stages)
        staged.release()
        self._workers.send_each(divided.messages)
        self._copier.copy(load)
        return staged.packed.payload.nbytes

    def _divide(self, load: AdapterLoad, staged: StagedAdapter) -> None:
        divided: _Divided | str
        try:
            own, *others = self._divider.shares_of(staged.packed)
            encode = self._workers.encode
            divided = _Divided(own, [encode(PlaceAdapter.of(load.slot, load.pages, share)) for share in others])
        except Exception as error:
            print(f"dividing adapter {load.digest} among the workers failed: {reason_of(error)}", file=sys.stderr)
            divided = f"dividing failed: {type(error).__name__}"
        self._divided.put((load, divided))
        self._wake()
