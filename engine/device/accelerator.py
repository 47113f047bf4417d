"""The engine's interface to a device, apart from kernels: memory, graphs, and the order of copies and steps."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch


@dataclass(frozen=True, slots=True)
class DeviceMemory:
    """Free and total memory of a device, in bytes. Memory used by other programs does not count as free."""

    free: int
    total: int


class Fence(Protocol):
    """Marks the end of all work submitted before the fence was created."""

    def wait(self) -> None:
        """Block until all work submitted before the fence is finished."""
        ...


class Accelerator(Protocol):
    """One device. Steps are submitted on one thread and run in order. Only `upload` may be called on another thread."""

    @property
    def device(self) -> torch.device: ...

    def memory(self) -> DeviceMemory | None:
        """Current memory figures from the driver, or None if the device uses the host's memory."""
        ...

    def allocated_bytes(self) -> int | None:
        """Bytes of all tensors on the device, or None if the device uses the host's memory."""
        ...

    def bandwidth(self, memory: torch.Tensor) -> float | None:
        """Measure the bandwidth of the device's memory, in bytes read and written per second, by copies in `memory`.

        `memory` is uint8 `[num_bytes]`, and its contents are overwritten. None if it is too small to measure, or if the
        device uses the host's memory, which other programs and the processors' caches share.
        """
        ...

    def release_unused(self) -> None:
        """Free the device memory that torch still caches for deleted tensors."""
        ...

    def host_buffer(self, num_bytes: int) -> torch.Tensor:
        """uint8 `[num_bytes]` in pinned host memory, which the device can read without the host's help."""
        ...

    def pin(self, memory: torch.Tensor) -> None:
        """Pin existing host memory, uint8 `[num_bytes]`, which must stay allocated until this process exits."""
        ...

    def fence(self) -> Fence:
        """Return a fence that marks the end of all steps and copies submitted so far on this thread."""
        ...

    def upload(self, target: torch.Tensor, rows: Sequence[int], source: torch.Tensor, after: Fence) -> None:
        """Copy row `i` of `source`, in host memory, to row `rows[i]` of `target`, once the fence `after` has passed.

        The copy runs in parallel with steps. When this method returns or raises, no copy is still running.
        """
        ...

    def download(self, tensor: torch.Tensor) -> torch.Tensor:
        """Start a copy to host memory. The copy is complete once a later fence has passed."""
        ...

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """Copy `source` to `target`, both contiguous uint8 `[num_bytes]`. One of them is from `host_buffer`. The device
        runs copies and steps in the order in which they are submitted.
        """
        ...

    def stage(self, tensor: torch.Tensor) -> torch.Tensor:
        """Copy a small host tensor to the device, for steps submitted from now on."""
        ...

    def capture(self, step: Callable[[], None]) -> Callable[[], None]:
        """Record the work that `step` submits, without running it. The returned function submits the recorded work.

        Tensors that `step` reads must keep their addresses. Tensors that it allocates may be overwritten when another
        recorded step runs.
        """
        ...


class PassedFence:
    """The fence for a device whose calls are synchronous."""

    def wait(self) -> None:
        """Do nothing, because all work is already finished."""


class HostAccelerator:
    """The CPU: every call is synchronous, and replaying a captured step simply runs it again."""

    device = torch.device("cpu")

    def memory(self) -> DeviceMemory | None:
        return None

    def allocated_bytes(self) -> int | None:
        return None

    def bandwidth(self, memory: torch.Tensor) -> float | None:
        return None

    def release_unused(self) -> None:
        """Do nothing, because no memory is cached."""

    def host_buffer(self, num_bytes: int) -> torch.Tensor:
        return torch.empty(num_bytes, dtype=torch.uint8)

    def pin(self, memory: torch.Tensor) -> None:
        """Do nothing, because the device is the host."""

    def fence(self) -> Fence:
        return PassedFence()

    def upload(self, target: torch.Tensor, rows: Sequence[int], source: torch.Tensor, after: Fence) -> None:
        after.wait()
        # Copy without torch, which would start OpenMP threads for the copying thread. With more threads than cores, GNU
        # OpenMP lets the threads that compute steps sleep between kernels, and waking them takes 0.1 ms per kernel.
        # Copy all rows in one call, so that this thread takes the interpreter lock from the thread that submits steps
        # only once.
        if len(rows) != source.shape[0]:
            raise ValueError(f"cannot copy {source.shape[0]} rows to {len(rows)} rows")
        target.numpy()[list(rows)] = source.numpy()

    def download(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.clone()

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        # torch would divide the copy among OpenMP threads, which wait for each other. On a busy machine, that takes
        # many times as long as the copy.
        target.numpy()[:] = source.numpy()

    def stage(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor

    def capture(self, step: Callable[[], None]) -> Callable[[], None]:
        return step
