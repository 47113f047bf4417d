"""Pushes: all files of a version in one request, which ends with the verdict."""

from __future__ import annotations

import os
import shutil
import threading
import uuid
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import structlog

from loramux.adapter_store.errors import PushUnderway, UploadRefused
from loramux.adapter_store.formats.files.file_names import TENSORS_FILE
from loramux.adapter_store.ingest.claims import ClaimedVersion, VersionClaims
from loramux.adapter_store.ingest.received_files import receive_files
from loramux.adapter_store.ingest.upload_rows import UploadRows
from loramux.adapter_store.ingest.version_processor import LocalFiles, PushStage, VersionProcessor
from loramux.adapter_store.registry.records import UNFINISHED, AdapterVersion, Upload, UploadFile
from loramux.adapter_store.tiers.disk_tier import DiskTier

PUSH_LIFETIME_S = 900
"""A push whose server died counts against the tenant's quota for this long, in seconds."""
MAX_FORM_BYTES = 64 << 10
"""Most bytes of a request apart from its files."""

_log = structlog.get_logger(__name__)


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
        warm: Callable[[], None],
        open_tier: Callable[[], DiskTier] | None,
    ) -> None:
        """`warm` prepares a validation while the files arrive. `open_tier` opens the disk tier of an engine on this
        machine. It is called for the first push that an engine is to load.
        """
        self._rows = rows
        self._claims = claims
        self._processor = processor
        self._scratch_dir = scratch_dir
        self._max_bytes = max_bytes
        self._warm = warm
        self._open_tier = open_tier
        self._tier: DiskTier | None = None
        self._lock = threading.Lock()

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
            self._warm()
            files = tuple(receive_files(items, push.directory, self._max_bytes))
        except BaseException:
            self.discard(push)
            raise
        return replace(push, upload=replace(upload, files=files))

    def publish(
        self,
        push: ReceivedPush,
        *,
        needs_effect: bool,
        when_loadable: Callable[[str], object] | None = None,
        passed: Callable[[PushStage], None] = lambda stage: None,
    ) -> AdapterVersion:
        """Validate and publish a push, or return the version that already has these files.

        `when_loadable` is called with the digest as soon as the engine on this machine can load the version, which is
        before it is ready. It is not called if the engine needs the blob store. `passed` is called at the end of each
        stage. The version returned may be rejected. Raises PushUnderway, AdapterNotFound, UploadNotFound if the push
        was cancelled, UploadRefused, LimitReached, or StoreError if a store or the validation process fails.
        """
        lease_us = round(self._claims.lease_s * 1_000_000)
        added = self._rows.add_pushed_version(push.upload, self._claims.server_id, lease_us)
        version = added.version
        if added.upload_id != push.upload.id:
            if version.state in UNFINISHED:
                raise PushUnderway(f"version {version.number} has the same files and is being validated")
            return version
        claimed = ClaimedVersion(version, push.upload)

        def hand_over(digest: str, packed: Path) -> bool:
            if when_loadable is None or not self._keep_on_disk(digest, packed):
                return False
            when_loadable(digest)
            return True

        return self._processor.process_files(claimed, LocalFiles(push.directory, needs_effect, hand_over, passed))

    def discard(self, push: ReceivedPush) -> None:
        """Delete what is left of a push that has ended."""
        shutil.rmtree(push.directory, ignore_errors=True)
        self._rows.discard_upload(push.upload.id)

    def _keep_on_disk(self, digest: str, packed: Path) -> bool:
        """Add a packed file to the engine's disk tier, unless it has one, and return whether it has one now."""
        try:
            tier = self._own_tier()
            if tier is None:
                return False
            if not _is_held(tier, digest):
                file = tier.new_file()
                try:
                    os.link(packed, file)
                except OSError:
                    # The tier is on another file system.
                    shutil.copyfile(packed, file)
                tier.add(digest, file)
            return _is_held(tier, digest)
        except OSError as error:
            # The engine then reads the blob store, as after any other upload.
            _log.warning("push_not_on_disk", error=str(error))
            return False

    def _own_tier(self) -> DiskTier | None:
        with self._lock:
            if self._tier is None and self._open_tier is not None:
                self._tier = self._open_tier()
            return self._tier


def _is_held(tier: DiskTier, digest: str) -> bool:
    held = tier.hold(digest)
    if held is None:
        return False
    with held:
        return True
