"""Runs validation in a process of its own, with limits on time and memory and nothing of ours in its environment."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import stat
import subprocess
import sys
import tempfile
import threading
from collections.abc import Collection, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, Protocol

import msgspec
import structlog

import loramux
from loramux.adapter_store.errors import AdapterRejected, StoreError
from loramux.adapter_store.target import PackTarget
from loramux.adapter_store.validation_job import Accepted, Limits, ValidationJob

__all__ = ["Accepted", "Limits", "SubprocessValidator", "ValidationFailed", "ValidationJob", "Validator"]

_VERDICT_SIGNALS = frozenset(
    {signal.SIGKILL, signal.SIGXCPU, signal.SIGXFSZ, signal.SIGSEGV, signal.SIGABRT, signal.SIGBUS, signal.SIGSYS}
)
"""How a process ends by its limits, for want of memory, or by a crash: this adapter would end the next one too."""

_WORKER = (sys.executable, "-P", "-m", "loramux.adapter_store.validation_worker")
_PROBE = (sys.executable, "-P", "-m", "loramux.adapter_store.sandbox")
_PROBE_TIMEOUT_S = 30.0
_MAX_ANSWER_BYTES = 4 << 20

NICENESS = 10
"""How far a validation stands back for the engine and the gateway: it gets about a tenth of a core that they want."""

_log = structlog.get_logger(__name__)


class _Rejected(msgspec.Struct, frozen=True):
    code: str
    message: str
    param: str | None
    report: dict[str, Any]


class _Answer(msgspec.Struct, frozen=True):
    """What the process says: one of two verdicts, what it used, and which measures of its sandbox there were not."""

    missing: list[str]
    usage: dict[str, int]
    accepted: Accepted | None = None
    rejected: _Rejected | None = None


class ValidationFailed(StoreError):
    """Validation could not be run at all; says nothing about the adapter."""


class Validator(Protocol):
    """How `Ingest` has an upload checked; raises AdapterRejected or ValidationFailed."""

    def validate(self, job: ValidationJob, target: PackTarget) -> Accepted: ...


class SubprocessValidator:
    """Validates in `python -m loramux.adapter_store.validation_worker`, which limits and confines itself.

    Its processor time is 10 s, or what `Limits.for_upload` derives from a large upload's size. Its time on the wall is
    ten times that, since it yields to everything else on the machine. `timeout_s`, on the wall, and `memory_bytes`
    replace the derived limits, `command` replaces the process, and `niceness` is the niceness it runs with. Without one
    of the `required` measures of its sandbox the process reads nothing, and ends.
    """

    def __init__(
        self,
        timeout_s: float | None = None,
        memory_bytes: int | None = None,
        file_bytes: int | None = None,
        command: Sequence[str] = _WORKER,
        required: Collection[str] = (),
        niceness: int = NICENESS,
    ) -> None:
        self._niceness = niceness
        self._command = command
        self._required = required
        self._file_bytes = file_bytes
        self._timeout_s = timeout_s
        self._memory_bytes = memory_bytes
        self._lock = threading.Lock()
        self._running: set[subprocess.Popen[bytes]] = set()
        self._is_closed = False
        self._missing: list[str] | None = None

    def validate(self, job: ValidationJob, target: PackTarget) -> Accepted:
        limits = self._limits(job, target)
        request = {
            "job": {name: str(path.absolute()) for name, path in asdict(job).items()},
            "target": target.document(),
            "limits": asdict(limits),
            "required": list(self._required),
        }
        # Files, not pipes: what the process writes is then bounded by its own limit, and read here up to another.
        with tempfile.TemporaryFile() as answer, tempfile.TemporaryFile() as errors:
            process = self._start(answer.fileno(), errors.fileno())
            wall_s = limits.wall_s if self._timeout_s is None else self._timeout_s
            try:
                process.communicate(json.dumps(request).encode(), timeout=wall_s)
            except subprocess.TimeoutExpired:
                message = f"validation took longer than {wall_s:g} s"
                raise AdapterRejected("validation_timeout", message) from None
            finally:
                # Whatever ended the wait, nobody is left to run on.
                if process.returncode is None:
                    _kill_group(process)
                    process.communicate()
                with self._lock:
                    self._running.remove(process)
            if self._is_closed:
                raise ValidationFailed("validation was stopped")
            _check_end(process.returncode, os.pread(errors.fileno(), _MAX_ANSWER_BYTES, 0))
            return self._verdict(os.pread(answer.fileno(), _MAX_ANSWER_BYTES, 0), job)

    def close(self) -> None:
        """End what is running, without a verdict, and start nothing more."""
        with self._lock:
            self._is_closed = True
            for process in self._running:
                if process.poll() is None:
                    _kill_group(process)

    def _limits(self, job: ValidationJob, target: PackTarget) -> Limits:
        try:
            tensors_bytes = job.tensors.lstat().st_size
        except OSError:
            tensors_bytes = 0
        limits = Limits.for_upload(target, tensors_bytes)
        if self._timeout_s is not None:
            limits = replace(limits, time_s=self._timeout_s)
        if self._memory_bytes is not None:
            limits = replace(limits, memory_bytes=self._memory_bytes)
        if self._file_bytes is not None:
            limits = replace(limits, file_bytes=self._file_bytes)
        return limits

    def _start(self, stdout: int, stderr: int) -> subprocess.Popen[bytes]:
        with self._lock:
            if self._is_closed:
                raise ValidationFailed("validation was stopped")
            try:
                process = subprocess.Popen(  # noqa: S603 - our own program, and nothing of a tenant's in its arguments
                    self._command,
                    stdin=subprocess.PIPE,
                    stdout=stdout,
                    stderr=stderr,
                    env=worker_environment(),
                    cwd=os.path.sep,
                    start_new_session=True,
                )
            except OSError as error:
                raise ValidationFailed(f"the validation process cannot be started: {error}") from error
            self._running.add(process)
        _give_way(process.pid, self._niceness)
        return process

    def _verdict(self, answer: bytes, job: ValidationJob) -> Accepted:
        """The process has read a tenant's bytes, so its own word is checked as well."""
        try:
            decoded = msgspec.json.decode(answer, type=_Answer)
            for path in (job.canonical, job.packed) if decoded.accepted else ():
                if not stat.S_ISREG(path.lstat().st_mode):
                    raise ValueError("the process wrote something else than a file")
            if (decoded.accepted is None) == (decoded.rejected is None):
                raise ValueError("the process gave no verdict, or two")
        except (ValueError, RecursionError, OSError) as error:
            _log.warning("validation_answer_refused", error=str(error))
            raise AdapterRejected("validation_failed", "the adapter cannot be validated") from error
        self._note_missing(decoded.missing)
        if decoded.accepted is None:
            assert decoded.rejected is not None
            rejected = decoded.rejected
            report = rejected.report | {"usage": decoded.usage}
            raise AdapterRejected(rejected.code, rejected.message, rejected.param, report)
        return replace(decoded.accepted, report=decoded.accepted.report | {"usage": decoded.usage})

    def _note_missing(self, missing: list[str]) -> None:
        """Say once which of the sandbox's measures this machine lacks."""
        if missing != self._missing:
            self._missing = missing
            if missing:
                _log.warning("validation_sandbox_incomplete", missing=missing)


def missing_measures(command: Sequence[str] = _PROBE) -> tuple[str, ...]:
    """Which measures of the sandbox this machine lacks; raises ValidationFailed where that cannot be found out."""
    try:
        done = subprocess.run(  # noqa: S603 - our own program
            command,
            env=worker_environment(),
            cwd=os.path.sep,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=_PROBE_TIMEOUT_S,
            check=True,
        )
        return tuple(msgspec.json.decode(done.stdout, type=list[str]))
    except (OSError, subprocess.SubprocessError, msgspec.MsgspecError) as error:
        raise ValidationFailed(f"the sandbox of the validation process cannot be tried: {error}") from error


def _give_way(pid: int, niceness: int) -> None:
    """Let the engine and the gateway have the processor first."""
    # Where there is no such process any more, or the machine does not take it, nothing is lost.
    with contextlib.suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, pid, niceness)
        # Linux may divide the processor among sessions, and this process has one of its own: see sched(7).
        Path(f"/proc/{pid}/autogroup").write_text(str(niceness))


def _kill_group(process: subprocess.Popen[bytes]) -> None:
    """The process leads a group of its own; called only before it has been waited for, so that the number is its."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


def _check_end(returncode: int, errors: bytes) -> None:
    if -returncode in _VERDICT_SIGNALS:
        raise AdapterRejected("validation_killed", "validation exceeded its limits")
    if returncode < 0:
        # Somebody stops the whole server, which says nothing about the adapter.
        raise ValidationFailed(f"the validation process was ended by signal {-returncode}")
    if returncode > 0:
        last_line = errors.decode(errors="replace").strip().rsplit("\n", 1)[-1]
        raise ValidationFailed(f"the validation process failed: {last_line}")


def worker_environment() -> dict[str, str]:
    """Only what Python needs: no credentials, and one thread, since each reserves memory that counts as used."""
    roots = [str(Path(place).parent.absolute()) for place in loramux.__path__]
    return {
        "PATH": os.environ.get("PATH", os.defpath),
        "PYTHONPATH": os.pathsep.join(roots),
        "PYTHONDONTWRITEBYTECODE": "1",
        "OPENBLAS_NUM_THREADS": "1",
        "OMP_NUM_THREADS": "1",
        "MKL_NUM_THREADS": "1",
    }
