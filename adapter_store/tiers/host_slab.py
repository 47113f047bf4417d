"""Allocates pieces of a host memory block that processes can share and a GPU can copy from directly."""

from __future__ import annotations

import ctypes
import mmap
import os
import threading
import weakref
from collections import deque
from collections.abc import Callable
from functools import partial

import numpy as np
import numpy.typing as npt

ALIGNMENT = 4096


def shared_memory(num_bytes: int) -> int:
    """Create shared memory and return its descriptor.

    Pages are committed when they are written or registered with a GPU.
    """
    descriptor = os.memfd_create("adapters")
    os.truncate(descriptor, max(num_bytes, 1))
    return descriptor


def mapped(descriptor: int) -> npt.NDArray[np.uint8]:
    """Map all of the shared memory, uint8 `[num_bytes]`. Processes that map it see each other's writes."""
    return np.frombuffer(mmap.mmap(descriptor, 0), np.uint8)


def piece_of(
    memory: npt.NDArray[np.uint8], begin: int, num_bytes: int, when_gone: Callable[[], None]
) -> npt.NDArray[np.uint8]:
    """Return `memory[begin : begin + num_bytes]`. `when_gone` is called, on any thread, after the last view is gone."""
    # Views of the array keep `piece` alive, and the finalizer keeps the memory alive.
    piece = (ctypes.c_uint8 * num_bytes).from_address(memory.ctypes.data + begin)
    weakref.finalize(piece, _gone, memory, when_gone)
    array: npt.NDArray[np.uint8] = np.frombuffer(memoryview(piece), np.uint8)
    return array


def _gone(_memory: npt.NDArray[np.uint8], when_gone: Callable[[], None]) -> None:
    when_gone()


class HostSlab:
    """Allocates pieces of `memory`, uint8 `[num_bytes]`, by first fit. Thread-safe.

    If no free range is large enough, `allocate` returns ordinary memory.

    Registering memory with the GPU driver is slow and blocks other threads' calls, so it is done once for the whole
    host tier. A piece is freed when the last array that views it is gone.
    """

    def __init__(self, memory: npt.NDArray[np.uint8]) -> None:
        self._memory = memory
        self._lock = threading.Lock()
        # Free ranges `[begin, end)` in ascending order. No two are adjacent.
        self._free = [(0, memory.size // ALIGNMENT * ALIGNMENT)]
        # An array can be freed at any moment, even while this thread holds the lock, so freed pieces are queued.
        self._returned: deque[tuple[int, int]] = deque()

    @property
    def num_free_bytes(self) -> int:
        with self._lock:
            self._take_up()
            return sum(end - begin for begin, end in self._free)

    def allocate(self, num_bytes: int) -> npt.NDArray[np.uint8]:
        size = _rounded(num_bytes)
        begin = self._take(size)
        return np.empty(num_bytes, np.uint8) if begin is None else self._piece(begin, num_bytes)

    def occupy(self, begin: int, num_bytes: int) -> npt.NDArray[np.uint8]:
        """Claim the piece at `begin`, which an earlier slab allocated in the same memory.

        Raises ValueError if the piece is not free.
        """
        end = begin + _rounded(num_bytes)
        with self._lock:
            self._take_up()
            for index, (start, stop) in enumerate(self._free):
                if start <= begin and end <= stop:
                    self._free[index : index + 1] = [one for one in ((start, begin), (end, stop)) if one[0] < one[1]]
                    break
            else:
                raise ValueError("the piece is not free")
        return self._piece(begin, num_bytes)

    def offset_of(self, array: npt.NDArray[np.uint8]) -> int | None:
        """Return the array's offset in the memory, or None if the array is in ordinary memory."""
        offset: int = array.ctypes.data - self._memory.ctypes.data
        return offset if 0 <= offset < self._memory.size else None

    def _piece(self, begin: int, num_bytes: int) -> npt.NDArray[np.uint8]:
        give_back = partial(self._returned.append, (begin, begin + _rounded(num_bytes)))
        return piece_of(self._memory, begin, num_bytes, give_back)

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


class EngineMemory:
    """Memory that an engine shares with its staging processes, and the pieces in use.

    A piece stays in use until its last view is gone, even if the process that filled it has died.
    """

    def __init__(self, num_bytes: int) -> None:
        self.descriptor = shared_memory(num_bytes)
        weakref.finalize(self, os.close, self.descriptor)
        self.array = mapped(self.descriptor)
        self._pieces: dict[int, int] = {}
        # The thread that drops the last view of a piece appends the piece's offset to this queue.
        self._unused: deque[int] = deque()

    @property
    def pieces(self) -> list[tuple[int, int]]:
        """The offset and length of each piece that `take_unused` has not yet returned."""
        return list(self._pieces.items())

    @property
    def has_unused(self) -> bool:
        return bool(self._unused)

    def use(self, begin: int, num_bytes: int) -> npt.NDArray[np.uint8]:
        """Map a piece that a staging process has filled, uint8 `[num_bytes]`."""
        self._pieces[begin] = num_bytes
        return piece_of(self.array, begin, num_bytes, partial(self._unused.append, begin))

    def take_unused(self) -> list[int]:
        """Return the offsets of pieces that have become unused since the last call."""
        begins = []
        while self._unused:
            begin = self._unused.popleft()
            del self._pieces[begin]
            begins.append(begin)
        return begins


def _rounded(num_bytes: int) -> int:
    return -(-max(1, num_bytes) // ALIGNMENT) * ALIGNMENT
