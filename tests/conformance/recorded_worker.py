"""A worker of a tensor-parallel engine that records what it executes.

The command line is `python -m tests.conformance.recorded_worker FILE ...`, with the arguments of a worker. FILE gets a
line for each adapter that is placed and for each step, as `placed` and `stepped` write them.
"""

from __future__ import annotations

import hashlib
import sys
from pathlib import Path

import numpy as np

from loramux.engine.adapters.slot_tables import SlotTables
from loramux.engine.parallel.worker import Worker
from loramux.engine.parallel.worker_messages import _BATCH_ARRAYS, PlaceAdapter, ToWorker
from loramux.engine.sequences.batch import Batch
from loramux.engine.server import worker_process


def placed(slot: int, pages: list[int], digest: str) -> str:
    return f"adapter {digest} in slot {slot}, pages {pages}"


def stepped(batch: Batch, tables: SlotTables) -> str:
    """A hash of a step's rows and pages, and of where and how the tables say that its adapters are stored."""
    hashed = hashlib.sha256()
    for name in _BATCH_ARRAYS:
        hashed.update(np.ascontiguousarray(getattr(batch, name)).tobytes())
    slots = np.unique(batch.slots[batch.slots >= 0])
    for of_layers in (tables.device, tables.device.outer, tables.device.trained_rows):
        if of_layers is not None:
            for table in (of_layers.page_table, of_layers.off, of_layers.rank, of_layers.scale):
                hashed.update(table.numpy()[slots].tobytes())
    return f"step {len(batch.tokens)} {hashed.hexdigest()}"


class RecordedWorker(Worker):
    path: Path

    def execute(self, message: ToWorker) -> None:
        assert isinstance(self._tables, SlotTables)
        if isinstance(message, PlaceAdapter):
            line = placed(message.slot, message.pages, message.digest)
        else:
            line = stepped(message.batch, self._tables)
        with self.path.open("a") as file:
            file.write(f"{line}\n")
        super().execute(message)


if __name__ == "__main__":
    from loramux.engine.loop import assembly

    number = sys.argv[4]
    RecordedWorker.path = Path(f"{sys.argv.pop(1)}.{number}")
    vars(assembly)["Worker"] = RecordedWorker
    worker_process.main()
