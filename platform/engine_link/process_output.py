"""A child process's output. It is forwarded immediately, and the last 8 KiB are kept to explain a crash."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Callable

MAX_KEPT_BYTES = 8192
MAX_LINE = 400
READ_BYTES = 65536


def to_standard_error(data: bytes) -> None:
    """Forward output to standard error, where a child's output goes by default."""
    try:
        os.write(sys.__stderr__.fileno() if sys.__stderr__ is not None else 2, data)
    except OSError:
        # Standard error is closed. That must not end the engine.
        return


class ProcessOutput:
    """A pipe for the child's standard output and error. `write_fd` is the child's end."""

    def __init__(
        self, pass_on: Callable[[bytes], None] = to_standard_error, at_end: Callable[[], None] = lambda: None
    ) -> None:
        self._pass_on = pass_on
        self._at_end = at_end
        self._kept = b""
        self._loop = asyncio.get_running_loop()
        self._read_fd, self.write_fd = os.pipe()
        os.set_blocking(self._read_fd, False)
        self._is_open = True
        self._loop.add_reader(self._read_fd, self._read)

    def close_write_end(self) -> None:
        """Close this process's copy of the child's end, so that reading reaches end-of-file when the child exits."""
        if self.write_fd >= 0:
            os.close(self.write_fd)
            self.write_fd = -1

    def last_line(self) -> str | None:
        """Return the last non-blank line printed so far."""
        while self._read():
            # One read may not return all data in the pipe.
            continue
        lines = [line.strip() for line in self._kept.decode(errors="replace").splitlines()]
        return next((line[:MAX_LINE] for line in reversed(lines) if line), None)

    def close(self) -> None:
        self.close_write_end()
        if self._is_open:
            self._is_open = False
            self._loop.remove_reader(self._read_fd)
            os.close(self._read_fd)
            self._at_end()

    def _read(self) -> bool:
        """Read the available output. Return False if there is none or the pipe has ended."""
        if not self._is_open:
            return False
        try:
            data = os.read(self._read_fd, READ_BYTES)
        except BlockingIOError:
            return False
        if not data:
            # A pipe at its end stays readable. Without this call, the event loop would call this method forever.
            self._loop.remove_reader(self._read_fd)
            return False
        self._kept = (self._kept + data)[-MAX_KEPT_BYTES:]
        self._pass_on(data)
        return True
