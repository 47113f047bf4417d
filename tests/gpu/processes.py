from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path

GRACE_S = 5.0
"""Time that an interrupted pytest gets to write its report, in seconds."""

MAX_OUTPUT = 40_000
"""Maximum stored length of a process's output, in characters. Only the end is kept."""


@dataclass(frozen=True, slots=True)
class Ended:
    """A process that has ended. `exit_code` is the negative signal number if a signal killed the process."""

    command: list[str]
    exit_code: int
    was_stopped: bool
    output: str


def run_at_once(
    commands: list[list[str]], folder: Path, environment: dict[str, str], cwd: Path, limit_s: float
) -> list[Ended]:
    """Run all commands in parallel, and stop those still running after `limit_s`, including their children."""
    started = time.monotonic()
    logs = [folder / f"{number}.log" for number in range(len(commands))]
    running: list[subprocess.Popen[bytes]] = []
    late: list[subprocess.Popen[bytes]] = []
    try:
        for command, log in zip(commands, logs, strict=True):
            with log.open("wb") as output:
                running.append(
                    subprocess.Popen(
                        command,
                        cwd=cwd,
                        env=environment,
                        stdin=subprocess.DEVNULL,
                        stdout=output,
                        stderr=subprocess.STDOUT,
                        start_new_session=True,
                    )
                )
        late = [process for process in running if not _has_ended(process, started + limit_s)]
        for process in late:
            _signal(process, signal.SIGINT)
        for process in late:
            _has_ended(process, started + limit_s + GRACE_S)
    finally:
        for process in running:
            # Also kill any children of processes that have already ended.
            _signal(process, signal.SIGKILL)
            process.wait()
    return [
        Ended(command, process.returncode, process in late, log.read_text(errors="replace")[-MAX_OUTPUT:])
        for command, process, log in zip(commands, running, logs, strict=True)
    ]


def _has_ended(process: subprocess.Popen[bytes], until: float) -> bool:
    try:
        process.wait(max(0.0, until - time.monotonic()))
    except subprocess.TimeoutExpired:
        return False
    return True


def _signal(process: subprocess.Popen[bytes], number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, number)
