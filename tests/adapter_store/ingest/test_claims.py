from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy.exc import OperationalError

from loramux.adapter_store.errors import AdapterRejected, ClaimLost
from loramux.adapter_store.ingest.claims import LEASE_S, Verdict, VersionClaims
from loramux.adapter_store.ingest.failpoints import Failpoint
from loramux.adapter_store.registry.records import AdapterVersion
from loramux.adapter_store.registry.version_states import VersionStates
from loramux.migrations.database import Database
from tests.adapter_store.ingest.ingest_world import Clock, DirectValidator, FailingDatabase, IngestWorld
from tests.adapter_store.waiting import wait_until


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def database(migrated_url: str, clock: Clock) -> Iterator[Database]:
    database = FailingDatabase(migrated_url, clock=clock)
    yield database
    database.close()


def make_version(world: IngestWorld, make_adapter: Any, **adapter: Any) -> AdapterVersion:
    files = make_adapter(**adapter)
    upload = world.upload(files.config_bytes, files.tensor_bytes)
    return world.ingest.create_version(world.adapter_id, upload.id)


def test_dead_servers_version_is_taken_over_when_its_claim_expires(
    world: IngestWorld, make_adapter: Any, database: Database, clock: Clock, tmp_path: Path
) -> None:
    version = make_version(world, make_adapter)
    dead = VersionClaims(database)
    assert dead.claim_version(version.id) is not None
    other = world.another(tmp_path / "other")
    other.recover()
    clock.advance(LEASE_S - 1)
    assert other.next_waiting() is None
    assert other.process(version.id).state == "validating", "another server holds the claim"
    clock.advance(1)
    assert other.next_waiting() == version.id
    ready = other.process(version.id)
    assert ready.state == "ready"
    world.assert_nothing_left_over(ready)
    with pytest.raises(ClaimLost):
        dead.renew(version.id)


def test_claim_from_the_future_is_void(
    world: IngestWorld, make_adapter: Any, database: Database, clock: Clock, tmp_path: Path
) -> None:
    clock.advance(7 * 86_400)
    version = make_version(world, make_adapter)
    dead = VersionClaims(database)
    assert dead.claim_version(version.id) is not None
    clock.advance(-LEASE_S)
    other = world.another(tmp_path / "other")
    assert other.next_waiting() is None, "a small clock step voids no claim"
    clock.advance(-7 * 86_400)
    assert other.next_waiting() == version.id
    assert other.process(version.id).state == "ready"
    with pytest.raises(ClaimLost):
        dead.renew(version.id)


@pytest.mark.parametrize("migrated_url", ["sqlite"], indirect=True)
def test_renewed_claim_does_not_expire(world: IngestWorld, make_adapter: Any, database: Database, clock: Clock) -> None:
    version = make_version(world, make_adapter)
    first, second = VersionClaims(database), VersionClaims(database)
    assert first.claim_version(version.id) is not None
    assert first.claim_version(version.id) is None, "a server's two threads do not share a claim"
    for _ in range(5):
        clock.advance(LEASE_S - 1)
        first.renew(version.id)
        assert second.claim_version(version.id) is None
    clock.advance(LEASE_S)
    assert second.claim_version(version.id) is not None


def test_only_the_claim_holder_can_change_a_version(
    world: IngestWorld, make_adapter: Any, database: Database, clock: Clock
) -> None:
    version = make_version(world, make_adapter)
    late, holder = VersionClaims(database), VersionClaims(database)
    assert late.claim_version(version.id) is not None
    clock.advance(LEASE_S)
    assert holder.claim_version(version.id) is not None
    verdict = Verdict("a" * 64, 8, 3, 1000, {})
    for change in (
        lambda: late.renew(version.id),
        lambda: late.give_back(version.id),
        lambda: late.accept(version, verdict),
        lambda: late.publish(version),
        lambda: late.reject(version.id, {}),
    ):
        with pytest.raises(ClaimLost):
            change()
    holder.accept(version, verdict)
    holder.publish(version)
    found = world.registry.get_version(world.adapter_id, 1)
    assert found is not None
    assert (found.state, found.digest) == ("ready", "a" * 64)
    with pytest.raises(ClaimLost):
        holder.reject(version.id, {})


@pytest.mark.parametrize("migrated_url", ["sqlite"], indirect=True)
def test_released_version_waits_for_the_given_time(
    world: IngestWorld, make_adapter: Any, database: Database, clock: Clock
) -> None:
    version = make_version(world, make_adapter)
    claims = VersionClaims(database)
    assert claims.claim_version(version.id) is not None
    claims.give_back(version.id, delay_s=60)
    assert world.ingest.next_waiting() is None
    assert claims.claim_version(version.id) is None
    clock.advance(60)
    assert world.ingest.next_waiting() == version.id
    assert claims.claim_version(version.id) is not None
    claims.give_back(version.id)
    assert world.ingest.next_waiting() == version.id, "without a delay it is available immediately"


@pytest.mark.parametrize("migrated_url", ["sqlite"], indirect=True)
@pytest.mark.parametrize(
    ("step", "is_valid"),
    [
        pytest.param(Failpoint.FILES_FETCHED, True, id="files fetched"),
        pytest.param(Failpoint.FILES_FETCHED, False, id="files fetched, invalid"),
        pytest.param(Failpoint.ACCEPTED, True, id="accepted"),
        pytest.param(Failpoint.CANONICAL_STORED, True, id="canonical file stored"),
    ],
)
def test_hung_server_leaves_the_verdict_to_its_successor(
    world: IngestWorld, make_adapter: Any, clock: Clock, tmp_path: Path, step: Failpoint, is_valid: bool
) -> None:
    version = make_version(world, make_adapter, bias="none" if is_valid else "some")
    other = world.another(tmp_path / "other")
    decided: list[AdapterVersion] = []

    def hang(at: Failpoint) -> None:
        if at == step:
            clock.advance(LEASE_S)
            decided.append(other.process(version.id))

    hung = world.another(tmp_path / "hung", at_failpoint=hang)
    after = hung.process(version.id)
    if is_valid:
        assert after.state == "ready"
        assert after == decided[0]
        world.assert_nothing_left_over(after)
    else:
        assert after.state == "rejected"
        world.assert_nothing_left_over()


@pytest.mark.parametrize("migrated_url", ["sqlite"], indirect=True)
def test_version_that_cannot_be_released_waits_for_its_claim_to_expire(
    world: IngestWorld, make_adapter: Any, database: FailingDatabase, clock: Clock
) -> None:
    version = make_version(world, make_adapter)
    validator = world.validator
    assert isinstance(validator, DirectValidator)
    validator.meanwhile = lambda: setattr(database, "is_down", True)
    with pytest.raises(OperationalError):
        world.ingest.process(version.id)
    database.is_down = False
    assert world.ingest.next_waiting() is None
    assert world.ingest.process(version.id).state == "validating"
    clock.advance(LEASE_S)
    assert world.ingest.next_waiting() == version.id
    assert world.ingest.process(version.id).state == "ready"
    assert validator.num_calls == 2


@pytest.mark.parametrize("migrated_url", ["sqlite"], indirect=True)
def test_a_long_validation_keeps_its_claim(
    world: IngestWorld,
    make_adapter: Any,
    database: Database,
    clock: Clock,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    lease_s, other, version = 0.15, VersionClaims(database), make_version(world, make_adapter)
    renew, renewed_us = VersionClaims.renew, list[int]()

    def noted(claims: VersionClaims, version_id: str) -> None:
        begun_us = clock.now_us
        renew(claims, version_id)
        renewed_us.append(begun_us)

    def take_long() -> None:
        for _ in range(4):
            clock.advance(0.9 * lease_s)
            assert other.claim_version(version.id) is None
            # A renewal that begins before the clock is advanced does not count.
            wait_until(lambda: clock.now_us in renewed_us)

    monkeypatch.setattr(VersionClaims, "renew", noted)
    assert isinstance(world.validator, DirectValidator)
    world.validator.meanwhile = take_long
    assert world.another(tmp_path / "first", lease_s=lease_s).process(version.id).state == "ready"


@pytest.mark.parametrize("migrated_url", ["sqlite"], indirect=True)
def test_weights_quarantined_during_republication_are_not_published(
    world: IngestWorld, make_adapter: Any, database: Database, tmp_path: Path
) -> None:
    world.push(make_adapter(seed=1))
    first = world.push(make_adapter())
    files = make_adapter()
    files.config = dict(reversed(files.config.items()))
    states = VersionStates(database, world.registry)

    def quarantine(at: Failpoint) -> None:
        if at == Failpoint.PACKED_STORED:
            states.quarantine(world.adapter_id, first.number)

    world.ingest = world.another(tmp_path / "other", at_failpoint=quarantine)
    second = world.push(files)
    assert (second.state, second.report["error"]["code"]) == ("rejected", "quarantined")
    assert isinstance(AdapterRejected(**second.report["error"]), AdapterRejected)
    kept = [world.registry.get_version(world.adapter_id, number) for number in (1, 2)]
    world.assert_nothing_left_over(*(version for version in kept if version is not None))


@pytest.mark.parametrize("migrated_url", ["sqlite"], indirect=True)
def test_version_keeps_its_own_files_despite_an_equal_adapter(
    world: IngestWorld, make_adapter: Any, database: Database, clock: Clock
) -> None:
    first = world.push(make_adapter())
    files = make_adapter()
    files.config = dict(reversed(files.config.items()))
    upload = world.upload(files.config_bytes, files.tensor_bytes)
    second = world.ingest.create_version(world.adapter_id, upload.id)
    # A server dies after recording that validation passed. The canonical file already exists, because `first` has the
    # same content.
    dead = VersionClaims(database)
    assert dead.claim_version(second.id) is not None
    assert first.digest is not None
    dead.accept(second, Verdict(first.digest, 4, first.num_pages or 0, first.canonical_bytes or 0, first.report))
    clock.advance(LEASE_S)
    ready = world.ingest.process(second.id)
    assert (ready.state, ready.digest) == ("ready", first.digest)
    world.assert_nothing_left_over(first, ready)
