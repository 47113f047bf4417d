from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from loramux.engine.device.accelerator import DeviceMemory, Fence, HostAccelerator
from loramux.engine.device.backend import Backend, DenseLinear
from loramux.kernels.reference.kernels import ReferenceKernels
from loramux.kernels.tables import PoolViews

GIB = 1 << 30
ADVICE = (
    "Search for `cudaError' in https://docs.nvidia.com/cuda/cuda-runtime-api/ for more information.\n"
    "CUDA kernel errors might be asynchronously reported at some other API call, so the stacktrace below might be "
    "incorrect.\nFor debugging consider passing CUDA_LAUNCH_BLOCKING=1\n"
    "Compile with `TORCH_USE_CUDA_DSA` to enable device-side assertions.\n"
)


def cuda_error(what: str) -> torch.AcceleratorError:
    """Return the error that torch raises for a failed CUDA call, with the advice that torch appends."""
    return torch.AcceleratorError(f"CUDA error: {what}\n{ADVICE}")


def out_of_memory() -> torch.OutOfMemoryError:
    return torch.OutOfMemoryError(
        "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 79.18 GiB of which 1.06 GiB is "
        "free. Including non-PyTorch memory, this process has 78.1 GiB memory in use. Of the allocated memory 77 GiB "
        "is allocated by PyTorch, and 51.2 MiB is reserved by PyTorch but unallocated."
    )


class FakeCard(HostAccelerator):
    """A fake GPU. `broken` maps a call's name (`launch` for kernels) to its error. If `lost` is set, every call raises
    it.
    """

    def __init__(self, free: int = 60 * GIB, total: int = 80 * GIB) -> None:
        self.broken: dict[str, Exception] = {}
        self.lost: Exception | None = None
        self._memory = DeviceMemory(free, total)

    def call(self, name: str) -> None:
        error = self.lost or self.broken.get(name)
        if error is not None:
            raise error

    def memory(self) -> DeviceMemory:
        return self._memory

    def fence(self) -> Fence:
        self.call("fence")
        return super().fence()

    def upload(self, target: torch.Tensor, rows: Sequence[int], source: torch.Tensor, after: Fence) -> None:
        self.call("upload")
        super().upload(target, rows, source, after)

    def download(self, tensor: torch.Tensor) -> torch.Tensor:
        self.call("download")
        return super().download(tensor)

    def stage(self, tensor: torch.Tensor) -> torch.Tensor:
        self.call("stage")
        return super().stage(tensor)

    def capture(self, step: Callable[[], None]) -> Callable[[], None]:
        self.call("capture")
        return super().capture(step)


class FakeKernels(ReferenceKernels):
    def __init__(self, pool: PoolViews, card: FakeCard) -> None:
        super().__init__(pool)
        self._card = card

    def paged_attention(self, *arguments: Any) -> None:
        self._card.call("launch")
        super().paged_attention(*arguments)


def fake_backend(card: FakeCard, make_linear: Any = DenseLinear) -> Backend:
    def sample_tokens(logits: torch.Tensor, *settings: torch.Tensor, all_greedy: bool = False) -> None:
        card.call("launch")
        settings[-1].copy_(logits.argmax(1))

    return Backend(
        accelerator=card,
        make_kernels=lambda pool, shapes: FakeKernels(pool, card),
        make_linear=make_linear,
        activation_dtype=None,
        sample_tokens=sample_tokens,
    )
