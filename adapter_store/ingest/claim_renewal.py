"""Keeps a claim alive while its version is worked on."""

from __future__ import annotations

import threading
from types import TracebackType
from typing import Self

import structlog

from loramux.adapter_store.errors import ClaimLost
from loramux.adapter_store.ingest.claims import VersionClaims

_log = structlog.get_logger(__name__)


class ClaimRenewal:
    """Renews a claim three times a lease, on a thread that lives as long as the `with` block.

    A claim that is lost all the same is found out by whoever makes the next transition with it.
    """

    def __init__(self, claims: VersionClaims, version_id: str) -> None:
        self._claims = claims
        self._version_id = version_id
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="claim", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._is_over.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._is_over.wait(self._claims.lease_s / 3):
            try:
                self._claims.renew(self._version_id)
            except ClaimLost:
                return
            except Exception as error:
                # The database is down: the claim lasts for two more tries.
                _log.warning("claim_not_renewed", version_id=self._version_id, error=str(error))
