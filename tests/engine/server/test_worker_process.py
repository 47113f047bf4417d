from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterable
from contextlib import suppress
from multiprocessing import Pipe
from pathlib import Path
from typing import Any, cast

import msgspec
import pytest

from loramux.engine.execution.graph_executor import GraphExecutor
from loramux.engine.execution.step_shape import StepShape
from loramux.engine.loop import assembly
from loramux.engine.loop.config import EngineConfig
from loramux.engine.parallel.worker import Worker
from loramux.engine.parallel.worker_messages import RunStep, ToWorker, WarmUp
from loramux.engine.protocol.errors import PoolTooSmall
from loramux.engine.sequences.batch import NO_ROWS, Batch
from loramux.engine.server import worker_process
from loramux.engine.server.process import EXIT_DEVICE_FAILED, EXIT_REFUSED
from tests.engine.device.fake_card import out_of_memory

MAIN = "import sys; from loramux.engine.server.worker_process import main; main(); print('torch' in sys.modules)"
CONFIG = msgspec.json.encode(EngineConfig(model_dir="", blob_url="", cache_dir="", tensor_parallel_size=2))
WAIT_S = 120.0


class FullExecutor(GraphExecutor):
    """An executor on a GPU whose memory does not suffice."""

    def __init__(self) -> None:
        return

    def warm_up(self, shapes: Iterable[StepShape], captures: bool = True) -> None:
        raise out_of_memory()

    def submit(self, batch: Batch) -> Any:
        raise out_of_memory()


def assembles(monkeypatch: pytest.MonkeyPatch, assemble: Callable[[], Worker]) -> None:
    monkeypatch.setattr(assembly, "assemble_worker", lambda config, group, join: assemble())


def full_worker() -> Worker:
    unused = cast(Any, None)
    return Worker(FullExecutor(), unused, unused, unused, unused)


def test_a_worker_whose_engine_has_ended_exits_before_it_imports_torch() -> None:
    # No process has PID 0, so this is the PID of an engine that has ended.
    arguments = (sys.executable, "-c", MAIN, "0", "meeting", "1", "0")
    done = subprocess.run(arguments, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=True)
    assert (done.stdout, done.stderr) == ("False\n", "")


def test_a_worker_that_refuses_its_share_stays_until_the_engine_has_read_why(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse() -> Worker:
        raise PoolTooSmall("the pool is too large")

    assembles(monkeypatch, refuse)
    ours, theirs = Pipe()

    def work() -> None:
        with theirs, suppress(EOFError):
            worker_process._work(theirs, Path("meeting"), 1)

    thread = threading.Thread(target=work)
    thread.start()
    ours.send_bytes(CONFIG)
    assert ours.recv_bytes() == b"the pool is too large"
    thread.join(0.1)
    assert thread.is_alive()
    ours.close()
    thread.join(WAIT_S)
    assert not thread.is_alive()


NO_ROOM = "the model and the page pool leave no GPU memory for a step of 16 tokens: "
FAILED = "the GPU of tensor-parallel worker 1 failed: CUDA out of memory. Tried to allocate 2.00 GiB."


@pytest.mark.parametrize(
    ("message", "status", "said"),
    [(WarmUp(16, 4), EXIT_REFUSED, NO_ROOM), (RunStep.of(NO_ROWS), EXIT_DEVICE_FAILED, FAILED)],
    ids=["warm-up", "step"],
)
def test_a_worker_without_memory_for_a_step_ends_with_one_sentence(
    message: ToWorker,
    status: int,
    said: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assembles(monkeypatch, full_worker)
    check_end(message, status, said, monkeypatch, capsys)


def test_a_worker_whose_share_does_not_fit_its_gpu_ends_with_one_sentence(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail() -> Worker:
        raise out_of_memory()

    assembles(monkeypatch, fail)
    check_end(RunStep.of(NO_ROWS), EXIT_DEVICE_FAILED, FAILED, monkeypatch, capsys)


def check_end(
    message: ToWorker, status: int, said: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Check that a worker exits at this message."""

    def end(code: int) -> None:
        raise SystemExit(code)

    monkeypatch.setattr(os, "_exit", end)
    ours, theirs = Pipe()
    with ours, theirs:
        ours.send_bytes(CONFIG)
        ours.send_bytes(msgspec.msgpack.encode(message))
        with pytest.raises(SystemExit) as ended:
            worker_process._work(theirs, Path("meeting"), 1)
    assert ended.value.code == status
    [line] = capsys.readouterr().err.splitlines()
    assert line.startswith(said)
