"""Runs steps and places adapters on all workers of a tensor-parallel engine."""

from __future__ import annotations

from loramux.engine.adapters.adapter_load import AdapterLoad
from loramux.engine.adapters.page_copier import Copier
from loramux.engine.execution.executor import Executor, Forward
from loramux.engine.parallel.sharded_adapters import AdapterDivider
from loramux.engine.parallel.worker_messages import PlaceAdapter, RunStep
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


class ParallelCopier:
    """Divides adapters with `divider`, copies the share of worker 0 with `copier`, and sends the others theirs.

    A worker copies and publishes an adapter before it reads further messages. Worker 0 may publish it later. No step
    reads the adapter before that.
    """

    def __init__(self, copier: Copier, workers: Workers, divider: AdapterDivider) -> None:
        self._copier = copier
        self._workers = workers
        self._divider = divider

    def copy(self, load: AdapterLoad) -> None:
        assert load.staged is not None
        load.staged = divided = self._divider.divide(load.staged)
        self._workers.send_each([PlaceAdapter.of(load.slot, load.pages, share) for share in divided.others])
        self._copier.copy(load)

    def poll(self) -> list[tuple[AdapterLoad, str | None]]:
        return self._copier.poll()

    def close(self) -> None:
        self._copier.close()
