"""The validation process: reads one job from standard input, limits itself, and answers on standard output."""

from __future__ import annotations

import json
import resource
import sys
import traceback
from dataclasses import asdict
from pathlib import Path
from typing import Any

from loramux.adapter_store.canonical import write_canonical
from loramux.adapter_store.errors import AdapterRejected
from loramux.adapter_store.packed_file import write_packed
from loramux.adapter_store.packing import pack
from loramux.adapter_store.target import PackTarget
from loramux.adapter_store.validation import validate_files
from loramux.adapter_store.validator import Accepted, Limits, ValidationJob


def run_job(job: ValidationJob, target: PackTarget) -> Accepted:
    """Validate an upload and write its canonical and packed files; raises AdapterRejected."""
    report = validate_files(job.config.read_bytes(), job.tensors, target)
    digest = write_canonical(job.tensors, report.scales, job.canonical)
    packed = pack(job.canonical, target)
    write_packed(job.packed, packed, target)
    return Accepted(digest, report.max_rank, report.num_pages, report.document())


def limit_resources(limits: Limits) -> None:
    """Bound this process before it reads anything that a tenant wrote."""
    for kind, value in (
        (resource.RLIMIT_AS, limits.memory_bytes),
        (resource.RLIMIT_FSIZE, limits.file_bytes),
        (resource.RLIMIT_CPU, limits.cpu_s),
        (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_NOFILE, 64),
    ):
        resource.setrlimit(kind, (value, value))


def main() -> int:
    request = json.load(sys.stdin)
    job = ValidationJob(**{name: Path(path) for name, path in request["job"].items()})
    target = PackTarget.from_document(request["target"])
    limit_resources(Limits(**request["limits"]))
    try:
        accepted = run_job(job, target)
    except AdapterRejected as error:
        answer = _rejected(error)
    except MemoryError:
        answer = _rejected(AdapterRejected("validation_killed", "validation exceeded its limits"))
    except OSError:
        # A full disk says nothing about the adapter: no answer, and it will be validated again.
        raise
    except Exception:
        # What nobody foresaw fails closed; the cause goes to standard error.
        traceback.print_exc()
        answer = _rejected(AdapterRejected("validation_failed", "the adapter cannot be validated"))
    else:
        answer = {"accepted": asdict(accepted)}
    json.dump(answer, sys.stdout)
    return 0


def _rejected(error: AdapterRejected) -> dict[str, Any]:
    return {"rejected": {"code": error.code, "message": _plain(error.message), "param": _plain(error.param)}}


def _plain(text: str | None) -> str | None:
    """A tenant's names may hold halves of characters, which no answer could carry."""
    return text and text.encode("utf-8", "replace").decode()


if __name__ == "__main__":
    sys.exit(main())
