"""A running server's checks of its own health, for `loramux doctor`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from loramux.adapter_store.blobs.interface import BlobStore
from loramux.admin.doctor.checks import check_data_directory, check_database, check_disk, check_sandbox, check_store
from loramux.admin.doctor.findings import Finding, Grade
from loramux.migrations.database import Database
from loramux.platform.admission.database_health import SILENCE
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
    engines: Mapping[str, EngineClient] = field(default_factory=dict)
    """The engines behind `engine` by name, if it has several."""
    trouble: Callable[[], str | None] = lambda: None
    """Returns why the gateway cannot use the database, if it cannot. `check_database` only reads."""

    def findings(self) -> tuple[Finding, ...]:
        """Check every component once. A failing component yields a finding, never an exception."""
        return (
            *self._engines(),
            *self._database(),
            check_store(self.blobs),
            check_data_directory(self.data_dir),
            check_disk(self.data_dir),
            check_sandbox(self.is_sandbox_required),
        )

    def _database(self) -> list[Finding]:
        trouble = self.trouble()
        # The check would only wait for a database that does not answer.
        findings = [] if trouble is not None and SILENCE in trouble else check_database(self.database)
        # The check's own failure says more than the gateway's.
        if trouble is None or any(one.check == "database" and one.grade is Grade.FAILED for one in findings):
            return findings
        mend = "start the database, fix the network, or free space on its disk; until then, new requests are refused"
        refused = Finding(check="database", grade=Grade.FAILED, message=trouble, mend=mend)
        return [refused, *(one for one in findings if one.check != "database")]

    def _engines(self) -> Iterator[Finding]:
        if not self.engines:
            yield self._engine("the engine", self.engine, Grade.FAILED)
        # The other engines run the requests while one restarts.
        grade = Grade.WARNING if self.engine.is_ready else Grade.FAILED
        for name, engine in self.engines.items():
            yield self._engine(name, engine, grade)

    def _engine(self, name: str, engine: EngineClient, grade: Grade) -> Finding:
        if engine.is_ready and engine.info is not None:
            source = "" if self.model_source is None else f", which is {self.model_source}"
            return Finding(check="engine", grade=Grade.OK, message=f"{name} serves {self.served_name}{source}")
        trouble = engine.trouble
        return Finding(
            check="engine",
            grade=grade,
            message=f"{name} is not ready" + (f": {trouble}" if trouble else ""),
            mend="it restarts automatically; if it keeps dying, read the server's log and lower LORAMUX_POOL_BYTES",
        )
