"""Logs a child process's output in this process's log, with one event per line or traceback."""

from __future__ import annotations

from typing import Any

import structlog

MAX_LINE_BYTES = 16_384
"""Longest line in one event, in bytes. A longer line becomes several events."""
MAX_TRACEBACK_LINES = 400
_TRACEBACK = "Traceback (most recent call last):"


class OutputLines:
    """Takes output in chunks of any size. Call `end` after the last chunk."""

    def __init__(self, event: str, log: Any = None) -> None:
        self._event = event
        self._log = log if log is not None else structlog.get_logger()
        self._rest = b""
        self._traceback: list[str] = []

    def take(self, data: bytes) -> None:
        *lines, self._rest = (self._rest + data).split(b"\n")
        for line in lines:
            while len(line) > MAX_LINE_BYTES:
                self._take_line(line[:MAX_LINE_BYTES])
                line = line[MAX_LINE_BYTES:]
            self._take_line(line)
        while len(self._rest) > MAX_LINE_BYTES:
            self._take_line(self._rest[:MAX_LINE_BYTES])
            self._rest = self._rest[MAX_LINE_BYTES:]

    def end(self) -> None:
        rest, self._rest = self._rest, b""
        if rest:
            self._take_line(rest)
        self._say_traceback()

    def _take_line(self, line: bytes) -> None:
        text = line.decode(errors="replace").rstrip()
        if text == _TRACEBACK:
            self._say_traceback()
            self._traceback = [text]
        elif self._traceback:
            self._traceback.append(text)
            # A traceback's frames are indented. The first line that is not indented ends the traceback and names the
            # exception.
            if not text.startswith(" ") or len(self._traceback) >= MAX_TRACEBACK_LINES:
                self._say_traceback()
        elif text:
            self._log.info(self._event, text=text)

    def _say_traceback(self) -> None:
        lines, self._traceback = self._traceback, []
        if lines:
            self._log.error(self._event, text=lines[-1], traceback="\n".join(lines))
