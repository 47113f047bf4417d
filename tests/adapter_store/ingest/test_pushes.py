"""Pushes whose server dies, at each step of ingestion."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from loramux.adapter_store.errors import PushUnderway, UploadNotFound, UploadRefused
from loramux.adapter_store.formats.files.file_names import CONFIG_FILE, TENSORS_FILE
from loramux.adapter_store.ingest.claims import LEASE_S
from loramux.adapter_store.ingest.failpoints import Failpoint
from loramux.adapter_store.ingest.ingest import Ingest
from loramux.adapter_store.ingest.pushes import PUSH_LIFETIME_S, ReceivedPush
from loramux.adapter_store.registry.records import AdapterVersion
from loramux.migrations.database import Database
from tests.adapter_store.ingest.ingest_world import Clock, IngestWorld, chunks


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def database(migrated_url: str, clock: Clock) -> Iterator[Database]:
    database = Database(migrated_url, clock=clock)
    yield database
    database.close()


class Killed(BaseException):
    """Ends a push as the death of its server would: nothing is cleaned up."""


def items(files: Any) -> Iterator[str | bytes]:
    for name, data in ((CONFIG_FILE, files.config_bytes), (TENSORS_FILE, files.tensor_bytes)):
        yield name
        yield from chunks(data)


def receive(ingest: Ingest, adapter_id: str, files: Any) -> ReceivedPush:
    num_bytes = len(files.config_bytes) + len(files.tensor_bytes)
    return ingest.pushes.receive(adapter_id, items(files), num_bytes)


def push(ingest: Ingest, adapter_id: str, files: Any) -> AdapterVersion:
    received = receive(ingest, adapter_id, files)
    try:
        return ingest.pushes.publish(received, needs_effect=True)
    finally:
        ingest.pushes.discard(received)


STORED = (Failpoint.CANONICAL_STORED, Failpoint.PACKED_STORED)


@pytest.mark.parametrize(
    "step",
    [
        Failpoint.ACCEPTED,
        Failpoint.CONFIG_KEPT,
        Failpoint.HEADER_KEPT,
        *STORED,
        Failpoint.PUBLISHED,
    ],
)
def test_a_server_that_dies_leaves_a_version_that_ends(
    world: IngestWorld,
    make_adapter: Any,
    clock: Clock,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    step: Failpoint,
) -> None:
    files = make_adapter(seed=1)

    def die(reached: Failpoint) -> None:
        if reached is step:
            raise Killed

    dying = world.another(tmp_path / "dying", die)
    monkeypatch.setattr(dying.pushes._processor, "_give_back", lambda version_id: None)
    received = receive(dying, world.adapter_id, files)
    with pytest.raises(Killed):
        dying.pushes.publish(received, needs_effect=True)
    if step is not Failpoint.PUBLISHED:
        # The claim of the dead server still holds.
        assert world.ingest.next_waiting() is None
        with pytest.raises(PushUnderway):
            push(world.ingest, world.adapter_id, files)
        clock.advance(LEASE_S)
        waiting = world.ingest.next_waiting()
        assert waiting is not None
        ended = world.ingest.process(waiting)
        is_kept = step in STORED
        assert ended.state == ("ready" if is_kept else "rejected")
        if not is_kept:
            assert ended.report["error"]["code"] == "upload_incomplete"
    # The trainer pushes again, and has a ready version with its files.
    again = push(world.ingest, world.adapter_id, files)
    assert (again.state, again.number) == ("ready", 1 if step in (*STORED, Failpoint.PUBLISHED) else 2)
    world.assert_nothing_left_over(again)


def test_a_push_that_never_ended_counts_until_it_expires(world: IngestWorld, make_adapter: Any, clock: Clock) -> None:
    receive(world.ingest, world.adapter_id, make_adapter())
    assert len(world.ingest.upload_rows.list_open(world.adapter_id, 10).data) == 1
    clock.advance(PUSH_LIFETIME_S + 1)
    assert not world.ingest.upload_rows.list_open(world.adapter_id, 10).data
    world.restart().recover()
    world.assert_nothing_left_over()


def test_a_cancelled_or_expired_push_becomes_no_version(world: IngestWorld, make_adapter: Any, clock: Clock) -> None:
    cancelled = receive(world.ingest, world.adapter_id, make_adapter())
    world.ingest.cancel_upload(world.adapter_id, cancelled.upload.id)
    with pytest.raises(UploadNotFound):
        world.ingest.pushes.publish(cancelled, needs_effect=True)
    expired = receive(world.ingest, world.adapter_id, make_adapter())
    clock.advance(PUSH_LIFETIME_S + 1)
    with pytest.raises(UploadRefused, match="expired"):
        world.ingest.pushes.publish(expired, needs_effect=True)
    for one in (cancelled, expired):
        world.ingest.pushes.discard(one)
    world.assert_nothing_left_over()
