from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from loramux.adapter_store.formats.files.file_names import CONFIG_FILE, TENSORS_FILE
from loramux.adapter_store.ingest.claims import Verdict, VersionClaims
from loramux.adapter_store.ingest.upload_rows import UploadRows
from loramux.adapter_store.registry.records import AdapterVersion, UploadFile

HOUR_US = 3_600_000_000


@dataclass(frozen=True)
class Versions:
    upload_rows: UploadRows
    claims: VersionClaims

    def add(
        self, adapter_id: str, mark: str, is_ready: bool = True, digest: str | None = None, tokens: Sequence[int] = ()
    ) -> AdapterVersion:
        files = [UploadFile(name, 1, mark * 64) for name in (CONFIG_FILE, TENSORS_FILE)]
        upload = self.upload_rows.open_upload(adapter_id, files, HOUR_US)
        version = self.upload_rows.add_version(adapter_id, upload.id).version
        assert self.claims.claim_version(version.id) is not None
        if is_ready:
            verdict = Verdict(digest or mark * 64, 8, 3, 1000, {"max_rank": 8}, invocation_tokens=tokens)
            self.claims.accept(version, verdict)
            self.claims.publish(version)
        else:
            self.claims.reject(version.id, {"error": {"code": "not_finite", "message": "NaN", "param": None}})
        return self.upload_rows.get_version(version.id)
