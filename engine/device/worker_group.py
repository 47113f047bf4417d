"""The interface through which the workers of a tensor-parallel engine exchange tensors."""

from __future__ import annotations

from typing import Protocol

import torch


class WorkerGroup(Protocol):
    """The workers that share a model's linear layers. All workers make the same calls in the same order."""

    @property
    def size(self) -> int: ...

    @property
    def worker(self) -> int:
        """This worker's index in `[0, size)`."""
        ...

    def sum(self, y: torch.Tensor) -> torch.Tensor:
        """The sum of all workers' `y`, which may be overwritten. Equal in all workers."""
        ...

    def join_columns(self, y: torch.Tensor) -> torch.Tensor:
        """All workers' `y` `[num_rows, num_columns]` side by side, `[num_rows, size * num_columns]`."""
        ...

    def broadcast(self, x: torch.Tensor) -> None:
        """Overwrite `x` with that of worker 0. On a GPU, `x` changes once the work submitted before has finished."""
        ...
