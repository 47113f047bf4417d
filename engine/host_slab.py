"""Pieces of one stretch of host memory that a GPU copies from by itself."""

from __future__ import annotations

import ctypes
import threading
import weakref
from collections import deque

import numpy as np
import numpy.typing as npt
import torch

ALIGNMENT = 4096


class HostSlab:
    """Hands out pieces of `memory`, uint8 `[num_bytes]`, first fit; what does not fit is ordinary memory.

    Making memory known to the driver takes long and holds up other threads' calls, so it is done once for all adapters
    of the host tier. A piece returns by itself when its last array is gone. Thread-safe.
    """

    def __init__(self, memory: torch.Tensor) -> None:
        self._memory = memory
        self._lock = threading.Lock()
        # Free stretches `[begin, end)` in order, none touching the next.
        self._free = [(0, memory.numel() // ALIGNMENT * ALIGNMENT)]
        # An array may go at any moment, also while this thread holds the lock: what it gives back is taken up later.
        self._returned: deque[tuple[int, int]] = deque()

    @property
    def num_free_bytes(self) -> int:
        with self._lock:
            self._take_up()
            return sum(end - begin for begin, end in self._free)

    def allocate(self, num_bytes: int) -> npt.NDArray[np.uint8]:
        """uint8 `[num_bytes]`, not cleared."""
        size = -(-max(1, num_bytes) // ALIGNMENT) * ALIGNMENT
        begin = self._take(size)
        if begin is None:
            return np.empty(num_bytes, np.uint8)
        # Views of an array keep this object alive, whose end gives the piece back.
        piece = (ctypes.c_uint8 * num_bytes).from_address(self._memory.data_ptr() + begin)
        weakref.finalize(piece, self._returned.append, (begin, begin + size))
        array: npt.NDArray[np.uint8] = np.frombuffer(memoryview(piece), np.uint8)
        return array

    def _take(self, size: int) -> int | None:
        with self._lock:
            self._take_up()
            for index, (begin, end) in enumerate(self._free):
                if end - begin >= size:
                    self._free[index : index + 1] = [(begin + size, end)] if end - begin > size else []
                    return begin
        return None

    def _take_up(self) -> None:
        while self._returned:
            self._give_back(*self._returned.popleft())

    def _give_back(self, begin: int, end: int) -> None:
        stretches = sorted([*self._free, (begin, end)])
        self._free = [stretches[0]]
        for start, stop in stretches[1:]:
            last_begin, last_end = self._free[-1]
            if start == last_end:
                self._free[-1] = (last_begin, stop)
            else:
                self._free.append((start, stop))
