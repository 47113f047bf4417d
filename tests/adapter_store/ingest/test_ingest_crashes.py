from __future__ import annotations

import os
import random
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from signal import SIGCONT, SIGKILL, SIGTERM
from typing import Any

import pytest

from loramux.adapter_store.blobs.blob_url import open_blob_store
from loramux.adapter_store.formats.files.file_names import CONFIG_FILE, GENERATION_FILE, TEMPLATE_FILE, TENSORS_FILE
from loramux.adapter_store.formats.packed.pack_target import PackTarget
from loramux.adapter_store.ingest.claims import LEASE_S
from loramux.adapter_store.ingest.failpoints import Failpoint
from loramux.adapter_store.registry.registry import AdapterRegistry
from loramux.migrations.database import Database
from tests.adapter_store.ingest.process_lab import KILLED, STOPPED, Lab, ProcessMaker
from tests.adapter_store.tenant_rows import add_tenant
from tests.adapter_store.waiting import wait_until
from tests.migrated import migrated_sqlite
from tests.reliability.record import recorded

OpenLab = Callable[..., Lab]
LIFETIME_S = 86_400.0
NUM_SEEDS = int(os.environ.get("LORAMUX_INGEST_SEEDS", "50"))
"""Number of kills at random times on each database and blob store."""

BEFORE_A_VERSION = (Failpoint.UPLOAD_DECLARED, Failpoint.FILE_RECEIVED, Failpoint.FILE_STORED)
AFTER_THE_VERDICT = (Failpoint.PUBLISHED, Failpoint.FIRST_FILE_DELETED, Failpoint.FILES_DELETED)


@dataclass(frozen=True)
class Crash:
    """A server that pushes or registers an adapter dies after doing `step` for the `nth` time."""

    kind: str
    step: Failpoint
    nth: int = 1
    is_valid: bool = True

    def __str__(self) -> str:
        times = "" if self.nth == 1 else f"-{self.nth}"
        return f"{self.kind}-{self.step.replace(' ', '_')}{times}{'' if self.is_valid else '-invalid'}"


PUSHES = [Crash("push", step) for step in Failpoint if step not in (Failpoint.SOURCE_RECORDED, Failpoint.REJECTED)]
REJECTION = Crash("push", Failpoint.REJECTED, is_valid=False)
REGISTRATION = Crash("register", Failpoint.SOURCE_RECORDED)
QUICK = (Failpoint.FILE_STORED, Failpoint.VERSION_ADDED, Failpoint.CANONICAL_STORED, Failpoint.PUBLISHED)
"""The steps of every test run: without a version, before its claim, before its verdict, and after it."""
RARER = [
    Crash("push", Failpoint.FILE_RECEIVED, nth=2),
    Crash("push", Failpoint.FILE_STORED, nth=2),
    *(
        Crash("push", step, is_valid=False)
        for step in (Failpoint.CLAIMED, Failpoint.FILES_FETCHED, *AFTER_THE_VERDICT[1:])
    ),
    *(
        Crash("register", step)
        for step in Failpoint
        if step not in (*BEFORE_A_VERSION, Failpoint.SOURCE_RECORDED, Failpoint.REJECTED)
    ),
    Crash("register", Failpoint.REJECTED, is_valid=False),
]


@pytest.fixture(scope="module")
def makers() -> Iterator[ProcessMaker]:
    with ProcessMaker() as maker:
        yield maker


@pytest.fixture
def lab_directory() -> Iterator[Path]:
    """A temporary directory, in memory if possible. Unflushed writes of a killed process survive there."""
    memory = Path("/dev/shm")
    with tempfile.TemporaryDirectory(dir=memory if os.access(memory, os.W_OK) else None) as directory:
        yield Path(directory)


@pytest.fixture
def open_lab(
    makers: ProcessMaker,
    request: pytest.FixtureRequest,
    lab_directory: Path,
    target: PackTarget,
    make_adapter: Any,
) -> Iterator[OpenLab]:
    def open_one(database: str = "sqlite", store: str = "local", is_valid: bool = True, **details: Any) -> Lab:
        if database == "sqlite":
            database_url = migrated_sqlite(lab_directory / "loramux.db")
        else:
            database_url = request.getfixturevalue("migrated_postgres_url")
        blob_url = f"file://{lab_directory / 'blobs'}"
        if store == "s3":
            blob_url = f"s3://{request.getfixturevalue('s3_bucket')}/adapters"
        opened = Database(database_url)
        registry = AdapterRegistry(opened)
        adapter_id = registry.create_adapter(add_tenant(opened, "acme"), "support").id
        opened.close()
        files = make_adapter(bias="none" if is_valid else "some")
        lab = Lab(
            makers=makers,
            database_url=database_url,
            blob_url=blob_url,
            blobs=open_blob_store(blob_url),
            target=target,
            directory=lab_directory,
            adapter_id=adapter_id,
            files={
                CONFIG_FILE: files.config_bytes,
                TENSORS_FILE: files.tensor_bytes,
                TEMPLATE_FILE: b"{{ messages }}",
                GENERATION_FILE: b'{"temperature": 0.5}',
            },
            **details,
        )
        stack.callback(lab.close)
        return lab

    with ExitStack() as stack:
        yield open_one


def crash_and_recover(lab: Lab, crash: Crash) -> None:
    """Kill a server at a step, and check that the next server recovers and leaves a consistent state."""
    scratch = lab.directory / "scratch"
    own = {"scratch": str(scratch)}
    assert lab.run(crash.kind, die_at=crash.step, nth=crash.nth, **own) == KILLED
    is_published = crash.is_valid and crash.step in AFTER_THE_VERDICT
    assert (lab.check_served() is not None) == is_published, "unfinished versions are not served"
    acknowledged = lab.acknowledged("version")
    assert lab.run("recover", **own) == 0
    if crash.step not in (*BEFORE_A_VERSION, Failpoint.VERSION_ADDED, *AFTER_THE_VERDICT, Failpoint.REJECTED):
        assert lab.versions()[0].state == "validating", "no server takes over before the claim expires"
    assert lab.run("recover", offset_s=LEASE_S, **own) == 0
    versions = lab.versions()
    if crash.kind == "push" and crash.step in BEFORE_A_VERSION:
        assert (versions, acknowledged) == ([], [])
    else:
        assert [version.state for version in versions] == ["ready" if crash.is_valid else "rejected"]
        assert set(acknowledged) <= {versions[0].id}
    assert (lab.check_served() is not None) == (crash.is_valid and versions != [])
    # The client got no answer, so it retries.
    assert lab.run(crash.kind, offset_s=LEASE_S, **own) == 0
    assert [version.state for version in lab.versions()].count("ready") == crash.is_valid
    assert (lab.check_served() is not None) == crash.is_valid
    assert lab.run("recover", offset_s=LIFETIME_S + 1, **own) == 0
    lab.check_blobs()
    assert not scratch.exists() or list(scratch.iterdir()) == []


@pytest.mark.parametrize(
    "crash", [*(crash for crash in PUSHES if crash.step in QUICK), REJECTION, REGISTRATION], ids=str
)
def test_server_killed_at_a_step_loses_nothing(open_lab: OpenLab, crash: Crash) -> None:
    crash_and_recover(open_lab(is_valid=crash.is_valid), crash)


@pytest.mark.campaign
@pytest.mark.parametrize("is_sandboxed", [False, True], ids=["direct", "sandboxed"])
@pytest.mark.parametrize("store", ["local", "s3"])
@pytest.mark.parametrize("database", ["sqlite", "postgres"])
@pytest.mark.parametrize("crash", [*PUSHES, REJECTION, REGISTRATION, *RARER], ids=str)
def test_server_killed_at_a_step_loses_nothing_on_any_backend(
    open_lab: OpenLab, crash: Crash, database: str, store: str, is_sandboxed: bool
) -> None:
    crash_and_recover(open_lab(database, store, crash.is_valid, is_sandboxed=is_sandboxed), crash)


@pytest.mark.campaign
@pytest.mark.parametrize("store", ["local", "s3"])
@pytest.mark.parametrize("database", ["sqlite", "postgres"])
@pytest.mark.parametrize("seed", range(NUM_SEEDS))
def test_server_killed_at_any_time_loses_nothing(open_lab: OpenLab, seed: int, database: str, store: str) -> None:
    lab = open_lab(database, store)
    process = lab.start("push")
    # The kill can also come between steps, during a commit, or in the middle of a blob.
    time.sleep(random.Random(seed).uniform(0.0, 0.25))
    lab.makers.signal(process, SIGKILL)
    assert lab.makers.wait(process) in (KILLED, 0)
    was_acknowledged = bool(lab.acknowledged("version"))
    lab.check_served()
    assert lab.run("recover", offset_s=LEASE_S) == 0
    versions = lab.versions()
    is_lost = was_acknowledged and not versions
    with recorded("kills", kills=1, lost=is_lost):
        assert [version.state for version in versions] in ([], ["ready"])
        assert not is_lost
    assert lab.run("push", offset_s=LEASE_S) == 0
    assert [version.state for version in lab.versions()] == ["ready"]
    assert lab.check_served() is not None
    assert lab.run("recover", offset_s=2 * LIFETIME_S) == 0
    lab.check_blobs()


TAKE_OVERS = [Failpoint.CLAIMED, Failpoint.ACCEPTED, Failpoint.CANONICAL_STORED, Failpoint.PACKED_STORED]


def take_over(lab: Lab, step: Failpoint, is_stopped: bool) -> None:
    """Kill or stop one of two servers at a step. The other must take over and publish the version exactly once."""
    ending = {"stop_at": step} if is_stopped else {"die_at": step}
    first = lab.start("push", **ending)
    assert lab.makers.wait(first, is_stop_enough=True) == (STOPPED if is_stopped else KILLED)
    second = lab.start("serve")
    wait_until(lambda: [version.state for version in lab.versions()] == ["ready"], timeout_s=30)
    published = lab.check_served()
    assert published is not None
    if is_stopped:
        # The resumed server continues where it stopped, as if it still owned the version.
        lab.makers.signal(first, SIGCONT)
        assert lab.makers.wait(first) == 0
    lab.makers.signal(second, SIGTERM)
    assert lab.makers.wait(second) == 0
    assert lab.versions() == [published], "no version was published twice"
    assert lab.check_served() == published
    assert lab.run("recover", offset_s=LIFETIME_S + 1) == 0
    lab.check_blobs()


@pytest.mark.parametrize("is_stopped", [False, True], ids=["killed", "stopped"])
def test_second_server_takes_over_from_a_silent_one(open_lab: OpenLab, is_stopped: bool) -> None:
    take_over(open_lab(lease_s=0.5), Failpoint.CANONICAL_STORED, is_stopped)


@pytest.mark.campaign
@pytest.mark.parametrize("is_stopped", [False, True], ids=["killed", "stopped"])
@pytest.mark.parametrize("step", TAKE_OVERS)
@pytest.mark.parametrize("store", ["local", "s3"])
@pytest.mark.parametrize("database", ["sqlite", "postgres"])
def test_second_server_takes_over_at_every_step_on_any_backend(
    open_lab: OpenLab, database: str, store: str, step: Failpoint, is_stopped: bool
) -> None:
    take_over(open_lab(database, store, lease_s=0.5), step, is_stopped)


@pytest.mark.campaign
@pytest.mark.parametrize("store", ["local", "s3"])
@pytest.mark.parametrize("database", ["sqlite", "postgres"])
def test_repeatedly_killed_servers_publish_each_version_once(
    open_lab: OpenLab, database: str, store: str, make_adapter: Any
) -> None:
    lab = open_lab(database, store, lease_s=0.5)
    chance = random.Random(0)
    servers = [lab.start("serve") for _ in range(3)]
    for seed in range(20):
        files = make_adapter(seed=seed)
        lab.replace_files({CONFIG_FILE: files.config_bytes, TENSORS_FILE: files.tensor_bytes})
        assert lab.run("upload") == 0
        victim = chance.randrange(3)
        lab.makers.signal(servers[victim], SIGKILL)
        assert lab.makers.wait(servers[victim]) == KILLED
        servers[victim] = lab.start("serve")
    wait_until(lambda: {version.state for version in lab.versions()} == {"ready"}, timeout_s=30)
    for server in servers:
        lab.makers.signal(server, SIGTERM)
        # The signal can kill the last server before it has installed its handler.
        assert lab.makers.wait(server) in (0, -SIGTERM)
    versions = lab.versions()
    assert [version.number for version in versions] == list(range(1, 21))
    assert len({version.digest for version in versions}) == 20
    assert lab.run("recover", offset_s=LIFETIME_S + 1) == 0
    lab.check_blobs()
