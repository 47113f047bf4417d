"""Runs validation in a process of its own, with limits on time and memory and nothing of ours in its environment."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Protocol

import loramux
from loramux.adapter_store.errors import AdapterRejected, StoreError
from loramux.adapter_store.target import PackTarget

_BASE_MEMORY_BYTES = 1 << 30
_BASE_FILE_BYTES = 16 << 20
_VERDICT_SIGNALS = frozenset(
    {signal.SIGKILL, signal.SIGXCPU, signal.SIGXFSZ, signal.SIGSEGV, signal.SIGABRT, signal.SIGBUS}
)
"""How a process ends by its limits, for want of memory, or by a crash: this adapter would end the next one too."""


@dataclass(frozen=True, slots=True)
class ValidationJob:
    """Files of one upload, and where to put what becomes of them."""

    config: Path
    tensors: Path
    canonical: Path
    packed: Path


@dataclass(frozen=True, slots=True)
class Accepted:
    """An upload that passed; its canonical and packed files are written."""

    digest: str
    max_rank: int
    num_pages: int
    report: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Limits:
    """Bounds of one validation process."""

    memory_bytes: int
    file_bytes: int
    cpu_s: int

    @classmethod
    def for_target(cls, target: PackTarget, cpu_s: int) -> Limits:
        """Enough for the largest valid adapter: its pages are in memory twice at most, its files once on the disk."""
        largest = max(target.max_payload_bytes, target.max_tensors_bytes)
        return cls(_BASE_MEMORY_BYTES + 2 * largest, _BASE_FILE_BYTES + largest, cpu_s)


class ValidationFailed(StoreError):
    """Validation could not be run at all; says nothing about the adapter."""


class Validator(Protocol):
    """How `Ingest` has an upload checked; raises AdapterRejected or ValidationFailed."""

    def validate(self, job: ValidationJob, target: PackTarget) -> Accepted: ...


class SubprocessValidator:
    """Validates in `python -m loramux.adapter_store.validation_worker`, killed after `timeout_s`."""

    def __init__(self, timeout_s: float = 60.0, memory_bytes: int | None = None) -> None:
        self._timeout_s = timeout_s
        self._memory_bytes = memory_bytes
        self._lock = threading.Lock()
        self._running: set[subprocess.Popen[bytes]] = set()
        self._is_closed = False

    def validate(self, job: ValidationJob, target: PackTarget) -> Accepted:
        limits = Limits.for_target(target, cpu_s=int(self._timeout_s) + 1)
        if self._memory_bytes is not None:
            limits = replace(limits, memory_bytes=self._memory_bytes)
        request = {
            "job": {name: str(path) for name, path in asdict(job).items()},
            "target": target.document(),
            "limits": asdict(limits),
        }
        process = self._start()
        try:
            answer, errors = process.communicate(json.dumps(request).encode(), timeout=self._timeout_s)
        except subprocess.TimeoutExpired:
            process.kill()
            process.communicate()
            raise AdapterRejected("validation_timeout", f"validation took longer than {self._timeout_s:g} s") from None
        finally:
            with self._lock:
                self._running.remove(process)
        if self._is_closed:
            raise ValidationFailed("validation was stopped")
        return _accepted(process.returncode, answer, errors)

    def close(self) -> None:
        """End what is running, without a verdict, and start nothing more."""
        with self._lock:
            self._is_closed = True
            for process in self._running:
                process.kill()

    def _start(self) -> subprocess.Popen[bytes]:
        with self._lock:
            if self._is_closed:
                raise ValidationFailed("validation was stopped")
            try:
                process = subprocess.Popen(
                    [sys.executable, "-m", "loramux.adapter_store.validation_worker"],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.PIPE,
                    env=worker_environment(),
                    start_new_session=True,
                )
            except OSError as error:
                raise ValidationFailed(f"the validation process cannot be started: {error}") from error
            self._running.add(process)
        return process


def _accepted(returncode: int, answer: bytes, errors: bytes) -> Accepted:
    if -returncode in _VERDICT_SIGNALS:
        raise AdapterRejected("validation_killed", "validation exceeded its limits")
    if returncode < 0:
        # Somebody stops the whole server, which says nothing about the adapter.
        raise ValidationFailed(f"the validation process was ended by signal {-returncode}")
    if returncode > 0:
        last_line = errors.decode(errors="replace").strip().rsplit("\n", 1)[-1]
        raise ValidationFailed(f"the validation process failed: {last_line}")
    document = json.loads(answer)
    if "rejected" in document:
        raise AdapterRejected(**document["rejected"])
    return Accepted(**document["accepted"])


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
