"""Console sessions and failed sign-ins in the database.

The campaign runs the same tests on PostgreSQL.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from sqlalchemy import delete, select, update

from loramux.admin.console.sessions.content import SessionContent, SessionSeal
from loramux.admin.console.sessions.login_throttle import BURST, REFILL_S, LoginThrottle
from loramux.admin.console.sessions.rights import SessionRights
from loramux.admin.console.sessions.sessions import IDLE_S, LIFETIME_S, MAX_OF_ONE, TOUCH_S, ConsoleSessions
from loramux.admin.serving.expired_rows import ExpiredRows
from loramux.migrations import schema
from loramux.migrations.database import Database
from loramux.platform.accounts.api_keys import OPERATOR, ApiKeys, key_sha256
from loramux.platform.accounts.tenants import Tenants
from tests.admin.admin_side import ADMIN_KEY


@pytest.fixture(scope="module")
def clock() -> list[int]:
    return [1_000_000]


@pytest.fixture(scope="module", params=["sqlite", pytest.param("postgres", marks=pytest.mark.campaign)])
def shared_database(
    request: pytest.FixtureRequest, clock: list[int], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Database]:
    url = f"sqlite:///{tmp_path_factory.mktemp('sessions') / 'loramux.db'}"
    if request.param == "postgres":
        # Use PostgreSQL's default database. No other test uses it.
        url = request.getfixturevalue("postgres_server")
    made = Database(url, clock=lambda: clock[0] * 1_000_000)
    made.upgrade()
    yield made
    made.close()


@pytest.fixture
def database(shared_database: Database) -> Database:
    with shared_database.write() as connection:
        for table in (schema.console_sessions, schema.login_failures):
            connection.execute(delete(table))
    return shared_database


@pytest.fixture
def sessions(database: Database) -> ConsoleSessions:
    return ConsoleSessions(database, SessionRights(ApiKeys(database, ADMIN_KEY), Tenants(database)))


def test_throttle_counts_by_address_across_servers(database: Database, clock: list[int]) -> None:
    servers = [LoginThrottle(database), LoginThrottle(database)]
    for attempt in range(BURST):
        assert servers[attempt % 2].begin("192.0.2.1") == 0
    assert [throttle.begin("192.0.2.1") for throttle in servers] == [REFILL_S, REFILL_S]
    assert servers[0].begin("192.0.2.2") == 0
    servers[1].forgive("192.0.2.1")
    assert servers[0].begin("192.0.2.1") == 0, "a correct key does not count"
    assert servers[0].begin("192.0.2.1") > 0
    clock[0] += REFILL_S
    assert servers[1].begin("192.0.2.1") == 0
    for host in range(BURST):
        assert servers[0].begin(f"2001:db8::{host}") == 0
    assert servers[1].begin("2001:db8::ffff") > 0
    assert servers[1].begin("2001:db8:0:1::1") == 0
    for _ in range(BURST):
        assert servers[0].begin("::ffff:192.0.2.7") == 0
    assert servers[1].begin("192.0.2.7") > 0
    assert servers[1].begin("::ffff:192.0.2.8") == 0, "mapped IPv4 addresses count separately"
    clock[0] += BURST * REFILL_S
    assert ExpiredRows(database).sweep()["login_failures"] == 6
    assert ExpiredRows(database).sweep()["login_failures"] == 0


def test_clock_set_back_locks_out_no_address(database: Database, clock: list[int]) -> None:
    throttle = LoginThrottle(database)
    clock[0] += 7 * 86_400
    assert throttle.begin("192.0.2.1") == 0
    clock[0] -= 7 * 86_400
    assert throttle.begin("192.0.2.1") == 0
    assert throttle.begin("192.0.2.1") == REFILL_S, "one attempt, no burst"
    clock[0] += REFILL_S
    assert throttle.begin("192.0.2.1") == 0


def test_clock_set_back_does_not_extend_sessions(
    sessions: ConsoleSessions, database: Database, clock: list[int]
) -> None:
    content = SessionContent(key_sha256=key_sha256(ADMIN_KEY))
    clock[0] += LIFETIME_S
    token, forgotten = sessions.open(OPERATOR, content), sessions.open(OPERATOR, content)
    clock[0] -= TOUCH_S
    assert sessions.find(token) is not None, "a small clock step ends no session"
    clock[0] -= LIFETIME_S - TOUCH_S
    assert sessions.find(token) is None
    assert ExpiredRows(database).sweep()["console_sessions"] == 2
    clock[0] += LIFETIME_S
    assert sessions.find(forgotten) is None, "it does not come back"


def test_sessions_expire_by_age_and_idleness_and_are_swept(
    sessions: ConsoleSessions, database: Database, clock: list[int]
) -> None:
    content = SessionContent(key_sha256=key_sha256(ADMIN_KEY))
    used, watched, forgotten = (sessions.open(OPERATOR, content) for _ in range(3))
    end = clock[0] + LIFETIME_S
    while clock[0] < end - IDLE_S / 2:
        clock[0] += IDLE_S // 2
        assert sessions.find(used) is not None
        assert (sessions.find(watched, is_use=False) is not None) == (clock[0] < end - LIFETIME_S + IDLE_S)
    assert ExpiredRows(database).sweep()["console_sessions"] == 2
    clock[0] = end
    assert [sessions.find(token) for token in (used, watched, forgotten)] == [None] * 3
    assert ExpiredRows(database).sweep()["console_sessions"] == 1


def test_oldest_session_of_a_key_ends_at_the_limit(sessions: ConsoleSessions, clock: list[int]) -> None:
    tokens = []
    for _ in range(MAX_OF_ONE + 2):
        clock[0] += 1
        tokens.append(sessions.open(OPERATOR, SessionContent(key_sha256=key_sha256(ADMIN_KEY))))
    alive = [sessions.find(token) is not None for token in tokens]
    assert alive == [False] * 2 + [True] * MAX_OF_ONE


def test_session_survives_rotation_of_its_own_key_despite_other_tabs(
    sessions: ConsoleSessions, database: Database
) -> None:
    keys = ApiKeys(database, ADMIN_KEY)
    key = keys.create(None, "own")
    token = sessions.open(key.key.id, SessionContent(key_sha256=key_sha256(key.secret)))
    session = sessions.find(token)
    assert session is not None
    secret = keys.rotate(key.key.id, 0).secret
    assert sessions.find(token) is None
    session.now_holds(secret)
    session.say("secret", "copy it", secret)
    sessions.keep(session)
    found = sessions.find(token)
    assert found is not None
    assert [notice.detail for notice in found.take_notices()] == [secret]


def test_session_stored_by_another_release_is_ignored(sessions: ConsoleSessions, database: Database) -> None:
    token = sessions.open(OPERATOR, SessionContent(key_sha256=key_sha256(ADMIN_KEY)))
    seal = SessionSeal(token)
    with database.write() as connection:
        connection.execute(
            update(schema.console_sessions).values(sealed=seal.close({"key_sha256": 5}))  # type: ignore[arg-type]
        )
    assert sessions.find(token) is None


def test_concurrent_requests_keep_both_notices(sessions: ConsoleSessions) -> None:
    token = sessions.open(OPERATOR, SessionContent(key_sha256=key_sha256(ADMIN_KEY)))
    first, second = sessions.find(token), sessions.find(token)
    assert first is not None
    assert second is not None
    first.say("done", "one")
    second.say("secret", "two", "sk-lmx-secret")
    second.keep_playground_key("acme", "key_1", "sk-lmx-other", 5)
    for session in (first, second):
        sessions.keep(session)
    third = sessions.find(token)
    assert third is not None
    assert [notice.text for notice in third.take_notices()] == ["one", "two"]
    sessions.keep(third)
    fourth = sessions.find(token)
    assert fourth is not None
    assert fourth.take_notices() == ()
    assert fourth.playground_keys["acme"].secret == "sk-lmx-other"


def test_stored_session_reveals_no_secret_and_cannot_be_replayed(sessions: ConsoleSessions, database: Database) -> None:
    token = sessions.open(OPERATOR, SessionContent(key_sha256=key_sha256(ADMIN_KEY)))
    session = sessions.find(token)
    assert session is not None
    session.say("secret", "shown once", "sk-lmx-secret")
    sessions.keep(session)
    with database.read() as connection:
        row = connection.execute(select(schema.console_sessions)).one()
    kept = b"".join(value for value in row if isinstance(value, bytes))
    assert not any(text in kept for text in (b"sk-lmx-secret", token.encode(), key_sha256(ADMIN_KEY)))
    assert sessions.find(row.id_sha256.hex()) is None
    other = sessions.open(OPERATOR, SessionContent(key_sha256=key_sha256(ADMIN_KEY)))
    with database.write() as connection:
        # An attacker with write access copies one session's content into another session's row.
        connection.execute(update(schema.console_sessions).values(sealed=row.sealed))
    assert sessions.find(token) is not None
    assert sessions.find(other) is None
