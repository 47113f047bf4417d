"""Operations: compiled functions that a program calls by address, for one task at a time."""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property
from typing import Any

import numpy as np
from numba import carray  # type: ignore[attr-defined]

from loramux.kernels.cpu.instructions import compiled
from loramux.kernels.cpu.instructions.compiled import helper
from loramux.kernels.cpu.instructions.vectors import pointer_at

_WORDS, _DOUBLES, _UNLIMITED = np.int64, np.float64, 1 << 48


class Operation:
    """A function `(arguments, step, task)` of int64 values. It is compiled when its address is first needed.

    `arguments` is the address of the operation's own record of 64-bit words, which `words_at` and `doubles_at` read.
    `step` is the address of the words that change with every step, `STEP_WORDS` of them. `task` is the number of the
    task to run. Its compiled code is cached on disk.
    """

    def __init__(self, function: Callable[[Any, Any, Any], None]) -> None:
        self._function = function

    @cached_property
    def _compiled(self) -> Any:
        return compiled.operation(self._function)

    @property
    def address(self) -> int:
        return int(self._compiled.address)


@helper
def words_at(address: int) -> Any:
    """The int64 values that start at an address, as an array of unlimited length."""
    return carray(pointer_at(address), (_UNLIMITED,), _WORDS)


@helper
def doubles_at(address: int) -> Any:
    """The same words as float64 values."""
    return carray(pointer_at(address), (_UNLIMITED,), _DOUBLES)
