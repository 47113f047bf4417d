"""The janitor: deletes files that no version needs."""

from __future__ import annotations

from loramux.adapter_store.blobs.interface import UPLOADS, BlobStore
from loramux.adapter_store.ingest.upload_rows import UploadRows

FORGET_AFTER_US = 7 * 86_400 * 1_000_000
"""How long an expired upload is reported as expired rather than missing, in microseconds."""


def delete_orphans(upload_rows: UploadRows, blobs: BlobStore) -> None:
    """Delete the files of expired uploads and of versions with a verdict, and the leftovers of crashed puts.

    Safe to run on any number of servers at any time. Files that arrive during this run, or after their upload has
    expired, are left to the next run. Only files under `uploads/` can become orphans. Permanent blobs belong to
    accepted versions, which are eventually published.
    """
    blobs.remove_unfinished()
    keys = list(blobs.list_keys(UPLOADS))
    # Query after the listing. An upload that is not in use now will never be in use again.
    in_use = upload_rows.uploads_in_use({_upload_id(key) for key in keys})
    for key in keys:
        if _upload_id(key) not in in_use:
            blobs.delete(key)
    upload_rows.forget_expired(FORGET_AFTER_US)


def _upload_id(key: str) -> str:
    return key.removeprefix(UPLOADS).partition("/")[0]
