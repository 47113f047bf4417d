"""Pushes: all files of a version in one request, which ends with the verdict."""

from __future__ import annotations

import shutil
import uuid
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from loramux.adapter_store.errors import PushUnderway, UploadRefused
from loramux.adapter_store.formats.files.file_names import TENSORS_FILE
from loramux.adapter_store.ingest.claims import ClaimedVersion, VersionClaims
from loramux.adapter_store.ingest.received_files import receive_files
from loramux.adapter_store.ingest.upload_rows import UploadRows
from loramux.adapter_store.ingest.version_processor import VersionProcessor
from loramux.adapter_store.registry.records import UNFINISHED, AdapterVersion, Upload, UploadFile

PUSH_LIFETIME_S = 900
"""A push whose server died counts against the tenant's quota for this long, in seconds."""
MAX_FORM_BYTES = 64 << 10
"""Most bytes of a request apart from its files."""


@dataclass(frozen=True, slots=True)
class ReceivedPush:
    """Files that have arrived, and the upload that counts their bytes."""

    upload: Upload
    directory: Path


class Pushes:
    """Receives the files of a version and publishes it, without a copy of the files in the blob store. Blocking.

    Nothing is acknowledged before the version is ready. If the server dies during a push, another server rejects the
    version once the claim has expired, unless all blobs that cannot be rebuilt are stored.
    """

    def __init__(
        self,
        rows: UploadRows,
        claims: VersionClaims,
        processor: VersionProcessor,
        scratch_dir: Path,
        max_bytes: Mapping[str, int],
    ) -> None:
        self._rows = rows
        self._claims = claims
        self._processor = processor
        self._scratch_dir = scratch_dir
        self._max_bytes = max_bytes

    def receive(self, adapter_id: str, items: Iterable[str | bytes], num_bytes: int) -> ReceivedPush:
        """Receive a push of `num_bytes` bytes, which count against the tenant's quota before the first one is read.

        `receive_files` describes `items`. Call `discard` after the push. Raises AdapterNotFound, UploadRefused,
        LimitReached, the registry's limit errors, or what `items` raises.
        """
        largest = sum(self._max_bytes.values()) + MAX_FORM_BYTES
        if not 0 < num_bytes <= largest:
            raise UploadRefused("file_too_large", f"a push must have 1 to {largest} bytes", "Content-Length")
        announced = (UploadFile(TENSORS_FILE, num_bytes, sha256=""),)
        upload = self._rows.open_upload(adapter_id, announced, PUSH_LIFETIME_S * 1_000_000)
        push = ReceivedPush(upload, self._scratch_dir / uuid.uuid4().hex)
        try:
            push.directory.mkdir(parents=True)
            files = tuple(receive_files(items, push.directory, self._max_bytes))
        except BaseException:
            self.discard(push)
            raise
        return replace(push, upload=replace(upload, files=files))

    def publish(self, push: ReceivedPush, *, needs_effect: bool) -> AdapterVersion:
        """Validate and publish a push, or return the version that already has these files.

        The version returned may be rejected. Raises PushUnderway, AdapterNotFound, UploadNotFound if the push was
        cancelled, UploadRefused, LimitReached, or StoreError if a store or the validation process fails.
        """
        lease_us = round(self._claims.lease_s * 1_000_000)
        added = self._rows.add_pushed_version(push.upload, self._claims.server_id, lease_us)
        version = added.version
        if added.upload_id != push.upload.id:
            if version.state in UNFINISHED:
                raise PushUnderway(f"version {version.number} has the same files and is being validated")
            return version
        claimed = ClaimedVersion(version, push.upload)
        return self._processor.process_files(claimed, push.directory, needs_effect=needs_effect)

    def discard(self, push: ReceivedPush) -> None:
        """Delete what is left of a push that has ended."""
        shutil.rmtree(push.directory, ignore_errors=True)
        self._rows.discard_upload(push.upload.id)
