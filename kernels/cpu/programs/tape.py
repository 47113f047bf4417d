"""Records the operations of a program, and provides the memory that they share."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import torch

from loramux.kernels.cpu.programs.operation import Operation
from loramux.kernels.cpu.programs.program import Program

WHOLE_ROWS = 32
"""Buffers have room for a multiple of this many rows, so that most programs share them. Products with tiles read, and
write, up to 15 rows after the last one.
"""

TASKS_PER_THREAD = 8
"""Number of tasks per thread into which a product is divided. Threads then finish a phase at nearly the same time."""


class Buffers:
    """Memory for the rows of programs, which never run at the same time.

    A layer's buffers are used again two layers later, because a layer reads only its own and the previous layer's. All
    programs share them, so the largest program determines their size.
    """

    def __init__(self) -> None:
        self._memory: dict[tuple[int, int], torch.Tensor] = {}

    def memory(self, parity: int, index: int, size: int) -> torch.Tensor:
        """At least `size` bytes. The `index`-th buffer of odd or even layers."""
        found = self._memory.get((parity, index))
        if found is None or found.numel() < size:
            # Programs that use the old memory own it.
            found = self._memory[parity, index] = torch.zeros(size, dtype=torch.uint8)
        return found


@dataclass(slots=True, eq=False)
class Tape:
    """The operations of a program for steps of `num_rows` rows, in order."""

    num_rows: int
    num_threads: int
    buffers: Buffers
    _phases: list[tuple[int, int, int]] = field(default_factory=list)
    _operations: list[tuple[int, int]] = field(default_factory=list)
    _owned: list[object] = field(default_factory=list)
    _work: int = 0
    _parity: int = 0
    _index: int = 0
    _joins: bool = False

    def begin_layer(self, layer: int) -> None:
        self._parity, self._index = layer % 2, 0

    def scratch(self, row_bytes: int) -> torch.Tensor:
        """Memory for `num_rows` rows of `row_bytes`, as bytes. It is valid in this layer and the next."""
        row_bytes += -row_bytes % 64
        room = self.num_rows + -self.num_rows % WHOLE_ROWS
        memory = self.buffers.memory(self._parity, self._index, room * row_bytes)
        self._index += 1
        self._owned.append(memory)
        return memory[: self.num_rows * row_bytes]

    def rows(self, width: int) -> torch.Tensor:
        """`scratch` as float32 `[num_rows, width]`."""
        return self.scratch(4 * width).view(torch.float32)[: self.num_rows * width].view(self.num_rows, width)

    def new_rows(self, width: int) -> torch.Tensor:
        """New zeroed memory, which no other program uses, as float32 `[num_rows, width]`."""
        return torch.zeros(self.num_rows, width)

    def for_each_row(self, operation: Operation, words: Sequence[int], doubles: Sequence[float] = ()) -> None:
        """Add an operation whose task `t` reads only row `t` of the previous operation's output.

        Such operations follow each other without waiting.
        """
        self._add(operation, words, doubles)
        last = len(self._operations)
        if self._joins:
            first, _, num_tasks = self._phases[-1]
            self._phases[-1] = first, last, num_tasks
        else:
            self._phases.append((last - 1, last, self.num_rows))
        self._joins = True

    def in_tasks(
        self, operation: Operation, num_tasks: int, words: Sequence[int], doubles: Sequence[float] = ()
    ) -> None:
        """Add an operation that reads the complete output of the previous operations."""
        self._add(operation, words, doubles)
        self._phases.append((len(self._operations) - 1, len(self._operations), num_tasks))
        self._joins = False

    def num_tasks(self, most: int) -> int:
        """Number of tasks for a product with `most` panels."""
        return min(most, TASKS_PER_THREAD * self.num_threads)

    def count_work(self, multiplications: int) -> None:
        """Count the multiplications by weights of an operation."""
        self._work += multiplications

    def own(self, *things: object) -> None:
        """Keep things alive as long as the program, because its arguments contain their addresses."""
        self._owned += things

    def finish(self) -> Program:
        phases, operations = np.array(self._phases, np.int64), np.array(self._operations, np.int64)
        return Program(self.num_rows, self._work, phases, operations, tuple(self._owned))

    def _add(self, operation: Operation, words: Sequence[int], doubles: Sequence[float]) -> None:
        """The arguments are `words`, followed by `doubles`."""
        record: npt.NDArray[np.int64] = np.empty(len(words) + len(doubles), np.int64)
        record[: len(words)] = words
        record.view(np.float64)[len(words) :] = doubles
        self._owned.append(record)
        self._operations.append((operation.address, record.ctypes.data))
