"""A CUDA GPU: steps on a stream of their own, adapters copied on another, graphs in one memory pool."""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence

import torch

from loramux.engine.accelerator import Fence

UPLOAD_BYTES = 16 << 20
"""Bytes of an adapter that are queued at a time: a step's metadata, which is copied too, waits no longer for them."""


class CudaFence:
    """An event in a stream."""

    def __init__(self, stream: torch.cuda.Stream) -> None:
        self.event = torch.cuda.Event()
        self.event.record(stream)

    def wait(self) -> None:
        self.event.synchronize()


class CudaAccelerator:
    """Made on the thread that submits steps: its stream becomes that thread's current one."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        torch.cuda.set_device(device)
        # A graph cannot be captured on the default stream.
        self._steps = torch.cuda.Stream(device)
        self._uploads = torch.cuda.Stream(device)
        self._graph_pool = torch.cuda.graph_pool_handle()
        torch.cuda.set_stream(self._steps)

    def host_buffer(self, num_bytes: int) -> torch.Tensor:
        return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)

    def pin(self, memory: torch.Tensor) -> None:
        if memory.numel():
            # Where the driver refuses, copies from it are slower and just as right.
            torch.cuda.cudart().cudaHostRegister(memory.data_ptr(), memory.numel(), 0)

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
                # Also after a failure: whoever gets these pages next must not be overwritten by a straggler.
                self._await_uploads()

    def download(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.to("cpu", non_blocking=True)

    def stage(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.pin_memory().to(self.device, non_blocking=True)

    def capture(self, step: Callable[[], None]) -> Callable[[], None]:
        graph = torch.cuda.CUDAGraph()
        # Memory that the collector frees meanwhile might be asked for its events, which a capture forbids.
        is_collecting = gc.isenabled()
        gc.disable()
        try:
            # Other threads may allocate and wait for events meanwhile; only this thread's calls are checked.
            graph.capture_begin(pool=self._graph_pool, capture_error_mode="thread_local")
            step()
            graph.capture_end()
        finally:
            if is_collecting:
                gc.enable()
        return graph.replay

    def _await_uploads(self) -> None:
        # The waiting thread sleeps: a spinning one would take time from the thread that submits steps.
        done = torch.cuda.Event(blocking=True)
        done.record(self._uploads)
        done.synchronize()
