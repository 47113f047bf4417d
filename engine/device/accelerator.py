"""What the engine asks of a device beside its kernels: memory to copy from, an order of copies and steps, graphs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch


@dataclass(frozen=True, slots=True)
class DeviceMemory:
    """Bytes of a device, those that other programs use included."""

    free: int
    total: int


class Fence(Protocol):
    """A mark behind everything that was submitted before it."""

    def wait(self) -> None:
        """Block until all of that is through."""
        ...


class Accelerator(Protocol):
    """One device. Steps are submitted on one thread and run in order; `upload` alone may be called on another."""

    @property
    def device(self) -> torch.device: ...

    def memory(self) -> DeviceMemory | None:
        """What the driver counts now; None where the device has no memory of its own."""
        ...

    def release_unused(self) -> None:
        """Give back to the device what is kept of freed tensors for later ones."""
        ...

    def host_buffer(self, num_bytes: int) -> torch.Tensor:
        """uint8 `[num_bytes]` in host memory, from which copies to the device need no help of the host."""
        ...

    def pin(self, memory: torch.Tensor) -> None:
        """Have the same of memory that is there, uint8 `[num_bytes]`, and lives as long as this process."""
        ...

    def fence(self) -> Fence:
        """Mark all steps and copies submitted so far on this thread."""
        ...

    def upload(self, target: torch.Tensor, rows: Sequence[int], source: torch.Tensor, after: Fence) -> None:
        """Copy each row of `source`, in host memory, into that of `target` which `rows` names, once `after` has passed.

        Runs beside the steps and returns, also by an exception, when no copy is under way any more.
        """
        ...

    def download(self, tensor: torch.Tensor) -> torch.Tensor:
        """A copy in host memory, whose content is there once a later fence has passed."""
        ...

    def stage(self, tensor: torch.Tensor) -> torch.Tensor:
        """A small tensor of the host on the device, for steps submitted from now on."""
        ...

    def capture(self, step: Callable[[], None]) -> Callable[[], None]:
        """Record what `step` submits without running it; the result submits all of it again at once.

        Tensors that `step` reads keep their addresses; what it allocates lives until another capture runs.
        """
        ...


class PassedFence:
    """The fence of a device that has done everything by the time a call returns."""

    def wait(self) -> None:
        """There is nothing to wait for."""


class HostAccelerator:
    """The CPU: every call does its work before it returns, and a captured step simply runs again."""

    device = torch.device("cpu")

    def memory(self) -> DeviceMemory | None:
        return None

    def release_unused(self) -> None:
        """Nothing is kept."""

    def host_buffer(self, num_bytes: int) -> torch.Tensor:
        return torch.empty(num_bytes, dtype=torch.uint8)

    def pin(self, memory: torch.Tensor) -> None:
        """The device is the host."""

    def fence(self) -> Fence:
        return PassedFence()

    def upload(self, target: torch.Tensor, rows: Sequence[int], source: torch.Tensor, after: Fence) -> None:
        after.wait()
        # torch would start OpenMP threads for the thread that copies. GNU OpenMP, then having more threads than cores,
        # lets those of the steps no longer spin between two kernels, and each kernel waits 0.1 ms for them. All rows at
        # once, for this thread then takes the interpreter's lock from that of the steps once.
        if len(rows) != source.shape[0]:
            raise ValueError(f"{source.shape[0]} rows cannot be copied to {len(rows)}")
        target.numpy()[list(rows)] = source.numpy()

    def download(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.clone()

    def stage(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor

    def capture(self, step: Callable[[], None]) -> Callable[[], None]:
        return step
