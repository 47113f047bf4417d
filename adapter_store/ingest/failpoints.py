"""Points in ingestion at which tests can kill the process."""

from __future__ import annotations

from collections.abc import Callable
from enum import StrEnum


class Failpoint(StrEnum):
    """Points just after each step of ingestion, in order.

    After a crash at any step, a server completes or removes the upload, in `recover`, `process` or `remove_abandoned`
    of `Ingest`. The tests kill a process at each of these points.
    """

    UPLOAD_DECLARED = "upload declared"
    FILE_RECEIVED = "file received"
    FILE_STORED = "file stored"
    VERSION_ADDED = "version added"
    CLAIMED = "claimed"
    SOURCE_RECORDED = "source recorded"
    """Reached only if the server fetches the files from an operator's bucket or a hub."""
    FILES_FETCHED = "files fetched"
    VALIDATED = "validated"
    ACCEPTED = "accepted"
    """The version's row now has its digest. No permanent blob is stored before this point."""
    CONFIG_KEPT = "configuration kept"
    HEADER_KEPT = "header kept"
    CANONICAL_STORED = "canonical file stored"
    PACKED_STORED = "packed file stored"
    PUBLISHED = "published"
    REJECTED = "rejected"
    """Reached instead of PUBLISHED if the version is rejected."""
    FIRST_FILE_DELETED = "first uploaded file deleted"
    FILES_DELETED = "uploaded files deleted"


FailpointHook = Callable[[Failpoint], None]
"""Called at each failpoint. A test's hook can kill the process."""


def no_op(failpoint: Failpoint) -> None:
    """The hook that servers use. It does nothing."""
