"""Starts the process that follows grammars, and has it fork."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import ExitStack

from loramux.engine.constraints.grammar_messages import EXIT_UNUSABLE

NOT_RUNNING = "the process that follows grammars has stopped"
UNUSABLE = "the model's vocabulary cannot be used with grammars"

END_S = 5.0
"""Longest time to wait for the process to exit, in seconds."""


class ProcessLink:
    """A running process and its standard input, a socket. Raises OSError if the process cannot be started."""

    def __init__(self, command: Sequence[str], environment: Mapping[str, str]) -> None:
        with ExitStack() as stack:
            self._link, theirs = socket.socketpair()
            stack.enter_context(self._link)
            self._errors = stack.enter_context(tempfile.TemporaryFile())
            with theirs:
                self._process = subprocess.Popen(  # noqa: S603 - our own program
                    command,
                    stdin=theirs.fileno(),
                    stdout=subprocess.DEVNULL,
                    stderr=self._errors,
                    env=environment,
                    cwd=os.path.sep,
                    start_new_session=True,
                )
            stack.pop_all()

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def has_ended(self) -> bool:
        return self._process.poll() is not None

    def fork(self) -> socket.socket:
        """Return a socket that is connected to a new fork. Raises OSError if the process has ended."""
        ours, theirs = socket.socketpair()
        with theirs:
            try:
                socket.send_fds(self._link, [b"\0"], [theirs.fileno()])
            except OSError:
                ours.close()
                raise
        return ours

    def stop(self) -> str:
        """Stop the process, and return why it could not be used."""
        self._link.close()
        try:
            self._process.wait(END_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        with self._errors as errors:
            said = os.pread(errors.fileno(), 1 << 16, 0).decode(errors="replace").strip()
        if said:
            # Tenants do not see this text, because it contains paths.
            print(f"{NOT_RUNNING}: {said.rsplit(chr(10), 1)[-1]}", file=sys.stderr)
        return UNUSABLE if self._process.returncode == EXIT_UNUSABLE else NOT_RUNNING
