"""The thread that takes pending versions through validation."""

from __future__ import annotations

import threading
import time

import structlog

from loramux.adapter_store.ingest import MAX_WAITING, Ingest

_log = structlog.get_logger(__name__)


class IngestWorker:
    """Processes pending versions as they come, and from time to time removes abandoned uploads.

    Versions that other gateways made, or that a dead one left, are found every `poll_s`; one that a failing store or
    database kept from being processed is tried again as often.
    """

    def __init__(self, ingest: Ingest, poll_s: float = 5.0, clear_up_s: float = 300.0) -> None:
        self._ingest = ingest
        self._poll_s = poll_s
        self._clear_up_s = clear_up_s
        self._is_stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="ingest", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self, timeout_s: float = 10.0) -> None:
        """Finish the version in hand and end. Close the validator first so as not to wait for it."""
        self._is_stopping.set()
        self._ingest.has_pending.set()
        self._thread.join(timeout_s)

    def _run(self) -> None:
        next_clear_up = time.monotonic() + self._clear_up_s
        while not self._is_stopping.is_set():
            self._ingest.has_pending.wait(self._poll_s)
            self._ingest.has_pending.clear()
            try:
                self._process_waiting()
                if time.monotonic() >= next_clear_up:
                    next_clear_up = time.monotonic() + self._clear_up_s
                    self._ingest.remove_abandoned()
            except Exception as error:
                # The database or the blob store is down, which must not end the thread.
                _log.warning("ingest_postponed", error=str(error))

    def _process_waiting(self) -> None:
        waiting = self._ingest.waiting_versions()
        num_done = 0
        for version_id in waiting:
            if self._is_stopping.is_set():
                return
            try:
                version = self._ingest.process(version_id)
            except Exception as error:
                _log.warning("validation_postponed", version_id=version_id, error=str(error))
            else:
                num_done += 1
                _log.info("version_processed", version_id=version_id, state=version.state)
        if num_done and len(waiting) == MAX_WAITING:
            # There are more of them.
            self._ingest.has_pending.set()
