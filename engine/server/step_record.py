"""What an engine's loop is doing, in memory that outlives its process and that the supervisor reads."""

from __future__ import annotations

import mmap
import os
import struct
from dataclasses import dataclass

_COUNTERS = struct.Struct("<QQ")
_LENGTH = struct.Struct("<Q")
_IDS = _COUNTERS.size + _LENGTH.size

ID_BYTES = 64
"""Room for one sequence id and its separator; what does not fit is left out, never cut in two."""


@dataclass(frozen=True, slots=True)
class LoopProgress:
    """How far the loop has come: it passes at least a few times a second, idle or not, unless a step holds it."""

    num_passes: int
    num_steps: int


class StepRecord:
    """Written by the engine's loop alone, a few bytes a pass; read by the supervisor at any time.

    It is shared memory and no message, because a step that hangs or kills the process could send nothing: what was
    written before the step is there afterwards, whatever the step did to the process.
    """

    def __init__(self, fd: int) -> None:
        self._memory = mmap.mmap(fd, 0)
        self._num_passes = 0
        self._num_steps = 0
        self._running: list[str] = []

    @staticmethod
    def new_file(max_sequences: int) -> int:
        """Memory for a record of that many sequences, as a file descriptor that a child process may inherit."""
        fd = os.memfd_create("loramux-steps")
        os.ftruncate(fd, _IDS + ID_BYTES * max_sequences)
        return fd

    def note_pass(self, ran: bool) -> None:
        """The loop is through with a pass, in which it `ran` a step or not."""
        self._num_passes += 1
        self._num_steps += ran
        _COUNTERS.pack_into(self._memory, 0, self._num_passes, self._num_steps)

    def note_running(self, sequence_ids: list[str]) -> None:
        """The device is about to work on these sequences, and on no others, until this is called again."""
        if sequence_ids == self._running:
            return
        self._running = sequence_ids
        data = "\n".join(sequence_ids).encode()
        capacity = len(self._memory) - _IDS
        if len(data) > capacity:
            data = data[: data.rfind(b"\n", 0, capacity + 1)]
        # The length last: a process that dies between two of these lines has left none, rather than wrong ones.
        _LENGTH.pack_into(self._memory, _COUNTERS.size, 0)
        self._memory[_IDS : _IDS + len(data)] = data
        _LENGTH.pack_into(self._memory, _COUNTERS.size, len(data))

    def progress(self) -> LoopProgress:
        return LoopProgress(*_COUNTERS.unpack_from(self._memory, 0))

    def running(self) -> frozenset[str]:
        """The sequences that the device worked on last."""
        (length,) = _LENGTH.unpack_from(self._memory, _COUNTERS.size)
        data = self._memory[_IDS : _IDS + length]
        # Torn only where a process died while it wrote; such an id is nobody's.
        return frozenset(data.decode(errors="replace").split("\n")) - {""}

    def close(self) -> None:
        self._memory.close()
