"""Forks processes that ingest adapters and die or stop at a given step.

python -m tests.adapter_store.ingest.ingest_process

reads commands from standard input, one JSON object per line, and answers each command with one line. It imports
everything once and forks a process per job, which takes milliseconds. See `tests/adapter_store/ingest/process_lab.py`.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from loramux.adapter_store.blobs.blob_url import open_blob_store
from loramux.adapter_store.blobs.interface import BlobStore
from loramux.adapter_store.blobs.local import LocalBlobStore
from loramux.adapter_store.blobs.s3_blobs import S3BlobStore
from loramux.adapter_store.formats.packed.pack_target import PackTarget
from loramux.adapter_store.ingest.failpoints import Failpoint
from loramux.adapter_store.ingest.ingest import Ingest
from loramux.adapter_store.ingest.worker import IngestWorker
from loramux.adapter_store.registry.records import UploadFile
from loramux.adapter_store.registry.registry import AdapterRegistry
from loramux.adapter_store.sources.adapter_sources import AdapterSources
from loramux.adapter_store.validation.validator import Accepted, SubprocessValidator, ValidationJob, Validator
from loramux.adapter_store.validation.worker import run_job
from loramux.migrations.database import Database

__all__ = ["S3BlobStore"]


class DirectValidator:
    """A validator that runs in the calling process, which is faster."""

    def validate(self, job: ValidationJob, target: PackTarget) -> Accepted:
        return run_job(job, target)


class Server:
    """`job` configures the ingestion."""

    def __init__(self, job: dict[str, Any]) -> None:
        self._job = job
        self._num_steps = 0
        offset_us = round(job.get("offset_s", 0) * 1_000_000)
        database = Database(job["database_url"], clock=lambda: time.time_ns() // 1000 + offset_us)
        validator: Validator = SubprocessValidator() if job.get("is_sandboxed") else DirectValidator()
        self._ingest = Ingest(
            AdapterRegistry(database),
            open_blob_store(job["blob_url"]),
            PackTarget.from_document(job["target"]),
            Path(job["scratch"]),
            validator,
            lease_s=job["lease_s"],
            sources=AdapterSources(("s3://operator/adapters",), self._open_source),
            at_failpoint=self._at_failpoint,
        )

    def run(self) -> None:
        getattr(self, f"_{self._job['kind']}")()

    def _push(self) -> None:
        """Act as a client that uploads an adapter, then as a worker."""
        self._ingest.process(self._upload())

    def _upload(self) -> str:
        contents = {name: (Path(self._job["files"]) / name).read_bytes() for name in self._job["sizes"]}
        declared = [UploadFile(name, self._job["sizes"][name], self._job["checksums"][name]) for name in contents]
        upload = self._ingest.create_upload(self._job["adapter_id"], declared)
        self._acknowledge("upload", upload.id)
        for name, content in contents.items():
            self._ingest.put_file(upload.id, name, _chunks(content), len(content))
            self._acknowledge("file", name)
        version = self._ingest.create_version(self._job["adapter_id"], upload.id)
        self._acknowledge("version", version.id)
        return version.id

    def _register(self) -> None:
        """Act as an operator who registers a source, then as a worker."""
        version = self._ingest.create_version_from(self._job["adapter_id"], "s3://operator/adapters/one")
        self._acknowledge("version", version.id)
        self._ingest.process(version.id)

    def _recover(self) -> None:
        self._ingest.recover()
        while (version_id := self._ingest.next_waiting()) is not None:
            self._ingest.process(version_id)
        self._ingest.remove_abandoned()

    def _serve(self) -> None:
        """Act as a running server until SIGTERM arrives."""
        is_ending = threading.Event()
        signal.signal(signal.SIGTERM, lambda *_: is_ending.set())
        self._ingest.recover()
        worker = IngestWorker(self._ingest, poll_s=0.05)
        worker.start()
        is_ending.wait()
        worker.stop()

    def _at_failpoint(self, step: Failpoint) -> None:
        if step == self._job.get("die_at"):
            self._num_steps += 1
            if self._num_steps == self._job.get("nth", 1):
                os.kill(os.getpid(), signal.SIGKILL)
        if step == self._job.get("stop_at"):
            os.kill(os.getpid(), signal.SIGSTOP)

    def _acknowledge(self, what: str, name: str) -> None:
        with Path(self._job["acknowledged"]).open("a") as file:
            file.write(f"{what} {name}\n")

    def _open_source(self, url: str) -> BlobStore:
        return LocalBlobStore(Path(self._job["files"]))


def _chunks(data: bytes) -> Iterator[bytes]:
    for start in range(0, len(data), 1000):
        yield data[start : start + 1000]


def start(job: dict[str, Any]) -> int:
    process = os.fork()
    if process:
        return process
    try:
        os.environ.update(job["environment"])
        Server(job).run()
    except BaseException:
        traceback.print_exc()
        os._exit(1)
    sys.stdout.flush()
    os._exit(0)


def main() -> None:
    assert "torch" not in sys.modules, "importing torch would slow down every child"
    answers = os.fdopen(os.dup(1), "w")
    # Keep the children's output out of the answers.
    os.dup2(2, 1)
    for line in sys.stdin:
        command = json.loads(line)
        answer: dict[str, Any] = {}
        if command["do"] == "start":
            answer["process"] = start(command["job"])
        elif command["do"] == "signal":
            os.kill(command["process"], command["signal"])
        elif command["do"] == "wait":
            _, status = os.waitpid(command["process"], os.WUNTRACED if command["is_stop_enough"] else 0)
            answer["end"] = -os.WSTOPSIG(status) if os.WIFSTOPPED(status) else os.waitstatus_to_exitcode(status)
        answers.write(json.dumps(answer) + "\n")
        answers.flush()


if __name__ == "__main__":
    main()
