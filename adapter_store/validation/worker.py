"""The validation process. Each fork reads one job from standard input, confines itself, validates the upload, and
writes its answer to standard output.
"""

from __future__ import annotations

import errno
import json
import math
import os
import resource
import sys
import traceback
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import Any, TextIO

import numpy.random  # noqa: F401 - numpy would import it on first use, when this process cannot open files any more

from loramux.adapter_store.errors import AdapterRejected
from loramux.adapter_store.formats.files.open_matrices import MatrixPlace, OpenMatrices
from loramux.adapter_store.formats.packed.canonical import CanonicalAdapter, write_canonical
from loramux.adapter_store.formats.packed.pack_target import PackTarget
from loramux.adapter_store.formats.packed.packed_file import write_packed
from loramux.adapter_store.formats.packed.packing import needs_base, pack
from loramux.adapter_store.formats.packed.replaced_rows import replaced_rows
from loramux.adapter_store.formats.quantization.base_weights import WeightRows
from loramux.adapter_store.sandbox.confinement import confine, limit_resources
from loramux.adapter_store.sandbox.fork_server import fork_for_each_request
from loramux.adapter_store.validation.job import Accepted, Limits, ValidationJob
from loramux.adapter_store.validation.report import CheckList
from loramux.adapter_store.validation.validation import validate_files

_PEAKS = {"VmHWM": "max_rss_bytes", "VmPeak": "max_address_bytes"}


def run_job(job: ValidationJob, target: PackTarget, base: WeightRows | None = None) -> Accepted:
    """Validate an upload, and write its canonical file and, unless packing needs the base, its packed file.

    If `base` is given, an activated LoRA's copies of the embedding and head are compared with the base's, because they
    must be equal. Raises AdapterRejected.
    """
    checks = CheckList()
    report = validate_files(job.config.read_bytes(), job.tensors, target, checks, job.needs_effect)
    with checks.check("packing"):
        digest = write_canonical(
            job.tensors,
            report.scales,
            job.canonical,
            report.names,
            report.invocation_tokens,
            report.trained,
            report.vocab_size,
            report.num_labels,
            report.stack_forms,
        )
        if report.invocation_tokens and report.trained and base is not None:
            with CanonicalAdapter(job.canonical) as file:
                replaced_rows(file, target, base)
        if not needs_base(job.canonical):
            # The server stores a copy, and readers verify checksums, so the copy here need not survive a crash.
            write_packed(job.packed, pack(job.canonical, target, digest=digest), target, is_flushed=False)
    return Accepted(
        digest,
        report.max_rank,
        report.num_pages,
        report.document(),
        report.invocation_tokens,
        report.vocab_size,
        report.task,
    )


def answer_to(job: ValidationJob, target: PackTarget, base: WeightRows | None = None) -> dict[str, Any]:
    """Run a job and return the answer. Raises OSError if the machine fails, for example because its disk is full."""
    try:
        return {"accepted": asdict(run_job(job, target, base))}
    except AdapterRejected as error:
        return _rejected(error)
    except MemoryError:
        return _rejected(_beyond_limits())
    except OSError as error:
        # The limits on file size and memory fit the largest valid adapter, so an adapter that exceeds one would exceed
        # it again. A full disk is not the adapter's fault: write no answer, so that the adapter is retried.
        if error.errno in (errno.EFBIG, errno.ENOMEM):
            return _rejected(_beyond_limits())
        raise
    except Exception:
        # On an unforeseen error, reject the adapter and write the cause to standard error.
        traceback.print_exc()
        return _rejected(AdapterRejected("validation_failed", "the adapter cannot be validated"))


def main() -> int:
    """The argument, if any, is the idle time after which the forking process exits, in seconds."""
    fork_for_each_request(*map(float, sys.argv[1:2]))
    request = json.load(sys.stdin)
    paths = {name: Path(path) for name, path in request["job"].items()}
    job = ValidationJob(**paths, needs_effect=request["needs_effect"])
    target = PackTarget.from_document(request["target"])
    limits = Limits(**request["limits"])
    base = _opened_base(request["base"])
    # Confine the process before it reads any of the tenant's data.
    limit_resources(limits.memory_bytes, limits.file_bytes, math.ceil(limits.time_s))
    with _own_status() as status:
        folders = {path.parent for path in (job.config, job.tensors, job.canonical, job.packed)}
        missing = confine(folders, request["required"])
        json.dump({**answer_to(job, target, base), "missing": missing, "usage": _usage(status)}, sys.stdout)
    return 0


def _opened_base(places: dict[str, dict[str, Any]]) -> OpenMatrices | None:
    """Open the base's matrices before access is denied, or return None if there are none or they cannot be opened.

    Without these matrices, the engine compares the copies when it first loads the adapter.
    """
    try:
        return OpenMatrices({module: MatrixPlace(**place) for module, place in places.items()}) if places else None
    except OSError:
        return None


def _own_status() -> AbstractContextManager[TextIO | None]:
    """Open the kernel's status file for this process before access is denied, or yield None if it cannot be opened."""
    try:
        return open("/proc/self/status")
    except OSError:
        return nullcontext()


def _usage(status: TextIO | None) -> dict[str, int]:
    """Return the CPU time, and the peak memory and address space.

    Memory is not read from getrusage(2), because its peak includes the parent process's memory.
    """
    used = resource.getrusage(resource.RUSAGE_SELF)
    usage = {"cpu_ms": round((used.ru_utime + used.ru_stime) * 1000)}
    for line in status or ():
        name, _, value = line.partition(":")
        if name in _PEAKS:
            usage[_PEAKS[name]] = int(value.split()[0]) * 1024
    return usage


def _beyond_limits() -> AdapterRejected:
    return AdapterRejected("validation_killed", "validation exceeded its limits")


def _rejected(error: AdapterRejected) -> dict[str, Any]:
    return {
        "rejected": {
            "code": error.code,
            "message": error.message,
            "param": error.param,
            "report": error.report,
        }
    }


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    # Without the interpreter's own end, which visits every object and so copies most of the forking process's memory.
    os._exit(code)
