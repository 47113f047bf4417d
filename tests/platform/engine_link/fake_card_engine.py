"""The real engine process on a fake GPU: `fake_card_engine.py full|lost SOCKET RECORD`.

With `full`, the GPU has no memory for a context. With `lost`, a step with the token LOSING_TOKEN fails as if the GPU
were lost.
"""

from __future__ import annotations

import sys
import threading
from functools import partial

from loramux.engine.execution.device_sampler import SampledStep
from loramux.engine.execution.graph_executor import GraphExecutor
from loramux.engine.sequences.batch import Batch
from loramux.engine.server import process
from tests.engine.device.fake_card import FakeCard, cuda_error, fake_backend

LOSING_TOKEN = 666
card = FakeCard()
submit = GraphExecutor.submit


def submit_or_lose(self: GraphExecutor, batch: Batch) -> SampledStep:
    if LOSING_TOKEN in batch.tokens:
        card.lost = cuda_error("the device fell off the bus")
    return submit(self, batch)  # type: ignore[return-value]


if __name__ == "__main__":
    threading.current_thread().name = "engine"
    if sys.argv.pop(1) == "full":
        card.broken["launch"] = cuda_error("out of memory")
    GraphExecutor.submit = submit_or_lose  # type: ignore[method-assign]
    process.assemble_engine = partial(process.assemble_engine, backend=fake_backend(card))  # type: ignore[attr-defined]
    process.main()
