"""Runs a server in a child process on loopback, and stops it together with all processes that it started."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import httpx

from benchmarks.peers.system import SystemFailed

HOST = "127.0.0.1"
NO_DRAFTS = ("--speculate", "off")
"""Options of `loramux serve`. On a CPU, the default is drafts, and answers of random models repeat themselves."""
POLL_S = 0.2
STOP_S = 30.0
KILLED_S = 30.0
LOG_LINES = 15
DROPPED = ("LORAMUX_", "OMP_", "GOMP_", "KMP_", "MKL_", "VLLM_", "LLAMA_")


class ChildServer:
    """A server in its own process group. `stop` ends the whole group."""

    def __init__(self, name: str, command: Sequence[str], environment: Mapping[str, str], log: Path) -> None:
        self.name = name
        self._log = log
        log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("wb") as file:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                env=dict(environment),
                start_new_session=True,
            )

    @property
    def pid(self) -> int:
        return self._process.pid

    def wait_until_ready(self, url: str, timeout_s: float) -> None:
        """Poll `url` until it answers 200. Raises SystemFailed if the process ends or the timeout expires."""
        deadline = time.monotonic() + timeout_s
        with httpx.Client(timeout=5.0, trust_env=False) as client:
            while True:
                self.check()
                with contextlib.suppress(httpx.TransportError):
                    if client.get(url).status_code == 200:
                        return
                if time.monotonic() > deadline:
                    raise self.failed(f"is not ready after {timeout_s:.0f} s")
                time.sleep(POLL_S)

    def check(self) -> None:
        code = self._process.poll()
        if code is not None:
            raise self.failed(f"ended with exit code {code}")

    def failed(self, what: str) -> SystemFailed:
        lines = self._log.read_text(errors="replace").splitlines()[-LOG_LINES:]
        return SystemFailed(f"{self.name} {what}; the end of {self._log}:\n" + "\n".join(lines))

    def stop(self) -> None:
        """Ask the server to terminate, then kill the remaining processes in its group."""
        try:
            if self._process.poll() is None:
                self._process.send_signal(signal.SIGTERM)
                with contextlib.suppress(subprocess.TimeoutExpired):
                    self._process.wait(STOP_S)
        finally:
            # Kill the group even if the wait is interrupted. The leader's PID identifies the group until its last
            # process has ended.
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
        deadline = time.monotonic() + KILLED_S
        while _is_group_running(self._process.pid):
            if time.monotonic() > deadline:
                raise SystemFailed(f"{self.name} does not end: process group {self._process.pid} is still running")
            time.sleep(POLL_S / 10)


@contextlib.contextmanager
def child_server(name: str, command: Sequence[str], environment: Mapping[str, str], log: Path) -> Iterator[ChildServer]:
    server = ChildServer(name, command, environment, log)
    try:
        yield server
    finally:
        server.stop()


def processor_s(pid: int) -> float:
    """Processor time of a process, without its children, in seconds."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _is_group_running(group: int) -> bool:
    """True if any process in the group is alive. Zombies do not count."""
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            # The process's name can contain spaces and parentheses. Read its state, parent and group after the last
            # parenthesis.
            state, _, found = stat.read_text().rpartition(")")[2].split()[:3]
            if int(found) == group and state != "Z":
                return True
    return False


def server_environment(extra: Mapping[str, str]) -> dict[str, str]:
    """This process's environment without variables that would change how a server runs, plus `extra`.

    loramux's own variables are dropped because loramux rejects unknown ones, such as those that locate peers. Thread
    settings are dropped because each server chooses its own.
    """
    kept = {name: value for name, value in os.environ.items() if not name.startswith(DROPPED)}
    return kept | dict(extra)


def own_environment(extra: Mapping[str, str]) -> dict[str, str]:
    """The environment of a server that runs the code of this checkout."""
    return server_environment({"PYTHONPATH": os.pathsep.join(path for path in sys.path if path), **extra})


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind((HOST, 0))
        return int(listener.getsockname()[1])
