"""A worker of a tensor-parallel engine on the GPU's path, which records what must be alike in all workers.

Gloo takes the place of NCCL. On a machine with a GPU, all workers with the GPU's kernels use this GPU.

The command line is `python -m tests.conformance.gpu_worker KERNELS FILE ...`, with the arguments of a worker. KERNELS
is `reference` or `gpu`. FILE gets a line for each exchange and each capture, in order.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from loramux.engine.device.accelerator import DeviceMemory, HostAccelerator
from loramux.engine.device.backend import Backend
from loramux.engine.execution import step_shape
from loramux.engine.loop import assembly
from loramux.engine.parallel.process_groups import GlooGroup
from loramux.engine.server import worker_process
from tests.engine.device.gpu_backend import capture_early, gpu_backend, plain_backend
from tests.kernels.gpu.interpreted import HAS_GPU

FREE_BYTES = (2 << 30) + (48 << 20), (2 << 30) + (40 << 20)
"""Free memory of the devices of worker 0 and worker 1."""

CACHED_BYTES = 12 << 20
"""Memory that a worker caches for activations when it compiles its kernels."""


class RecordingAccelerator(HostAccelerator):
    """The memory of worker `worker`'s device. Its captures are noted."""

    def __init__(self, worker: int, note: Callable[[str], None]) -> None:
        self._worker = worker
        self._note = note
        self.release_unused()

    def memory(self) -> DeviceMemory:
        return DeviceMemory(self.free, 3 << 30)

    def release_unused(self) -> None:
        self.free = FREE_BYTES[self._worker]

    def capture(self, step: Callable[[], None]) -> Callable[[], None]:
        self._note("capture")
        return step


def recording_backend(
    kernels: str, worker: int, note: Callable[[str], None], monkeypatch: pytest.MonkeyPatch
) -> Backend:
    """The backend of a worker. Notes the exchanges of this process and its captures."""
    for name in ("sum", "join_columns", "broadcast"):
        exchange = getattr(GlooGroup, name)

        def noted(group: GlooGroup, x: torch.Tensor, name: str = name, exchange: Any = exchange) -> Any:
            if group._group is not None:
                note(f"{name} {tuple(x.shape)}")
            return exchange(group, x)

        monkeypatch.setattr(GlooGroup, name, noted)
    if HAS_GPU and kernels == "gpu":
        # Gloo's exchanges cannot be captured.
        monkeypatch.setattr(step_shape, "MAX_GRAPH_TOKENS", 0)
        return gpu_backend(monkeypatch)
    accelerator = RecordingAccelerator(worker, note)
    if kernels == "gpu":
        return replace(gpu_backend(monkeypatch), accelerator=accelerator)
    capture_early(monkeypatch)

    # Worker 0 runs all shapes before the workers are connected, as if to compile their kernels.
    def compile_ahead(launch: Callable[[], None], num_processes: int) -> None:
        launch()
        accelerator.free -= CACHED_BYTES

    return replace(plain_backend(accelerator, compiles=True), compile_ahead=compile_ahead)


if __name__ == "__main__":
    kernels, path = sys.argv.pop(1), Path(sys.argv.pop(1))

    def write(line: str) -> None:
        with path.open("a") as file:
            file.write(f"{line}\n")

    backend = recording_backend(kernels, int(sys.argv[3]), write, pytest.MonkeyPatch())
    vars(assembly)["open_backend"] = lambda *settings: backend
    worker_process.main()
