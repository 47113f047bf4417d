"""Progress of an engine's loop, in shared memory that the supervisor can read after the process has died."""

from __future__ import annotations

import mmap
import os
import struct

_PASSES = struct.Struct("<Q")
_LENGTH = struct.Struct("<Q")
_IDS = _PASSES.size + _LENGTH.size

ID_BYTES = 64
"""Bytes reserved for each sequence id and its separator. Ids that do not fit are left out, never truncated."""


class StepRecord:
    """The record of one engine's loop, which the supervisor can read at any time.

    Only the loop writes it: a counter in each iteration, and the ids whenever the running sequences change.

    The record is in shared memory because a step can hang or crash the process before it can send a message. A record
    written before the step survives.
    """

    def __init__(self, fd: int) -> None:
        self._memory = mmap.mmap(fd, 0)
        self._num_passes = 0
        self._running: list[str] = []

    @staticmethod
    def new_file(max_sequences: int) -> int:
        """Create memory for a record of up to `max_sequences` ids, and return a descriptor for the child process."""
        fd = os.memfd_create("loramux-steps")
        os.ftruncate(fd, _IDS + ID_BYTES * max_sequences)
        return fd

    def note_pass(self) -> None:
        self._num_passes += 1
        _PASSES.pack_into(self._memory, 0, self._num_passes)

    def note_running(self, sequence_ids: list[str]) -> None:
        """Record the sequences that the device will be working on until the next call."""
        if sequence_ids == self._running:
            return
        self._running = sequence_ids
        data = "\n".join(sequence_ids).encode()
        capacity = len(self._memory) - _IDS
        if len(data) > capacity:
            data = data[: data.rfind(b"\n", 0, capacity + 1)]
        # Write the length last, so that a process that dies between these lines leaves no ids rather than wrong ids.
        _LENGTH.pack_into(self._memory, _PASSES.size, 0)
        self._memory[_IDS : _IDS + len(data)] = data
        _LENGTH.pack_into(self._memory, _PASSES.size, len(data))

    def num_passes(self) -> int:
        """Number of the loop's iterations. Even an idle loop iterates a few times per second."""
        return int(_PASSES.unpack_from(self._memory, 0)[0])

    def running(self) -> frozenset[str]:
        """The sequences that the device was last working on."""
        (length,) = _LENGTH.unpack_from(self._memory, _PASSES.size)
        data = self._memory[_IDS : _IDS + length]
        # An id can be garbled if the process is writing it at this moment. Such an id matches no sequence.
        return frozenset(data.decode(errors="replace").split("\n")) - {""}

    def close(self) -> None:
        self._memory.close()
