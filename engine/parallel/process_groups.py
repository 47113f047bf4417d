"""Exchanges tensors between workers on one machine: with NCCL between GPUs, with gloo between CPUs."""

from __future__ import annotations

import ctypes
import os
from abc import ABC, abstractmethod
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from torch import distributed
from torch._C import _distributed_c10d

# torch's type stubs lack parts of these classes.
_distributed: Any = distributed
_options: Any = _distributed_c10d

JOIN_TIMEOUT = timedelta(seconds=30)
"""Longest wait for another worker while the workers connect."""

EXCHANGE_TIMEOUT = timedelta(minutes=30)
"""Longest wait for another worker in an exchange. The supervisor ends an engine whose steps take much less time."""


class ProcessGroup(ABC):
    """The group of `size` workers that meet through the file `meeting`, which the first of them creates.

    Call `join` in all workers before the first exchange, and `close` after the last. Before `join`, an exchange has
    results of the right shape only, which is enough to compile the kernels of a step.
    """

    reports_ends: bool
    """Whether an exchange raises RuntimeError if another worker has ended. Otherwise, it never finishes."""

    def __init__(self, meeting: Path, size: int, worker: int) -> None:
        self._meeting = meeting
        self.size = size
        self.worker = worker
        self._group: Any = None

    def join(self) -> None:
        """Connect to all other workers. Raises RuntimeError if one of them does not join within JOIN_TIMEOUT."""
        store = _distributed.FileStore(str(self._meeting), self.size)
        store.set_timeout(JOIN_TIMEOUT)
        self._group = self._connected(store)
        self._group._set_default_timeout(EXCHANGE_TIMEOUT)

    @abstractmethod
    def _connected(self, store: Any) -> Any:
        """torch's group of the workers that meet in `store`."""

    def close(self) -> None:
        """End the exchanges of this process. Otherwise, gloo's threads would abort the process when it exits."""
        self._group = None

    def sum(self, y: torch.Tensor) -> torch.Tensor:
        y = y.contiguous()
        if self._group is not None and y.numel():
            _await(self._group.allreduce([y], _on_current_stream(_options.AllreduceOptions())))
        return y

    def join_columns(self, y: torch.Tensor) -> torch.Tensor:
        y = y.contiguous()
        parts = y.new_empty(self.size * y.shape[0], y.shape[1])
        if self._group is not None and y.numel():
            _await(self._group._allgather_base(parts, y, _on_current_stream(_options.AllgatherOptions())))
        return torch.cat(parts.view(self.size, *y.shape).unbind(), dim=1)

    def broadcast(self, x: torch.Tensor) -> None:
        if self._group is not None and x.numel():
            # The root is worker 0.
            _await(self._group.broadcast([x], _on_current_stream(_options.BroadcastOptions())))


class GlooGroup(ProcessGroup):
    """Exchanges tensors over the loopback interface."""

    reports_ends = True

    def _connected(self, store: Any) -> Any:
        gloo = _distributed.ProcessGroupGloo
        options = gloo._Options()
        options._devices = [gloo.create_device(hostname="127.0.0.1")]
        options._timeout = JOIN_TIMEOUT
        return gloo(store, self.worker, self.size, options)


class NcclGroup(ProcessGroup):
    """Exchanges tensors between the GPUs that this process sees. Worker `n` uses the `n`-th.

    An exchange is submitted to the current stream, like any other kernel, and can be captured. All workers must capture
    the same exchanges.
    """

    reports_ends = False

    def join(self) -> None:
        super().join()
        # The first exchanges connect the workers, before the page pool takes the free memory. NCCL may still connect
        # them in other ways for larger tensors. The warm-up runs each shape before its capture, and the buffers that
        # this allocates are part of the memory reserved for graphs.
        x = torch.zeros(1, 1, device=torch.device("cuda", self.worker))
        self.broadcast(self.join_columns(self.sum(x)))
        torch.cuda.synchronize(x.device)

    def _connected(self, store: Any) -> Any:
        # The workers are on one machine. By default, NCCL would listen on its other interfaces.
        os.environ.setdefault("NCCL_SOCKET_IFNAME", "lo")
        # By default, a thread of torch's would look into the file through which the workers meet once a second, also
        # after it is deleted, for a worker that has timed out.
        os.environ.setdefault("TORCH_NCCL_DUMP_ON_TIMEOUT", "0")
        nccl = _distributed.ProcessGroupNCCL
        options = nccl.Options()
        options._timeout = EXCHANGE_TIMEOUT
        group = nccl(store, self.worker, self.size, options)
        # Destroying a communicator waits for ever while there are graphs with its exchanges, so it lives as long as the
        # process.
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(group))
        return group


def new_group(device: str, meeting: Path, size: int, worker: int) -> ProcessGroup:
    """The group for workers on `device`, `cpu` or `cuda`."""
    kind = NcclGroup if device == "cuda" else GlooGroup
    return kind(meeting, size, worker)


def _on_current_stream(options: Any) -> Any:
    """Let NCCL use the current stream. By default, it would use another one, and keep the tensors longer."""
    options.asyncOp = False
    return options


def _await(work: Any) -> None:
    """Wait for an exchange. NCCL returns None for one on the current stream, and later kernels wait for it there."""
    if work is not None:
        work.wait()
