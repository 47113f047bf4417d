"""Exchanges tensors between workers on one machine with gloo, over the loopback interface."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from torch import distributed

# torch's type stubs lack parts of these classes.
_distributed: Any = distributed

JOIN_TIMEOUT = timedelta(seconds=30)
"""Longest wait for another worker while the workers connect."""

EXCHANGE_TIMEOUT = timedelta(minutes=30)
"""Longest wait for another worker in an exchange. The supervisor ends an engine whose steps take much less time."""


class GlooGroup:
    """The group of `size` workers that meet through the file `meeting`, which the first of them creates.

    Call `join` in all workers before the first exchange, and `close` after the last. An exchange raises RuntimeError if
    another worker has ended.
    """

    def __init__(self, meeting: Path, size: int, worker: int) -> None:
        self._meeting = meeting
        self.size = size
        self.worker = worker
        self._group: Any = None

    def join(self) -> None:
        """Connect to all other workers. Raises RuntimeError if one of them does not join within JOIN_TIMEOUT."""
        gloo = _distributed.ProcessGroupGloo
        options = gloo._Options()
        options._devices = [gloo.create_device(hostname="127.0.0.1")]
        options._timeout = JOIN_TIMEOUT
        store = _distributed.FileStore(str(self._meeting), self.size)
        self._group = gloo(store, self.worker, self.size, options)
        self._group._set_default_timeout(EXCHANGE_TIMEOUT)

    def close(self) -> None:
        """End the threads that exchange tensors. Otherwise, they would abort the process when it exits."""
        self._group = None

    def sum(self, y: torch.Tensor) -> torch.Tensor:
        y = y.contiguous()
        if y.numel():
            self._group.allreduce([y]).wait()
        return y

    def join_columns(self, y: torch.Tensor) -> torch.Tensor:
        parts = [torch.empty(y.shape, dtype=y.dtype) for _ in range(self.size)]
        if y.numel():
            self._group.allgather([parts], [y.contiguous()]).wait()
        return torch.cat(parts, dim=1)
