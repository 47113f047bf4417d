"""The thread that processes pending versions."""

from __future__ import annotations

import errno
import threading
import time
from collections.abc import Callable

import structlog

from loramux.adapter_store.errors import (
    AdapterCorrupt,
    BlobStoreUnavailable,
    StoreError,
    ValidationFailed,
    WeightsBeingPurged,
)
from loramux.adapter_store.ingest.base_validation import BaseValidation
from loramux.adapter_store.ingest.ingest import Ingest
from loramux.adapter_store.ingest.retry_pauses import RetryPauses
from loramux.adapter_store.registry.bases import Base
from loramux.adapter_store.registry.records import UNFINISHED
from loramux.migrations.database import DATABASE_TROUBLE

MAX_IN_A_ROW = 100
"""Maximum number of versions to process before the thread checks for abandoned uploads again."""
MAX_FOR_BASE_IN_A_ROW = 20
"""Maximum number of versions, accepted for other bases, that are validated before the thread looks for uploads and
reports its progress.
"""
OUTAGES = (BlobStoreUnavailable, ValidationFailed, WeightsBeingPurged, *DATABASE_TROUBLE)
"""Errors that are no version's fault: the store or the database is down, no validation can run, or equal weights are
being deleted.
"""

_log = structlog.get_logger(__name__)


class IngestWorker:
    """Processes pending versions as they arrive, then versions that only other bases have validated, and regularly
    removes abandoned uploads.

    Every `poll_s` seconds, it looks for versions that other gateways created or a dead gateway left behind, and retries
    versions that failed because of an outage. A version that failed for another reason is retried after growing pauses
    (`RetryPauses`). The first pause takes `poll_s` seconds. `note_progress` receives this server's base with the
    numbers of its versions by verdict. It is called after each group of verdicts, and about every `progress_s` seconds,
    because other servers change these numbers, too.
    """

    def __init__(
        self,
        ingest: Ingest,
        poll_s: float = 5.0,
        clear_up_s: float = 300.0,
        progress_s: float = 30.0,
        note_progress: Callable[[Base], None] = lambda base: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._ingest = ingest
        self._note_progress = note_progress
        self._poll_s = poll_s
        self._clear_up_s = clear_up_s
        self._progress_s = progress_s
        self._clock = clock
        self._next_progress = clock()
        self._pauses = RetryPauses(poll_s, clock)
        self._base_pauses = RetryPauses(poll_s, clock)
        self._is_stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="ingest", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self, timeout_s: float = 10.0) -> None:
        """Stop after the current version, waiting up to `timeout_s`.

        To interrupt the validation of that version, close the validator first.
        """
        self._is_stopping.set()
        self._ingest.has_pending.set()
        self._thread.join(timeout_s)

    def _run(self) -> None:
        next_clear_up = self._clock() + self._clear_up_s
        while not self._is_stopping.is_set():
            self._ingest.has_pending.wait(self._poll_s)
            self._ingest.has_pending.clear()
            try:
                self._process_waiting()
                if self._ingest.for_base is not None:
                    self._validate_for_base(self._ingest.for_base)
                if self._clock() >= next_clear_up:
                    next_clear_up = self._clock() + self._clear_up_s
                    self._ingest.remove_abandoned()
            except Exception as error:
                # The database or the blob store is down. Keep the thread running.
                _log.warning("ingest_postponed", error=str(error))

    def _process_waiting(self) -> None:
        # Versions that fail in this pass, or wait for their next attempt, are left for a later one.
        undecided = self._pauses.paused()
        num_done = 0
        for _ in range(MAX_IN_A_ROW):
            version_id = None if self._is_stopping.is_set() else self._ingest.next_waiting(undecided)
            if version_id is None:
                return
            try:
                version = self._ingest.process(version_id)
            except Exception as error:
                undecided.add(version_id)
                self._postpone("validation_postponed", version_id, error, self._pauses)
                continue
            if version.state in UNFINISHED:
                # Another server has claimed the version, or its source cannot be read.
                undecided.add(version_id)
            else:
                self._pauses.forget(version_id)
            num_done += 1
            _log.info("version_processed", version_id=version_id, state=version.state)
        if num_done:
            # More versions may be waiting.
            self._ingest.has_pending.set()

    def _validate_for_base(self, for_base: BaseValidation) -> None:
        undecided = self._base_pauses.paused()
        num_decided = 0
        version_id = None
        for _ in range(MAX_FOR_BASE_IN_A_ROW):
            # Tenants wait for their uploads, so uploads go first.
            is_interrupted = self._is_stopping.is_set() or self._ingest.has_pending.is_set()
            version_id = None if is_interrupted else for_base.next_waiting(undecided)
            if version_id is None:
                break
            try:
                verdict = for_base.process(version_id)
            except Exception as error:
                undecided.add(version_id)
                self._postpone("base_validation_postponed", version_id, error, self._base_pauses)
                continue
            if verdict == "pending":
                # Another server has claimed the version.
                undecided.add(version_id)
            else:
                self._base_pauses.forget(version_id)
                num_decided += 1
        if num_decided or self._clock() >= self._next_progress:
            self._next_progress = self._clock() + self._progress_s
            base = for_base.progress()
            self._note_progress(base)
            if num_decided:
                _log_progress(base)
        if num_decided and version_id is not None:
            # More versions may be waiting.
            self._ingest.has_pending.set()

    def _postpone(self, event: str, version_id: str, error: Exception, pauses: RetryPauses) -> None:
        is_full = isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT)
        # A damaged blob fails with the error of a store that is down, but only its version is affected.
        is_outage = is_full or (isinstance(error, OUTAGES) and not isinstance(error, AdapterCorrupt))
        pause_s = self._poll_s if is_outage else pauses.note_failure(version_id)
        # The message of an unexpected error does not say where it happened.
        trace = None if is_outage or isinstance(error, StoreError) else error
        _log.warning(event, version_id=version_id, error=str(error), retry_after_s=pause_s, exc_info=trace)


def _log_progress(base: Base) -> None:
    _log.info(
        "base_validation",
        base_id=base.id,
        validated=base.num_validated,
        rejected=base.num_rejected,
        pending=base.num_pending,
    )
