"""The interface of programs: the kernels of a whole step, recorded once and then run by one call."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Protocol

import torch

from loramux.kernels.tables import AttentionBatch, Segments


class NotRecordable(Exception):
    """The step contains a computation that cannot be recorded."""


class Program(Protocol):
    def run(self, attention: tuple[AttentionBatch, ...], segments: Segments) -> None:
        """Run all recorded kernels for another step of as many rows, whose adapters modify the same modules."""
        ...


class Recorder(Protocol):
    """Has the methods of `Kernels`, which record instead of computing.

    The tensors that they return have values only when the program runs. Methods for which there is no recording raise
    NotRecordable. So does every operation of torch inside `recording`, except views.
    """

    def recording(self) -> AbstractContextManager[None]: ...

    def begin_layer(self, layer: int) -> None:
        """The memory of tensors from two layers earlier may now be used again."""
        ...

    def multiply(self, linear: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor) -> torch.Tensor: ...

    def finish(self) -> Program: ...
