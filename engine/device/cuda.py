"""A CUDA GPU: one stream for steps, another for adapter copies, and one memory pool for graphs."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import itertools
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import torch

from loramux.engine.device.accelerator import DeviceMemory, Fence

UPLOAD_BYTES = 16 << 20
"""Number of bytes that an upload queues before it waits until they are copied. A step's metadata has to wait for queued
bytes.
"""

COPY_BYTES, MIN_COPY_BYTES, NUM_COPIES = 1 << 30, 256 << 20, 5
"""The copies that measure a device's bandwidth: their largest and smallest size in bytes, and their number. Smaller
copies would fit in the L2 cache. Five of the largest take 4 ms on an H100.
"""


class CudaFence:
    """An event on a stream."""

    def __init__(self, stream: torch.cuda.Stream) -> None:
        self.event = torch.cuda.Event()
        self.event.record(stream)

    def wait(self) -> None:
        self.event.synchronize()


class CudaAccelerator:
    """Must be created on the thread that submits steps, because its stream becomes that thread's current stream."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        torch.cuda.set_device(device)
        # A graph cannot be captured on the default stream.
        self._steps = torch.cuda.Stream(device)
        self._uploads = torch.cuda.Stream(device)
        self._graph_pool = torch.cuda.graph_pool_handle()
        torch.cuda.set_stream(self._steps)

    def memory(self) -> DeviceMemory:
        free, total = torch.cuda.mem_get_info(self.device)
        return DeviceMemory(free, total)

    def allocated_bytes(self) -> int | None:
        return int(torch.cuda.memory_allocated(self.device))

    def bandwidth(self, memory: torch.Tensor) -> float | None:
        num_bytes = min(memory.numel() // 2, COPY_BYTES)
        if num_bytes < MIN_COPY_BYTES:
            return None
        source, target = memory[:num_bytes], memory[num_bytes : 2 * num_bytes]
        marks = [torch.cuda.Event(enable_timing=True) for _ in range(NUM_COPIES + 1)]
        for mark in marks:
            mark.record(self._steps)
            target.copy_(source)
        self._steps.synchronize()
        fastest_ms = min(begin.elapsed_time(end) for begin, end in itertools.pairwise(marks))
        return 2 * num_bytes / (fastest_ms / 1e3)

    def release_unused(self) -> None:
        torch.cuda.empty_cache()

    def host_buffer(self, num_bytes: int) -> torch.Tensor:
        return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)

    def pin(self, memory: torch.Tensor) -> None:
        """Register host memory with the driver. This commits all of the memory immediately.

        If the driver refuses, print a warning. Copies are then pageable, which is slower but correct.
        """
        if not memory.numel():
            return
        code = int(torch.cuda.cudart().cudaHostRegister(memory.data_ptr(), memory.numel(), 0))
        if code != 0:
            clear_last_error(loaded_runtimes())
            print(
                f"the host tier of {memory.numel()} bytes stays pageable: cudaHostRegister failed with error {code}",
                file=sys.stderr,
            )

    def fence(self) -> CudaFence:
        return CudaFence(self._steps)

    def upload(self, target: torch.Tensor, rows: Sequence[int], source: torch.Tensor, after: Fence) -> None:
        assert isinstance(after, CudaFence)
        with torch.cuda.stream(self._uploads):
            self._uploads.wait_event(after.event)
            try:
                num_queued = 0
                for row, content in zip(rows, source, strict=True):
                    target[row].copy_(content, non_blocking=True)
                    num_queued += content.nbytes
                    if num_queued >= UPLOAD_BYTES:
                        self._await_uploads()
                        num_queued = 0
            finally:
                # Wait even after a failure: a late copy must not overwrite data of the pages' next owner.
                self._await_uploads()

    def download(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.to("cpu", non_blocking=True)

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        target.copy_(source, non_blocking=True)

    def stage(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.pin_memory().to(self.device, non_blocking=True)

    def capture(self, step: Callable[[], None]) -> Callable[[], None]:
        return captured(torch.cuda.CUDAGraph(), self._graph_pool, step)

    def _await_uploads(self) -> None:
        # A blocking event lets this thread sleep. Spinning would take CPU time from the thread that submits steps.
        done = torch.cuda.Event(blocking=True)
        done.record(self._uploads)
        done.synchronize()


def captured(graph: torch.cuda.CUDAGraph, pool: Any, step: Callable[[], None]) -> Callable[[], None]:
    """Record `step` in `graph`. Afterwards, the current stream is no longer capturing, even if `step` raises."""
    # Freeing tensors during garbage collection can query events, which is forbidden during a capture.
    is_collecting = gc.isenabled()
    gc.disable()
    try:
        # Check only this thread's calls: other threads may allocate memory and wait for events during the capture.
        graph.capture_begin(pool=pool, capture_error_mode="thread_local")
        try:
            step()
        except BaseException:
            # Ending a failed capture raises another error, which is less informative than the first.
            with contextlib.suppress(RuntimeError):
                graph.capture_end()
            raise
        graph.capture_end()
    finally:
        if is_collecting:
            gc.enable()
    return graph.replay


def loaded_runtimes() -> list[ctypes.CDLL]:
    """All CUDA runtimes mapped into this process. Each keeps its own last error."""
    lines = Path("/proc/self/maps").read_text().splitlines()
    paths = {line.split(maxsplit=5)[5] for line in lines if "libcudart.so" in line}
    return [ctypes.CDLL(path) for path in sorted(paths)]


def clear_last_error(runtimes: Iterable[ctypes.CDLL]) -> None:
    """Clear a handled error, which the runtime would otherwise report again from an unrelated later call."""
    for runtime in runtimes:
        runtime.cudaGetLastError()
