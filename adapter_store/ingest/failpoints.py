"""The steps of ingestion between which a process may die."""

from __future__ import annotations

from collections.abc import Callable
from enum import StrEnum


class Failpoint(StrEnum):
    """What has just been done, in the order of an upload's way.

    After each of them `recover`, `process` and `remove_abandoned` of this or of another server bring things to a good
    end; the tests kill a process at every one.
    """

    UPLOAD_DECLARED = "upload declared"
    FILE_RECEIVED = "file received"
    FILE_STORED = "file stored"
    VERSION_ADDED = "version added"
    CLAIMED = "claimed"
    SOURCE_RECORDED = "source recorded"
    """Only of files that the server takes from an operator's bucket."""
    FILES_FETCHED = "files fetched"
    VALIDATED = "validated"
    ACCEPTED = "accepted"
    """From here on the row names its digest; no blob is put for good before."""
    CONFIG_KEPT = "configuration kept"
    HEADER_KEPT = "header kept"
    CANONICAL_STORED = "canonical file stored"
    PACKED_STORED = "packed file stored"
    PUBLISHED = "published"
    REJECTED = "rejected"
    """Instead of what comes between FILES_FETCHED and PUBLISHED."""
    FIRST_FILE_DELETED = "first uploaded file deleted"
    FILES_DELETED = "uploaded files deleted"


FailpointHook = Callable[[Failpoint], None]
"""Called at each failpoint; a test's may end the process."""


def no_op(failpoint: Failpoint) -> None:
    """What the server does at each failpoint: nothing."""
