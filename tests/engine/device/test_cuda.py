from __future__ import annotations

import ctypes
import gc
import os
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from loramux.adapter_store.tiers.host_slab import mapped, shared_memory
from loramux.engine.device import cuda
from loramux.engine.device.cuda import CudaAccelerator, captured, loaded_runtimes
from tests.kernels.gpu.interpreted import HAS_GPU

needs_gpu = pytest.mark.skipif(not HAS_GPU, reason="this machine has no GPU")
ROW_BYTES = 1 << 20


class FakeGraph:
    """If `ends_with` is set, ending the capture raises this error."""

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
    graph = FakeGraph()
    captured(cast(Any, graph), None, lambda: graph.calls.append("step"))()
    assert graph.calls == ["begin", "step", "end", "replay"]
    assert gc.isenabled()


@pytest.mark.parametrize("ends_with", [None, RuntimeError("the capture was invalidated")], ids=["clean", "invalidated"])
def test_a_step_that_raises_ends_its_capture(ends_with: Exception | None) -> None:
    graph = FakeGraph(ends_with)

    def step() -> None:
        assert not gc.isenabled()
        raise ValueError("the step's own")

    with pytest.raises(ValueError, match="the step's own"):
        captured(cast(Any, graph), None, step)
    assert graph.calls == ["begin", "end"]
    assert gc.isenabled()


@pytest.mark.parametrize("code", [0, 2], ids=["registered", "refused"])
def test_memory_refused_by_the_driver_stays_pageable(
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
    assert cleared == (["cleared"] * 2 if code else []), "a refusal stays pending in every runtime until read"
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == (1 if code else 0)
    assert all("4096 bytes stays pageable" in line for line in lines)


def test_loaded_cuda_runtimes_are_found() -> None:
    assert all(isinstance(runtime, ctypes.CDLL) for runtime in loaded_runtimes())


@pytest.fixture
def accelerator() -> Iterator[CudaAccelerator]:
    default = torch.cuda.current_stream()
    yield CudaAccelerator(torch.device("cuda", torch.cuda.current_device()))
    torch.cuda.set_stream(default)


@pytest.fixture
def host_tier() -> Iterator[torch.Tensor]:
    """Shared memory like the staging process's, uint8 `[8, ROW_BYTES]`."""
    descriptor = shared_memory(8 * ROW_BYTES)
    memory = torch.from_numpy(mapped(descriptor))
    os.close(descriptor)
    memory.random_(256, generator=torch.Generator().manual_seed(1))
    yield memory.view(8, ROW_BYTES)
    torch.cuda.cudart().cudaHostUnregister(memory.data_ptr())


@needs_gpu
def test_shared_memory_is_registered(
    accelerator: CudaAccelerator, host_tier: torch.Tensor, capsys: pytest.CaptureFixture[str]
) -> None:
    accelerator.pin(host_tier.flatten())
    assert host_tier.is_pinned()
    assert not capsys.readouterr().err
    require_working(accelerator, host_tier)


@needs_gpu
def test_refused_registration_does_not_break_later_calls(
    accelerator: CudaAccelerator, host_tier: torch.Tensor, capsys: pytest.CaptureFixture[str]
) -> None:
    accelerator.pin(host_tier.flatten())
    # CUDA refuses to register the same memory twice, and the error stays pending.
    accelerator.pin(host_tier.flatten())
    assert f"{host_tier.numel()} bytes stays pageable" in capsys.readouterr().err
    require_working(accelerator, host_tier)


@needs_gpu
def test_unregistered_memory_can_be_uploaded(accelerator: CudaAccelerator) -> None:
    require_working(accelerator, torch.arange(8 * ROW_BYTES).to(torch.uint8).view(8, ROW_BYTES))


def require_working(accelerator: CudaAccelerator, host_tier: torch.Tensor) -> None:
    pool = torch.zeros(4, ROW_BYTES, dtype=torch.uint8, device=accelerator.device)
    accelerator.upload(pool, [2, 0], host_tier[5:7], accelerator.fence())
    sums = torch.zeros(4, dtype=torch.int64, device=accelerator.device)

    def step() -> None:
        sums.copy_(pool.sum(1))

    # Load the step's kernels before capturing it.
    step()
    replay = accelerator.capture(step)
    sums.zero_()
    replay()
    found = accelerator.download(sums)
    accelerator.fence().wait()
    assert found.tolist() == [int(host_tier[6].sum()), 0, int(host_tier[5].sum()), 0]
    assert torch.equal(pool[[2, 0]].cpu(), host_tier[5:7])
