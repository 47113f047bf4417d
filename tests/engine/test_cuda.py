"""What the GPU's accelerator does when CUDA fails, on a CUDA that the test plays."""

from __future__ import annotations

import ctypes
import gc
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from loramux.engine import cuda
from loramux.engine.cuda import CudaAccelerator, captured, loaded_runtimes


class PlayedGraph:
    """A graph that notes what is asked of it; a capture that was disturbed cannot be ended without an error."""

    def __init__(self, ends_with: Exception | None = None) -> None:
        self.calls: list[str] = []
        self._ends_with = ends_with

    def capture_begin(self, pool: object, capture_error_mode: str) -> None:
        self.calls.append("begin")

    def capture_end(self) -> None:
        self.calls.append("end")
        if self._ends_with is not None:
            raise self._ends_with

    def replay(self) -> None:
        self.calls.append("replay")


def test_a_captured_step_is_replayed() -> None:
    graph = PlayedGraph()
    captured(cast(Any, graph), None, lambda: graph.calls.append("step"))()
    assert graph.calls == ["begin", "step", "end", "replay"]
    assert gc.isenabled()


@pytest.mark.parametrize("ends_with", [None, RuntimeError("the capture was invalidated")], ids=["clean", "invalidated"])
def test_a_step_that_raises_ends_its_capture(ends_with: Exception | None) -> None:
    graph = PlayedGraph(ends_with)

    def step() -> None:
        assert not gc.isenabled()
        raise ValueError("the step's own")

    with pytest.raises(ValueError, match="the step's own"):
        captured(cast(Any, graph), None, step)
    assert graph.calls == ["begin", "end"]
    assert gc.isenabled()


@pytest.mark.parametrize("code", [0, 2], ids=["registered", "refused"])
def test_memory_that_the_driver_does_not_register_stays_pageable(
    code: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    cleared: list[str] = []
    runtime = SimpleNamespace(cudaGetLastError=lambda: cleared.append("cleared"))
    registered: list[tuple[int, int]] = []

    def register(pointer: int, num_bytes: int, flags: int) -> int:
        registered.append((pointer, num_bytes))
        return code

    monkeypatch.setattr(torch.cuda, "cudart", lambda: SimpleNamespace(cudaHostRegister=register))
    monkeypatch.setattr(cuda, "loaded_runtimes", lambda: [runtime, runtime])
    accelerator = CudaAccelerator.__new__(CudaAccelerator)
    memory = torch.zeros(4096, dtype=torch.uint8)

    accelerator.pin(memory[:0])
    accelerator.pin(memory)

    assert registered == [(memory.data_ptr(), 4096)]
    assert cleared == (["cleared"] * 2 if code else []), "a refusal stays pending in every runtime until it is read"
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == (1 if code else 0)
    assert all("4096 bytes stays pageable" in line for line in lines)


def test_the_runtimes_of_this_process_are_found() -> None:
    assert all(isinstance(runtime, ctypes.CDLL) for runtime in loaded_runtimes())
