"""A process that imports all modules once and then forks for each request, so that a fork is ready in milliseconds.

Forks share no request data: the forking process reads only a request's time limits and niceness.
"""

from __future__ import annotations

import contextlib
import gc
import os
import select
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import loramux

IDLE_S = 60.0
"""The process exits after this idle time, in seconds. The next request starts a new process."""
MAX_OUTPUT_BYTES = 4 << 20
"""Maximum number of bytes read from a fork's output."""
_START_S = 60.0
_END_S = 10.0
_REQUEST = struct.Struct("!ddi")
"""A fork's limits on wall time and processor time in seconds, and its niceness, sent with its standard input, output
and error.
"""
_REPLY = struct.Struct("!i?d")
"""The fork's return code, a flag that is True if the fork exceeded its wall time, and its processor time in seconds."""


class ForkServerFailed(Exception):
    """The process could not be started, or has exited; the message says why."""


@dataclass(frozen=True, slots=True)
class ForkLimits:
    """Limits on a fork's wall time and processor time, in seconds, and its niceness.

    A processor time of 0 means no limit.
    """

    wall_s: float
    cpu_s: float = 0.0
    niceness: int = 0


@dataclass(frozen=True, slots=True)
class Ended:
    """A fork's exit status, processor time in seconds, and output."""

    returncode: int
    """Return code as in `subprocess`: negative if a signal killed the fork."""
    took_too_long: bool
    """True if the fork exceeded its wall time."""
    cpu_s: float
    stdout: bytes
    stderr: bytes

    @property
    def ran_out_of_time(self) -> bool:
        """True if the fork was killed because it exceeded a limit of its `ForkLimits`."""
        return self.took_too_long or self.returncode == -signal.SIGPROF


@dataclass(frozen=True, slots=True)
class _Running:
    """The process, our end of the socket that is its standard input, and its standard error."""

    process: subprocess.Popen[bytes]
    link: socket.socket
    errors: IO[bytes]


class ForkServer:
    """Starts `command` on demand; `command` must call `fork_for_each_request`."""

    def __init__(self, command: Sequence[str], environment: Mapping[str, str]) -> None:
        self._command = command
        self._environment = dict(environment)
        # Held during a request, so requests run one at a time.
        self._turn = threading.Lock()
        # Guards the fields that `close` changes while another thread waits for a reply.
        self._lock = threading.Lock()
        self._running: _Running | None = None
        self._is_closed = False

    @property
    def pid(self) -> int | None:
        """PID of the forking process, or None if it is not running."""
        running = self._running
        return None if running is None else running.process.pid

    def run(self, request: bytes, limits: ForkLimits) -> Ended:
        """Run a fork with `request` as its standard input. The fork is killed if it exceeds a limit.

        Raises ForkServerFailed if the forking process exits or cannot be started.
        """
        with (
            self._turn,
            tempfile.TemporaryFile() as stdin,
            tempfile.TemporaryFile() as stdout,
            tempfile.TemporaryFile() as stderr,
        ):
            stdin.write(request)
            stdin.seek(0)
            files = [stdin.fileno(), stdout.fileno(), stderr.fileno()]
            # An idle process may exit just as the request is sent, so try twice.
            reply = self._ask(files, limits) or self._ask(files, limits)
            if not reply:
                raise ForkServerFailed("it accepts no requests")
            # Use files, not pipes: the fork's own limits bound the files' size, and only the beginning of each is read
            # here.
            output, errors = (os.pread(file.fileno(), MAX_OUTPUT_BYTES, 0) for file in (stdout, stderr))
            returncode, took_too_long, cpu_s = _REPLY.unpack(reply)
            return Ended(returncode, took_too_long, cpu_s, output, errors)

    def warm(self) -> None:
        """Start the process, unless it is running or running a request. Failures are left to `run`."""
        if self._turn.acquire(blocking=False):
            try:
                with contextlib.suppress(ForkServerFailed):
                    self._ensure_running()
            finally:
                self._turn.release()

    def close(self) -> None:
        """Kill the current fork, stop the process, and never start another one."""
        with self._lock:
            self._is_closed = True
            if self._running is not None:
                self._running.link.shutdown(socket.SHUT_RDWR)
        with self._turn:
            self._end()

    def _ask(self, files: list[int], limits: ForkLimits) -> bytes:
        """Send one request and return the reply, which is empty if the process had exited because it was idle."""
        running = self._ensure_running()
        reply = b""
        returncode, why = 0, ""
        try:
            message = _REQUEST.pack(limits.wall_s, limits.cpu_s, limits.niceness)
            socket.send_fds(running.link, [message], files)
            running.link.settimeout(_START_S + limits.wall_s)
            reply = running.link.recv(_REPLY.size, socket.MSG_WAITALL)
        except OSError:
            pass
        finally:
            if len(reply) < _REPLY.size:
                returncode, why = self._end()
        if self._is_closed:
            raise ForkServerFailed("it was stopped")
        if returncode != 0:
            raise ForkServerFailed(why or f"it exited with code {returncode}")
        return reply

    def _ensure_running(self) -> _Running:
        if self._running is None or self._running.process.poll() is not None:
            self._end()
            self._start()
        assert self._running is not None
        return self._running

    def _start(self) -> None:
        with self._lock:
            if self._is_closed:
                raise ForkServerFailed("it was stopped")
            ours, theirs = socket.socketpair()
            errors = tempfile.TemporaryFile()  # noqa: SIM115 - closed with the process
            try:
                process = subprocess.Popen(  # noqa: S603 - our own program
                    self._command,
                    stdin=theirs.fileno(),
                    stdout=subprocess.DEVNULL,
                    stderr=errors,
                    env=self._environment,
                    cwd=os.path.sep,
                    start_new_session=True,
                )
            except OSError as error:
                ours.close()
                errors.close()
                raise ForkServerFailed(f"it cannot be started: {error}") from error
            finally:
                theirs.close()
            self._running = _Running(process, ours, errors)

    def _end(self) -> tuple[int, str]:
        """Stop the process if it is running, and return its exit code and the last line of its standard error."""
        running = self._running
        if running is None:
            return 0, ""
        with self._lock:
            self._running = None
            running.link.close()
        try:
            returncode = running.process.wait(_END_S)
        except subprocess.TimeoutExpired:
            running.process.kill()
            returncode = running.process.wait()
        with running.errors as errors:
            return returncode, last_line(os.pread(errors.fileno(), MAX_OUTPUT_BYTES, 0))


def last_line(said: bytes) -> str:
    """Return the last line of a process's standard error."""
    return said.decode(errors="replace").strip().rsplit("\n", 1)[-1]


def worker_environment() -> dict[str, str]:
    """Return a minimal environment, without credentials.

    It limits BLAS to one thread, because each thread reserves address space.
    """
    roots = [str(Path(place).parent.absolute()) for place in loramux.__path__]
    return {
        "PATH": os.environ.get("PATH", os.defpath),
        "PYTHONPATH": os.pathsep.join(roots),
        "PYTHONDONTWRITEBYTECODE": "1",
        "OPENBLAS_NUM_THREADS": "1",
        "OMP_NUM_THREADS": "1",
        "MKL_NUM_THREADS": "1",
    }


def fork_for_each_request(idle_s: float | None = IDLE_S) -> None:
    """Return in a new fork for each request of a ForkServer, whose socket is this process's standard input.

    The fork leads its own session and has the request as its standard input. The fork's process group is killed when
    the fork exceeds its wall time or the ForkServer closes the socket. The forking process exits when the ForkServer
    closes the socket, or after `idle_s` without a request (None means no limit).
    """
    link = socket.socket(fileno=os.dup(0))
    woken, waker = os.pipe()
    for end in (woken, waker):
        os.set_blocking(end, False)
    # SIGCHLD wakes up the waits below.
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(waker, warn_on_full_buffer=False)
    # A collection in a fork would write to the headers of all objects, and so copy the memory that they share.
    gc.collect()
    gc.freeze()
    while select.select([link], [], [], idle_s)[0]:
        message, files, _, _ = socket.recv_fds(link, _REQUEST.size, 3)
        if not message:
            break
        wall_s, cpu_s, niceness = _REQUEST.unpack(message)
        pid = os.fork()
        if pid == 0:
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            for end in (link.detach(), woken, waker):
                os.close(end)
            os.setsid()
            lower_priority(niceness)
            # SIGPROF kills the fork when it has used this much processor time. 0 sets no timer.
            signal.setitimer(signal.ITIMER_PROF, cpu_s)
            for number, file in enumerate(files):
                os.dup2(file, number)
                os.close(file)
            return
        for file in files:
            os.close(file)
        reply = _wait_for(pid, link, woken, wall_s)
        with contextlib.suppress(OSError):
            link.sendall(reply)
    sys.exit(0)


def lower_priority(niceness: int) -> None:
    """Set this process's niceness, so that other processes get the CPU first."""
    # Best effort: continue if the kernel refuses.
    with contextlib.suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, 0, niceness)
        # With autogrouping, Linux compares niceness only within a session. This process has its own session, so set the
        # session's niceness too: see sched(7).
        Path("/proc/self/autogroup").write_text(str(niceness))


def _wait_for(pid: int, link: socket.socket, woken: int, wall_s: float) -> bytes:
    """Wait for a fork to exit, or kill it at the time limit or when the socket closes, and return the reply."""
    deadline_s = time.monotonic() + wall_s
    while True:
        ended, status, used = os.wait4(pid, os.WNOHANG)
        if ended:
            return _REPLY.pack(os.waitstatus_to_exitcode(status), False, used.ru_utime + used.ru_stime)
        # The ForkServer sends nothing until it has its reply, so the socket becomes readable only when it is closed.
        ready, _, _ = select.select([link.fileno(), woken], [], [], max(0.0, deadline_s - time.monotonic()))
        if woken in ready:
            os.read(woken, 4096)
        elif link.fileno() in ready or time.monotonic() >= deadline_s:
            break
    # The fork has not been reaped, so its PID cannot have been reused. It may not lead its own process group yet.
    for kill in (os.killpg, os.kill):
        with contextlib.suppress(ProcessLookupError):
            kill(pid, signal.SIGKILL)
    _, status, used = os.wait4(pid, 0)
    return _REPLY.pack(os.waitstatus_to_exitcode(status), True, used.ru_utime + used.ru_stime)
