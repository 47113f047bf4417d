"""Who is signed in to the console: sessions in this process's memory, found by the SHA-256 of their cookie.

A restart ends them all. Behind several gateways a browser must keep to one of them.
"""

from __future__ import annotations

import hashlib
import secrets
import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field

from loramux.platform.principals import Principal

IDLE_S = 3600.0
LIFETIME_S = 12 * 3600.0
RECHECK_S = 2.0
"""How stale a session's rights may be; a revoked key or a suspended tenant ends it within this time."""
MAX_SESSIONS = 10_000
MAX_NOTICES = 5

Refresh = Callable[[], Principal | None]
"""What the principal of a session may do now, or None once it may do nothing. Blocking."""


@dataclass(frozen=True, slots=True)
class Notice:
    """What the next page tells its reader; `kind` is `done`, `error` or `secret`."""

    kind: str
    text: str
    detail: str = ""


@dataclass(frozen=True, slots=True)
class PlaygroundKey:
    """A key that the playground made for a tenant."""

    id: str
    secret: str
    expires_s: int


@dataclass(slots=True)
class Session:
    """One signed-in browser. `csrf` is what each of its forms must send along."""

    principal: Principal
    refresh: Refresh
    csrf: str
    opened_s: float
    used_s: float
    checked_s: float
    notices: list[Notice] = field(default_factory=list)
    playground_keys: dict[str, PlaygroundKey] = field(default_factory=dict)
    """By the tenant's slug."""
    id_token: str | None = None
    """What the provider of a single sign-on is shown when the person signs out there too."""

    def say(self, kind: str, text: str, detail: str = "") -> None:
        self.notices = [*self.notices, Notice(kind, text, detail)][-MAX_NOTICES:]

    def keep_playground_key(self, slug: str, key_id: str, secret: str, expires_s: int) -> None:
        self.playground_keys[slug] = PlaygroundKey(key_id, secret, expires_s)

    def take_notices(self) -> list[Notice]:
        notices, self.notices = self.notices, []
        return notices


class ConsoleSessions:
    """All sessions. Thread-safe; only `find` may block, where rights are read again."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._sessions: OrderedDict[bytes, Session] = OrderedDict()

    def open(self, principal: Principal, refresh: Refresh) -> tuple[str, Session]:
        """A new session and the secret for its cookie, which is kept nowhere else."""
        token = secrets.token_urlsafe(32)
        now_s = self._clock()
        session = Session(principal, refresh, secrets.token_urlsafe(32), now_s, now_s, now_s)
        with self._lock:
            self._sessions[_sha256(token)] = session
            while len(self._sessions) > MAX_SESSIONS:
                self._sessions.popitem(last=False)
        return token, session

    def recent(self, token: str, *, is_use: bool = True) -> Session | None:
        """The session, if its rights were read a moment ago. Does not block; None says to ask `find`."""
        session = self._alive(token, is_use)
        return session if session is not None and self._clock() - session.checked_s < RECHECK_S else None

    def find(self, token: str, *, is_use: bool = True) -> Session | None:
        """The session with the rights that it has now; None where there is none any more. Blocking.

        With `is_use = False` it grows no younger, as when a page that nobody looks at is kept up to date.
        """
        session = self._alive(token, is_use)
        if session is None:
            return None
        if self._clock() - session.checked_s >= RECHECK_S:
            checked_s = self._clock()
            principal = session.refresh()
            if principal is None:
                self.close(token)
                return None
            session.principal, session.checked_s = principal, checked_s
        return session

    def close(self, token: str) -> Session | None:
        with self._lock:
            return self._sessions.pop(_sha256(token), None)

    def _alive(self, token: str, is_use: bool) -> Session | None:
        key = _sha256(token)
        now_s = self._clock()
        with self._lock:
            session = self._sessions.get(key)
            if session is None:
                return None
            if now_s - session.opened_s >= LIFETIME_S or now_s - session.used_s >= IDLE_S:
                del self._sessions[key]
                return None
            if is_use:
                session.used_s = now_s
                self._sessions.move_to_end(key)
            return session


def _sha256(token: str) -> bytes:
    return hashlib.sha256(token.encode("utf-8", "surrogatepass")).digest()
