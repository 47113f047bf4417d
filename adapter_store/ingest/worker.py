"""The thread that processes pending versions."""

from __future__ import annotations

import threading
import time

import structlog

from loramux.adapter_store.ingest.ingest import Ingest
from loramux.adapter_store.registry.records import UNFINISHED

MAX_IN_A_ROW = 100
"""Maximum number of versions to process before the thread checks for abandoned uploads again."""

_log = structlog.get_logger(__name__)


class IngestWorker:
    """Processes pending versions as they arrive, and regularly removes abandoned uploads.

    Every `poll_s` seconds, it looks for versions that other gateways created or a dead gateway left behind, and retries
    versions that failed because a store or the database was down.
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
        """Stop after the current version, waiting up to `timeout_s`. To cut it short, close the validator first."""
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
                # The database or the blob store is down. Keep the thread running.
                _log.warning("ingest_postponed", error=str(error))

    def _process_waiting(self) -> None:
        # Retry failed versions after all others.
        undecided: set[str] = set()
        num_done = 0
        for _ in range(MAX_IN_A_ROW):
            version_id = None if self._is_stopping.is_set() else self._ingest.next_waiting(undecided)
            if version_id is None:
                return
            try:
                version = self._ingest.process(version_id)
            except Exception as error:
                undecided.add(version_id)
                _log.warning("validation_postponed", version_id=version_id, error=str(error))
                continue
            if version.state in UNFINISHED:
                # Another server has claimed the version, or its source cannot be read.
                undecided.add(version_id)
            num_done += 1
            _log.info("version_processed", version_id=version_id, state=version.state)
        if num_done:
            # More versions may be waiting.
            self._ingest.has_pending.set()
