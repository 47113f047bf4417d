"""A running server's checks of its own health, for `loramux doctor`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from loramux.adapter_store.blobs.interface import BlobStore
from loramux.admin.doctor.checks import check_data_directory, check_database, check_disk, check_sandbox, check_store
from loramux.admin.doctor.findings import Finding, Grade
from loramux.migrations.database import Database
from loramux.platform.engine_link.engine_client import EngineClient


@dataclass(frozen=True, slots=True, kw_only=True)
class SelfCheck:
    """Checks the components that a server depends on. Blocking: call it from a thread."""

    database: Database
    blobs: BlobStore
    engine: EngineClient
    data_dir: Path
    served_name: str
    model_source: str | None = None
    """The name with the commit under which the base was pulled, if it was."""
    is_sandbox_required: bool = False

    def findings(self) -> tuple[Finding, ...]:
        """Check every component once. A failing component yields a finding, never an exception."""
        return (
            self._engine(),
            *check_database(self.database),
            check_store(self.blobs),
            check_data_directory(self.data_dir),
            check_disk(self.data_dir),
            check_sandbox(self.is_sandbox_required),
        )

    def _engine(self) -> Finding:
        info = self.engine.info
        if self.engine.is_ready and info is not None:
            source = "" if self.model_source is None else f", which is {self.model_source}"
            return Finding(check="engine", grade=Grade.OK, message=f"the engine serves {self.served_name}{source}")
        trouble = self.engine.trouble
        return Finding(
            check="engine",
            grade=Grade.FAILED,
            message="the engine is not ready" + (f": {trouble}" if trouble else ""),
            mend="it restarts automatically; if it keeps dying, read the server's log and lower LORAMUX_POOL_BYTES",
        )
