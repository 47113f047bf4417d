from __future__ import annotations

import ast
import os
import subprocess
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from triton.compiler.errors import CompilationError
from triton.runtime.errors import OutOfResources, PTXASError

from loramux.engine.device.device_faults import MAX_FAULT, device_fault
from loramux.engine.parallel.workers import WorkerLost
from loramux.engine.server import process
from loramux.engine.server.process import EXIT_DEVICE_FAILED, EXIT_REFUSED
from loramux.engine.server.step_record import StepRecord
from tests.engine.device.fake_card import cuda_error, out_of_memory
from tests.engine.server.assembled_parts import READY, Stager
from tests.engine.simulated_engine import simulate_engine

KERNEL = "@triton.jit\ndef kernel(x):\n    y = tl.load(x)\n    return tl.dot(y, y)\n"


def raised_by(module: str, error: Exception) -> Exception:
    try:
        exec("def work(error):\n    raise error\nwork(error)", {"__name__": module, "error": error})
    except Exception as caught:
        return caught
    raise AssertionError


FAULTS = {
    "launch": (cuda_error("unspecified launch failure"), "CUDA error: unspecified launch failure"),
    "lost": (cuda_error("the device fell off the bus"), "CUDA error: the device fell off the bus"),
    "memory": (out_of_memory(), "CUDA out of memory. Tried to allocate 2.00 GiB."),
    "library": (
        RuntimeError("CUDA error: CUBLAS_STATUS_NOT_INITIALIZED when calling `cublasCreate(handle)`"),
        "CUDA error: CUBLAS_STATUS_NOT_INITIALIZED",
    ),
    "triton's launch": (
        RuntimeError("Triton Error [CUDA]: an illegal memory access was encountered"),
        "Triton Error [CUDA]: an illegal memory access",
    ),
    "compile": (
        CompilationError(KERNEL, ast.parse(KERNEL).body[0], "Input shapes should have M >= 16"),
        "Input shapes should have M >= 16",
    ),
    "resources": (OutOfResources(262144, 101376, "shared memory"), "out of resource: shared memory, Required: 262144"),
    "ptxas": (PTXASError("`ptxas` failed with error code 255\nstderr"), "`ptxas` failed with error code 255"),
    "no compiler": (
        raised_by("triton.runtime.build", RuntimeError("Failed to find C compiler.")),
        "Failed to find C compiler.",
    ),
    "compiler": (
        raised_by("triton.runtime.build", subprocess.CalledProcessError(1, ["gcc", "main.c"])),
        "Command '['gcc', 'main.c']' returned non-zero exit status 1.",
    ),
    "says nothing": (torch.OutOfMemoryError(), "OutOfMemoryError"),
}


@pytest.mark.parametrize(("error", "said"), FAULTS.values(), ids=FAULTS.keys())
def test_device_failure_is_one_line(error: Exception, said: str) -> None:
    fault = device_fault(error)
    assert fault is not None
    assert fault.startswith(said)
    assert "\n" not in fault
    assert len(fault) <= MAX_FAULT


OTHERS = {
    "shapes": RuntimeError("The size of tensor a (3) must match the size of tensor b (4) at non-singleton dimension 0"),
    "value": ValueError("a batch of 65 rows does not fit 64"),
    "assertion": AssertionError(),
    "a kernel called wrongly": raised_by("triton.runtime.jit", TypeError("missing a required argument: 'x'")),
    "not triton": raised_by("tritonlike", OSError("no such file")),
}


@pytest.mark.parametrize("error", OTHERS.values(), ids=OTHERS.keys())
def test_program_bug_is_not_a_device_failure(error: Exception) -> None:
    assert device_fault(error) is None


class Ended(BaseException):
    """Raised instead of exiting the process. No `except Exception` can catch it."""


class Loop:
    def __init__(self, monkeypatch: pytest.MonkeyPatch, directory: Path) -> None:
        self.codes: list[int] = []
        self.simulation = simulate_engine(lookahead=True)
        self._directory = directory
        self._monkeypatch = monkeypatch
        monkeypatch.setattr(os, "_exit", self._end)
        monkeypatch.setattr(process, "freeze_gc", lambda: None)

    def _end(self, code: int) -> None:
        self.codes.append(code)
        raise Ended

    def run(self, error: Exception, fails_in: str) -> None:
        def fail(*_: Any) -> Any:
            raise error

        forward = SimpleNamespace(choose=lambda masks, unused: SimpleNamespace(tokens=fail))
        submit = fail if fails_in == "submit" else lambda batch: forward
        self._monkeypatch.setattr(self.simulation.executor, "submit", submit)
        self.simulation.add("live")
        stager = Stager()
        wake_read, wake_write = os.pipe()
        record = StepRecord(StepRecord.new_file(max_sequences=4))
        assembled = SimpleNamespace(
            engine=self.simulation.engine,
            ready=READY,
            stager=stager,
            grammars=SimpleNamespace(
                preload=lambda: None, receive=lambda: None, fileno=self.simulation.grammars.fileno
            ),
            workers=None,
            close=lambda: None,
        )
        try:
            process._serve(cast(Any, assembled), self._directory / "engine", wake_read, record, threading.Event())
        finally:
            stager.close()
            os.close(wake_read)
            os.close(wake_write)


@pytest.fixture
def loop(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Loop:
    return Loop(monkeypatch, tmp_path)


@pytest.mark.parametrize("status", [EXIT_REFUSED, EXIT_DEVICE_FAILED])
def test_the_reason_of_a_worker_stays_the_last_line(
    loop: Loop, status: int, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(Ended):
        loop.run(WorkerLost(f"tensor-parallel worker 1 has ended with exit status {status}", status), "submit")
    assert loop.codes == [status]
    assert capsys.readouterr().err == ""


def test_a_killed_worker_is_named(loop: Loop) -> None:
    said = "tensor-parallel worker 1 has ended with exit status -9"
    with pytest.raises(WorkerLost, match=said):
        loop.run(WorkerLost(said, -9), "submit")
    assert not loop.codes


@pytest.mark.parametrize("fails_in", ["submit", "tokens"])
@pytest.mark.parametrize("fault", ["launch", "memory", "compile"])
def test_device_failure_ends_the_loop_with_one_sentence(
    loop: Loop, fault: str, fails_in: str, capsys: pytest.CaptureFixture[str]
) -> None:
    error, said = FAULTS[fault]
    with pytest.raises(Ended):
        loop.run(error, fails_in)
    assert loop.codes == [EXIT_DEVICE_FAILED]
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"the GPU failed: {said}")


def test_program_bug_keeps_its_traceback(loop: Loop, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(RuntimeError, match="must match"):
        loop.run(OTHERS["shapes"], "submit")
    assert loop.codes == []
    assert not capsys.readouterr().err
