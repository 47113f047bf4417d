"""Runs each validation in its own process, with limits on time and memory and without the server's environment."""

from __future__ import annotations

import json
import os
import signal
import stat
import subprocess
import sys
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, replace
from pathlib import Path
from queue import Empty, LifoQueue
from typing import Any, Protocol

import msgspec
import structlog

from loramux.adapter_store.errors import AdapterRejected, AdapterUnavailable, ValidationFailed
from loramux.adapter_store.formats.packed.invocation_tokens import INVOCATION_KEY, check_invocation_tokens
from loramux.adapter_store.formats.packed.pack_target import PackTarget
from loramux.adapter_store.formats.quantization.base_weights import BaseWeights
from loramux.adapter_store.formats.version_files.adapter_task import task_problem
from loramux.adapter_store.sandbox.confinement import ESSENTIAL
from loramux.adapter_store.sandbox.fork_server import (
    Ended,
    ForkLimits,
    ForkServer,
    ForkServerFailed,
    last_line,
    worker_environment,
)
from loramux.adapter_store.validation.job import Accepted, Limits, ValidationJob

__all__ = ["Accepted", "Limits", "SubprocessValidator", "ValidationFailed", "ValidationJob", "Validator"]

_VERDICT_SIGNALS = frozenset(
    {signal.SIGKILL, signal.SIGXCPU, signal.SIGXFSZ, signal.SIGSEGV, signal.SIGABRT, signal.SIGBUS, signal.SIGSYS}
)
"""Signals that kill a process that exceeds a limit, runs out of memory or crashes. A retry would fail too."""

_WORKER = (sys.executable, "-P", "-m", "loramux.adapter_store.validation.worker")
PUSH_WORKER = (*_WORKER, "900")
"""The command of a forking process that stays for 900 s after a validation, because a trainer pushes every few minutes.
"""
_PROBE = (sys.executable, "-P", "-m", "loramux.adapter_store.sandbox.confinement")
_PROBE_TIMEOUT_S = 30.0

_MALLOC = {"MALLOC_MMAP_THRESHOLD_": str(8 << 20), "MALLOC_TRIM_THRESHOLD_": str(32 << 20)}
"""Makes the C library keep freed memory of blocks of up to 8 MiB, at most 32 MiB in total, for the next tensor.

Otherwise, it returns the memory of each tensor to the kernel, and every page of the next one is a page fault.
"""

NICENESS = 10
"""Niceness of a validation process. On a core shared with the engine or gateway, it gets about a tenth of the time."""

PUSH_NICENESS = 5
"""Niceness of the validation of a push, for whose end a trainer waits. On a shared core, it gets a quarter of the time.
"""

_log = structlog.get_logger(__name__)


class _Rejected(msgspec.Struct, frozen=True):
    code: str
    message: str
    param: str | None
    report: dict[str, Any]


class _Answer(msgspec.Struct, frozen=True):
    """The process's answer: one of two verdicts, its resource usage, and the missing sandbox measures."""

    missing: list[str]
    usage: dict[str, int]
    accepted: Accepted | None = None
    rejected: _Rejected | None = None


class Validator(Protocol):
    """Validates an upload for `Ingest`. Raises AdapterRejected or ValidationFailed."""

    def validate(self, job: ValidationJob, target: PackTarget) -> Accepted: ...


class SubprocessValidator:
    """Validates in a process, `python -m loramux.adapter_store.validation.worker`, that limits and confines itself.

    The process's CPU time limit is 10 s, or more for a large upload: see `Limits.for_upload`. Its wall-clock limit is
    ten times as long, because it yields to all other processes. `timeout_s` replaces both time limits, `memory_bytes`
    and `file_bytes` replace the other derived limits, and `command` replaces the process's command. If the machine
    lacks one of the `required` sandbox measures, the process exits before reading any file of the upload. With a
    `base`, the process can read the base's embedding and head to check an activated LoRA. `num_processes` validations
    run at a time.

    An adapter whose process exceeds a limit is rejected permanently (`validation_killed`, `validation_timeout`). If the
    disk is full or the server is stopping, the validation is retried instead.
    """

    def __init__(
        self,
        timeout_s: float | None = None,
        memory_bytes: int | None = None,
        file_bytes: int | None = None,
        command: Sequence[str] = _WORKER,
        required: Collection[str] = (),
        niceness: int = NICENESS,
        base: BaseWeights | None = None,
        num_processes: int = 1,
    ) -> None:
        self._servers = [ForkServer(command, worker_environment() | _MALLOC) for _ in range(num_processes)]
        # The server that was used last is next, because it is running.
        self._free: LifoQueue[ForkServer] = LifoQueue()
        for server in self._servers:
            self._free.put(server)
        self._niceness = niceness
        self._required = required
        self._base = base
        self._file_bytes = file_bytes
        self._timeout_s = timeout_s
        self._memory_bytes = memory_bytes
        self._missing: list[str] | None = None

    def validate(self, job: ValidationJob, target: PackTarget) -> Accepted:
        limits = self._limits(job, target)
        request = {
            "job": {name: str(value.absolute()) for name, value in asdict(job).items() if isinstance(value, Path)},
            "needs_effect": job.needs_effect,
            "target": target.document(),
            "limits": asdict(limits),
            "required": list(self._required),
            "base": self._places(job, target),
        }
        wall_s = limits.wall_s if self._timeout_s is None else self._timeout_s
        with self._server() as server:
            try:
                ended = server.run(json.dumps(request).encode(), ForkLimits(wall_s, niceness=self._niceness))
            except ForkServerFailed as error:
                raise ValidationFailed(f"the validation process failed: {error}") from error
        if ended.took_too_long:
            raise AdapterRejected("validation_timeout", f"validation took longer than {wall_s:g} s")
        _check_end(ended)
        return self._verdict(ended.stdout, job)

    def close(self) -> None:
        """Kill the validations in progress, if any (`validate` raises ValidationFailed), and start no more."""
        for server in self._servers:
            server.close()

    def warm(self) -> None:
        """Start a process for a validation that comes soon, unless one is running or all are in use."""
        with suppress(Empty), self._server(is_patient=False) as server:
            server.warm()

    @contextmanager
    def _server(self, *, is_patient: bool = True) -> Iterator[ForkServer]:
        """Take a server that runs nothing. Raises Empty if there is none, unless `is_patient`."""
        server = self._free.get(block=is_patient)
        try:
            yield server
        finally:
            self._free.put(server)

    def _places(self, job: ValidationJob, target: PackTarget) -> dict[str, Any]:
        """Return where the base's embedding and head are stored, or {} if they are not needed or cannot be read."""
        if self._base is None or not _mentions_invocation(job.config):
            return {}
        try:
            return {module.name: asdict(self._base.place(module.name)) for module in target.outer_modules}
        except AdapterUnavailable:
            # The engine compares the weights when it loads the adapter.
            return {}

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

    def _verdict(self, answer: bytes, job: ValidationJob) -> Accepted:
        """Check the process's answer. It is not trusted, because the process has read a tenant's bytes."""
        try:
            decoded = msgspec.json.decode(answer, type=_Answer)
            for path in (job.canonical, job.packed) if decoded.accepted else ():
                if path == job.packed and not os.path.lexists(path):
                    continue
                if not stat.S_ISREG(path.lstat().st_mode):
                    raise ValueError("the process wrote something other than a regular file")
            if decoded.accepted:
                check_invocation_tokens(decoded.accepted.invocation_tokens)
                if decoded.accepted.vocab_size is not None and decoded.accepted.vocab_size < 1:
                    raise ValueError("the adapter has no tokens")
                problem = None if decoded.accepted.task is None else task_problem(decoded.accepted.task)
                if problem is not None:
                    raise ValueError(problem)
            if (decoded.accepted is None) == (decoded.rejected is None):
                raise ValueError("the process did not give exactly one verdict")
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
        """Log the sandbox measures that this machine lacks, unless the last validation lacked the same ones."""
        if missing != self._missing:
            self._missing = missing
            if missing:
                _log.warning("validation_sandbox_incomplete", missing=missing)


def _mentions_invocation(config: Path) -> bool:
    try:
        return INVOCATION_KEY.encode() in config.read_bytes()
    except OSError:
        return False


def missing_measures(command: Sequence[str] = _PROBE) -> tuple[str, ...]:
    """Return the sandbox measures that this machine lacks. Raises ValidationFailed if they cannot be determined."""
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
        raise ValidationFailed(f"the sandbox of the validation process cannot be tested: {error}") from error


def check_sandbox() -> None:
    """Raise ValidationFailed if the machine lacks a measure that the setting `sandbox = "required"` demands."""
    missing = missing_measures()
    if lacking := [name for name in ESSENTIAL if name in missing]:
        raise ValidationFailed(
            f"the setting sandbox is 'required', and this machine's kernel or container has no "
            f"{' and no '.join(lacking)}: 'loramux doctor --data-dir DIR' says how to fix it"
        )


def _check_end(ended: Ended) -> None:
    if -ended.returncode in _VERDICT_SIGNALS:
        raise AdapterRejected("validation_killed", "validation exceeded its limits")
    if ended.returncode < 0:
        # The whole server is being stopped, so the adapter is not at fault.
        raise ValidationFailed(f"the validation process was killed by signal {-ended.returncode}")
    if ended.returncode > 0:
        raise ValidationFailed(f"the validation process failed: {last_line(ended.stderr)}")
