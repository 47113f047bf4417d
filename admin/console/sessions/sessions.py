"""Console sessions in the database. All servers that use the database share the sessions, which survive a restart."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import msgspec
from cryptography.exceptions import InvalidTag
from sqlalchemy import Connection, delete, insert, select, update

from loramux.admin.console.sessions.content import Notice, PlaygroundKey, SessionContent, SessionSeal, SignOn
from loramux.admin.console.sessions.rights import SessionRights
from loramux.migrations.database import Database
from loramux.migrations.schema import console_sessions
from loramux.platform.accounts.api_keys import key_sha256
from loramux.platform.accounts.principals import Principal

IDLE_S = 3600
LIFETIME_S = 12 * 3600
TOUCH_S = 60
"""Minimum extension of a session, in seconds. Smaller extensions are not written, so most page views cause no write."""
MAX_AHEAD_US = (IDLE_S + TOUCH_S) * 1_000_000
"""Latest valid expiry, in microseconds from now. A later expiry was written before the clock was set back."""
MAX_OF_ONE = 50
"""Maximum number of sessions per key or person. A sign-in above the limit ends the oldest session."""
MAX_NOTICES = 5
UNREADABLE = (InvalidTag, msgspec.DecodeError)
"""Raised if the stored content was edited by hand, or if another release wrote it in a different format."""
_CLOSED_AT_ONCE = 1000

Change = Callable[[SessionContent], SessionContent]


class Session:
    """A browser's session during one request. `ConsoleSessions.keep` saves the changes that a page makes."""

    def __init__(self, seal: SessionSeal, principal: Principal, content: SessionContent) -> None:
        self.seal = seal
        self.principal = principal
        self.content = content
        self._changes: list[Change] = []

    @property
    def csrf(self) -> str:
        """The token that every form submitted in this session must include."""
        return self.seal.csrf

    @property
    def playground_keys(self) -> dict[str, PlaygroundKey]:
        return self.content.playground_keys

    def say(self, kind: str, text: str, detail: str = "", undo_url: str = "") -> None:
        notice = Notice(kind, text, detail, undo_url)
        self._change(lambda content: replace(content, notices=(*content.notices, notice)[-MAX_NOTICES:]))

    def take_notices(self) -> tuple[Notice, ...]:
        """Remove and return the notices, so that only this page shows them."""
        taken = self.content.notices
        if taken:
            self._change(
                lambda content: replace(content, notices=tuple(one for one in content.notices if one not in taken))
            )
        return taken

    def keep_playground_key(self, slug: str, key_id: str, secret: str, expires_s: int) -> None:
        key = PlaygroundKey(key_id, secret, expires_s)
        self._change(lambda content: replace(content, playground_keys={**content.playground_keys, slug: key}))

    def now_holds(self, secret: str) -> None:
        """Store the hash of the new secret of the session's own key, so that a rotation does not end the session."""
        self._change(lambda content: replace(content, key_sha256=key_sha256(secret)))

    def now_signed_on(self, sign_on: SignOn) -> None:
        self._change(lambda content: replace(content, sign_on=sign_on))

    def take_changes(self) -> list[Change]:
        """Remove and return the unsaved changes."""
        changes, self._changes = self._changes, []
        return changes

    def _change(self, change: Change) -> None:
        self.content = change(self.content)
        self._changes.append(change)


class ConsoleSessions:
    """Stores the sessions of all servers that use the database, by the SHA-256 of their cookies. Blocking."""

    def __init__(self, database: Database, rights: SessionRights) -> None:
        self._database = database
        self._rights = rights

    def open(self, key_id: str, content: SessionContent) -> str:
        """Open a session and return the token for its cookie, which is stored nowhere else."""
        token, seal = SessionSeal.new()
        table = console_sessions
        with self._database.write() as connection:
            now_us = self._database.now_us(connection)
            surplus = (
                select(table.c.id_sha256)
                .where(table.c.key_id == key_id)
                .order_by(table.c.created_us.desc(), table.c.id_sha256)
                .offset(MAX_OF_ONE - 1)
            )
            for id_sha256 in connection.execute(surplus.limit(_CLOSED_AT_ONCE)).scalars().all():
                connection.execute(delete(table).where(table.c.id_sha256 == id_sha256))
            values = {
                "id_sha256": seal.id_sha256,
                "key_id": key_id,
                "sealed": seal.close(content),
                "created_us": now_us,
                "expires_us": _expires_us(now_us, now_us),
            }
            connection.execute(insert(table).values(**values))
        return token

    def find(self, token: str, *, is_use: bool = True) -> Session | None:
        """Return the session with its current rights, or None if it has ended or has no rights left.

        With `is_use=False`, the session is not extended. Live updates pass it, because the page may be open but
        unattended.
        """
        seal = SessionSeal(token)
        table = console_sessions
        with self._database.read() as connection:
            row = connection.execute(select(table).where(table.c.id_sha256 == seal.id_sha256)).one_or_none()
        now_us = self._database.now_us()
        # An expiry too far ahead would let the session outlive its limit.
        if row is None or not now_us < row.expires_us <= now_us + MAX_AHEAD_US:
            return None
        try:
            content = seal.open(row.sealed)
        except UNREADABLE:
            self.close(token)
            return None
        principal = self._rights.principal(row.key_id, content)
        if principal is None:
            # Do not close the session, because a rotation of its own key may be about to store the new secret's hash.
            return None
        if is_use and (expires_us := _expires_us(row.created_us, now_us)) >= row.expires_us + TOUCH_S * 1_000_000:
            with self._database.write() as connection:
                connection.execute(
                    update(table).where(table.c.id_sha256 == seal.id_sha256).values(expires_us=expires_us)
                )
        return Session(seal, principal, content)

    def keep(self, session: Session) -> None:
        changes = session.take_changes()
        if not changes:
            return
        with self._database.write() as connection:
            content = _locked(connection, session.seal)
            if content is None:
                return
            for change in changes:
                content = change(content)
            _put(connection, session.seal, content)

    def claim_asking(self, session: Session, due_us: int, retry_us: int, now_us: int) -> bool:
        """Return whether this server should ask the provider now. If so, record that it does.

        The provider is asked if it last confirmed the roles before `due_us` and has not been asked since `retry_us`.
        """
        with self._database.write() as connection:
            content = _locked(connection, session.seal)
            sign_on = None if content is None else content.sign_on
            if content is None or sign_on is None or sign_on.confirmed_us > due_us or sign_on.asked_us > retry_us:
                return False
            asked = replace(sign_on, asked_us=now_us)
            _put(connection, session.seal, replace(content, sign_on=asked))
        session.content = replace(session.content, sign_on=asked)
        return True

    def close(self, token: str) -> None:
        with self._database.write() as connection:
            connection.execute(
                delete(console_sessions).where(console_sessions.c.id_sha256 == SessionSeal(token).id_sha256)
            )


def _expires_us(created_us: int, now_us: int) -> int:
    return min(created_us + LIFETIME_S * 1_000_000, now_us + IDLE_S * 1_000_000)


def _locked(connection: Connection, seal: SessionSeal) -> SessionContent | None:
    """The content, locked until the transaction ends, or None if the session has ended."""
    table = console_sessions
    query = select(table.c.sealed).where(table.c.id_sha256 == seal.id_sha256).with_for_update()
    sealed = connection.execute(query).scalar_one_or_none()
    try:
        return None if sealed is None else seal.open(sealed)
    except UNREADABLE:
        return None


def _put(connection: Connection, seal: SessionSeal, content: SessionContent) -> None:
    table = console_sessions
    connection.execute(update(table).where(table.c.id_sha256 == seal.id_sha256).values(sealed=seal.close(content)))
