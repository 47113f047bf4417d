"""The real engine process, except that a step with the token HANGING_TOKEN never ends."""

from __future__ import annotations

import threading
import time

from loramux.engine.execution.direct_executor import DirectExecutor
from loramux.engine.execution.sampler import FinishedStep
from loramux.engine.sequences.batch import Batch
from loramux.engine.server import process

HANGING_TOKEN = 666
submit = DirectExecutor.submit


def submit_or_hang(self: DirectExecutor, batch: Batch) -> FinishedStep:
    if HANGING_TOKEN in batch.tokens:
        time.sleep(3600)
    return submit(self, batch)  # type: ignore[return-value]


if __name__ == "__main__":
    threading.current_thread().name = "engine"
    DirectExecutor.submit = submit_or_hang  # type: ignore[method-assign]
    process.main()
