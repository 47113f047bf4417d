"""Removes what no version needs."""

from __future__ import annotations

from loramux.adapter_store.blobs.interface import UPLOADS, BlobStore
from loramux.adapter_store.ingest.upload_rows import UploadRows

FORGET_AFTER_US = 7 * 86_400 * 1_000_000
"""How long a client that comes too late is told that its upload has expired, and not that there is none."""


class Janitor:
    """Any number of servers may clear up at once, at any time: what an upload or a version needs stays.

    Only files below `uploads/` can become orphans. Blobs for good are put for versions that have been accepted, and
    those are published in the end.
    """

    def __init__(self, upload_rows: UploadRows, blobs: BlobStore) -> None:
        self._upload_rows = upload_rows
        self._blobs = blobs

    def clear_up(self) -> None:
        """Delete the files of expired uploads and of decided versions, and what unfinished puts left behind.

        A file that is put while this runs, or after its upload has expired, is found the next time.
        """
        self._blobs.remove_unfinished()
        keys = list(self._blobs.list_keys(UPLOADS))
        # Asked after the keys are known: an upload that is not in use now will never be again.
        in_use = self._upload_rows.uploads_in_use({_upload_id(key) for key in keys})
        for key in keys:
            if _upload_id(key) not in in_use:
                self._blobs.delete(key)
        self._upload_rows.forget_expired(FORGET_AFTER_US)


def _upload_id(key: str) -> str:
    return key.removeprefix(UPLOADS).partition("/")[0]
