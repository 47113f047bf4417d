"""A CUDA GPU: steps on a stream of their own, adapters copied on another, graphs in one memory pool."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch

from loramux.engine.accelerator import Fence


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
        # A graph cannot be captured on the default stream, whose operations also wait for those of all others.
        self._steps = torch.cuda.Stream(device)
        self._uploads = torch.cuda.Stream(device)
        self._graph_pool = torch.cuda.graph_pool_handle()
        torch.cuda.set_stream(self._steps)

    def host_buffer(self, num_bytes: int) -> torch.Tensor:
        return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)

    def fence(self) -> CudaFence:
        return CudaFence(self._steps)

    def upload(self, copies: Iterable[tuple[torch.Tensor, torch.Tensor]], after: Fence) -> None:
        assert isinstance(after, CudaFence)
        # The waiting thread sleeps: a spinning one would take time from the thread that submits steps.
        done = torch.cuda.Event(blocking=True)
        with torch.cuda.stream(self._uploads):
            self._uploads.wait_event(after.event)
            try:
                for target, source in copies:
                    target.copy_(source, non_blocking=True)
            finally:
                # Also after a failure: whoever gets these pages next must not be overwritten by a straggler.
                done.record(self._uploads)
                done.synchronize()

    def download(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.to("cpu", non_blocking=True)

    def capture(self, step: Callable[[], None]) -> Callable[[], None]:
        graph = torch.cuda.CUDAGraph()
        # Other threads may allocate and wait for events meanwhile; only this thread's calls are checked.
        graph.capture_begin(pool=self._graph_pool, capture_error_mode="thread_local")
        try:
            step()
        finally:
            graph.capture_end()
        return graph.replay
