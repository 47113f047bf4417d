"""A recorded program: operations in phases, which threads run together without waking each other in between.

All threads walk through the phases in order. In each phase, they take tasks until none is left, and wait until the
tasks that other threads took are finished. No thread waits for a thread that has not begun, so a program also finishes
if the threads start late, or if there is only one. A phase costs a few hundred nanoseconds. A parallel region for each
kernel, called from Python, costs 10 to 30 microseconds.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from numba import prange

from loramux.kernels.cpu.instructions.atomics import call_operation, give_up_slice, pause, take_next, value_at
from loramux.kernels.cpu.instructions.compiled import helper, kernel
from loramux.kernels.cpu.programs.step_words import step_words
from loramux.kernels.tables import AttentionBatch, Segments

FIRST, END, TASKS = range(3)
"""Columns of a phase: its operations `[first, end)`, and its number of tasks."""

COUNTER_WORDS, FINISHED = 16, 8
"""Words per phase, and the index of the word that counts finished tasks. The first word counts tasks that were taken.
Each has a cache line of its own.
"""

SERIAL_WORK = 8_000_000
"""Number of multiplications by weights below which a step runs on one thread. It takes less than a millisecond, so
other threads would save little. If other processes use the cores, waiting for each other would cost more.
"""

PAUSES = 2000
"""Number of pauses before a waiting thread lets other threads use its core: about the time of a large task."""


@dataclass(frozen=True, slots=True, eq=False)
class Program:
    """Phases and operations as arrays, and everything that the operations' arguments point to.

    `operations` int64 `[num_operations, 2]` contains addresses of functions and of their arguments. `work` is the
    number of multiplications by weights.
    """

    num_rows: int
    work: int
    phases: npt.NDArray[np.int64]
    operations: npt.NDArray[np.int64]
    owned: Sequence[object]

    @property
    def num_threads(self) -> int:
        """Number of threads that run a step."""
        return 1 if self.work < SERIAL_WORK else torch.get_num_threads()

    def run(self, attention: tuple[AttentionBatch, ...], segments: Segments) -> None:
        """Run all phases for one step of `num_rows` rows."""
        words = step_words(self.num_rows, attention, segments)
        counters = np.zeros((len(self.phases), COUNTER_WORDS), np.int64)
        run_phases(self.num_threads, self.phases, self.operations, words, counters)


@helper
def _run_task(operations: Any, first: int, end: int, step: int, task: int) -> None:
    for operation in range(first, end):
        call_operation(operations[operation, 0], operations[operation, 1], step, task)


@helper
def _walk(phases: Any, operations: Any, step: int, counters: int) -> None:
    for p in range(phases.shape[0]):
        taken = counters + 8 * COUNTER_WORDS * p
        finished, num_tasks = taken + 8 * FINISHED, phases[p, TASKS]
        # Another thread may be several phases ahead. Reading is cheaper than taking a task that does not exist.
        while value_at(taken) < num_tasks:
            task = take_next(taken)
            if task >= num_tasks:
                break
            _run_task(operations, phases[p, FIRST], phases[p, END], step, task)
            take_next(finished)
        waited = 0
        while value_at(finished) < num_tasks:
            pause()
            waited += 1
            if waited > PAUSES:
                # The other thread may be waiting for this core.
                give_up_slice()


@kernel
def run_phases(num_threads: int, phases: Any, operations: Any, step: Any, counters: Any) -> None:
    """Run all tasks of all phases. `counters` is zeroed, int64 `[num_phases, COUNTER_WORDS]`."""
    if num_threads == 1:
        _walk(phases, operations, step.ctypes.data, counters.ctypes.data)
    else:
        for _ in prange(num_threads):
            _walk(phases, operations, step.ctypes.data, counters.ctypes.data)
