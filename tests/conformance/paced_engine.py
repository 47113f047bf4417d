"""An engine process without a model: the real loop, engine and scheduler on a simulated device, at a fixed pace.

`python -m tests.conformance.paced_engine MODEL_DIR ENDS SOCKET` appends a line to the file ENDS when a sequence ends,
with the tokens that the engine committed and drafted. The ledger is checked against this file.

A server starts it as its engine with one more argument, the descriptor of the step record. Since such an engine can be
killed, it also records the arrival and each output of a sequence in the file ENDS.outputs.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import zmq

from loramux.engine.architectures.model_files import base_sha256, model_sha256
from loramux.engine.drafting import speculation
from loramux.engine.loop.config import EngineConfig
from loramux.engine.protocol.messages import EngineReady
from loramux.engine.server.process import EngineServer
from loramux.engine.server.step_record import StepRecord
from tests.conformance.drawn_requests import LAB_ADAPTERS
from tests.conformance.noted_engine import NotedEngine
from tests.engine.simulated_engine import simulate_engine
from tests.platform.ready_adapters import digest_of

STEP_S = 0.01
VOCAB_SIZE, EOS = 1024, 1
"""Size of the vocabulary and end-of-sequence token of the demo's base."""


def main() -> None:
    model, ends, path = Path(sys.argv[1]), sys.argv[2], sys.argv[3]
    record_fd = int(sys.argv[4]) if len(sys.argv) > 4 else None
    max_sequences = 256
    if record_fd is not None:
        max_sequences = msgspec.json.decode(sys.stdin.buffer.readline(), type=EngineConfig).max_sequences
    max_model_len = json.loads((model / "config.json").read_bytes())["max_position_embeddings"]
    wake, wake_write = os.pipe()
    os.set_blocking(wake_write, False)
    # A real engine drafts only in small steps, which the load of the labs leaves too rarely.
    speculation.MAX_SEQUENCES = max_sequences
    simulation = simulate_engine(
        num_pages=8192,
        max_batch_tokens=2048,
        max_sequences=max_sequences,
        max_model_len=max_model_len,
        adapters={digest_of(name): 1 for name in LAB_ADAPTERS},
        eos=(EOS,),
        vocab_size=VOCAB_SIZE,
        grammar_process=(
            *(sys.executable, "-P", "-m", "loramux.engine.constraints.grammar_process"),
            *(str(model.absolute()), str(VOCAB_SIZE), str(EOS)),
        ),
        grammar_clock=time.monotonic,
        speculates=True,
        max_draft_rows=1024,
    )
    ready = EngineReady(
        max_model_len=max_model_len,
        num_pages=8192,
        page_tokens=16,
        max_sequences=max_sequences,
        device="cpu",
        dtype="float32",
        model_sha256=model_sha256(model),
        base_sha256=base_sha256(model),
    )
    context = zmq.Context()
    socket = context.socket(zmq.ROUTER)
    socket.setsockopt(zmq.SNDHWM, 0)
    socket.setsockopt(zmq.RCVHWM, 0)
    socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
    socket.bind(f"ipc://{path}")
    ended = threading.Event()

    def follow_parent() -> None:
        sys.stdin.buffer.read()
        ended.set()
        os.write(wake_write, b"\0")

    threading.Thread(target=follow_parent, daemon=True).start()
    with ExitStack() as stack:
        file = stack.enter_context(open(ends, "a", encoding="utf-8"))
        outputs = None if record_fd is None else stack.enter_context(open(f"{ends}.outputs", "a", encoding="utf-8"))
        engine = NotedEngine(simulation, STEP_S, file, outputs)
        # The simulated device keeps all batches for tests. In a long-running server they would fill the memory.
        simulation.executor.batches = _Nothing()  # type: ignore[assignment]
        record = StepRecord(StepRecord.new_file(max_sequences) if record_fd is None else record_fd)
        assembled = SimpleNamespace(
            engine=engine, ready=ready, stager=simulation.stager, grammars=simulation.grammars, workers=None
        )
        EngineServer(assembled, socket, wake, record, ended).serve()  # type: ignore[arg-type]
    context.destroy(linger=0)


class _Nothing(list[Any]):
    def append(self, item: Any) -> None:
        return


if __name__ == "__main__":
    main()
