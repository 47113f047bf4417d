"""API keys: `sk-lmx-<public id>-<secret>`, of which only a SHA-256 is stored."""

from __future__ import annotations

import hashlib
import hmac
import re
import secrets
import string
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from sqlalchemy import ColumnElement, Row, insert, select, update
from sqlalchemy.exc import IntegrityError

from loramux.migrations import schema
from loramux.migrations.audit import audit
from loramux.migrations.database import Database
from loramux.migrations.identifiers import new_id
from loramux.migrations.paging import Page, keyset_rows
from loramux.platform.errors import InvalidRequest, NotFound
from loramux.platform.principal_cache import PrincipalCache
from loramux.platform.principals import Principal

TENANT_SCOPES = frozenset({"adapters", "base", "tenant:read", "tenant:admin"})
PLATFORM_SCOPES = frozenset({"platform:read", "platform:admin"})
DEFAULT_TENANT_SCOPES = frozenset({"adapters", "base"})
DEFAULT_PLATFORM_SCOPES = frozenset({"platform:admin"})

OPERATOR = "operator"
"""The key id of the operator's own key, which has no row."""
MIN_ADMIN_KEY = 32
MAX_NAME = 200

BASE62 = string.digits + string.ascii_uppercase + string.ascii_lowercase
_PRESENTED = re.compile(r"sk-lmx-([0-9A-Za-z]{16})-[0-9A-Za-z]{43}")
_NO_KEY = bytes(32)


@dataclass(frozen=True, slots=True)
class ApiKey:
    """One key as it may be shown: never its secret. `tenant_id` is None for a platform key."""

    id: str
    tenant_id: str | None
    public_id: str
    name: str
    scopes: frozenset[str]
    created_us: int
    expires_us: int | None
    revoked_us: int | None


@dataclass(frozen=True, slots=True)
class CreatedKey:
    """A new key with its secret, which is shown this once."""

    key: ApiKey
    secret: str


class ApiKeys:
    """The keys in the database, and the operator's own `admin_key`, which is stored nowhere."""

    def __init__(self, database: Database, admin_key: str | None = None) -> None:
        if admin_key is not None and len(admin_key) < MIN_ADMIN_KEY:
            raise ValueError(f"the admin key must have at least {MIN_ADMIN_KEY} characters")
        self._database = database
        self._admin_sha256 = _sha256(admin_key) if admin_key is not None else None
        self._cache = PrincipalCache()

    def create(
        self,
        tenant_id: str | None,
        name: str,
        scopes: Iterable[str] | None = None,
        expires_us: int | None = None,
    ) -> CreatedKey:
        """Make a key of a tenant, or of the platform when `tenant_id` is None; raises InvalidRequest and NotFound."""
        if not 1 <= len(name) <= MAX_NAME or not name.isprintable():
            raise InvalidRequest(f"a key's name is 1 to {MAX_NAME} printable characters", param="name")
        granted = _checked_scopes(tenant_id, scopes)
        public_id, secret_part = _random_base62(16), _random_base62(43)
        secret = f"sk-lmx-{public_id}-{secret_part}"
        with self._database.write() as connection:
            now_us = self._database.now_us(connection)
            if expires_us is not None and expires_us <= now_us:
                raise InvalidRequest("a key must expire in the future", param="expires")
            key = ApiKey(
                id=new_id("key"),
                tenant_id=tenant_id,
                public_id=public_id,
                name=name,
                scopes=granted,
                created_us=now_us,
                expires_us=expires_us,
                revoked_us=None,
            )
            values = {
                "id": key.id,
                "tenant_id": tenant_id,
                "public_id": public_id,
                "secret_sha256": _sha256(secret),
                "name": name,
                "scopes": sorted(granted),
                "created_us": now_us,
                "expires_us": expires_us,
            }
            try:
                connection.execute(insert(schema.api_keys).values(**values))
            except IntegrityError:
                raise NotFound(f"there is no tenant {tenant_id!r}", param="tenant_id") from None
            audit(connection, now_us, "api_key.create", key.id, tenant_id=tenant_id, after=_shown(key))
        return CreatedKey(key=key, secret=secret)

    def list(
        self, tenant_id: str | None, limit: int, after: str | None = None, before: str | None = None
    ) -> Page[ApiKey]:
        """Keys of one tenant, or of the platform when `tenant_id` is None; revoked ones too."""
        table = schema.api_keys
        # `== None` is SQL's IS NULL.
        query = select(table).where(table.c.tenant_id == tenant_id)
        with self._database.read() as connection:
            rows, has_more = keyset_rows(connection, query, table.c.id, limit, after, before)
        return Page(tuple(_api_key(row) for row in rows), has_more)

    def get(self, key_id: str) -> ApiKey | None:
        with self._database.read() as connection:
            row = connection.execute(select(schema.api_keys).where(schema.api_keys.c.id == key_id)).one_or_none()
        return _api_key(row) if row is not None else None

    def revoke(self, key_id: str) -> ApiKey | None:
        """End a key for good; revoking again keeps the first time. None where there is no such key."""
        table = schema.api_keys
        with self._database.write() as connection:
            now_us = self._database.now_us(connection)
            revoked = connection.execute(
                update(table).where(table.c.id == key_id, table.c.revoked_us.is_(None)).values(revoked_us=now_us)
            )
            row = connection.execute(select(table).where(table.c.id == key_id)).one_or_none()
            if row is not None and revoked.rowcount:
                after = {"revoked_us": now_us}
                audit(connection, now_us, "api_key.revoke", key_id, tenant_id=row.tenant_id, after=after)
        self._cache.forget(key_id)
        return _api_key(row) if row is not None else None

    def forget_recent(self) -> None:
        """Read every key anew: one of them, or a tenant, may have changed."""
        self._cache.clear()

    def recent(self, presented: str) -> Principal | None:
        """Who presents this key, where that was found out within the last five seconds. Does not block."""
        return self._cache.get(_sha256(presented), self._database.now_us())

    def authenticate(self, presented: str) -> Principal | None:
        """Who presents this key; None for a key that is unknown, revoked, expired or of a suspended tenant."""
        sha256 = _sha256(presented)
        if self._admin_sha256 is not None and hmac.compare_digest(sha256, self._admin_sha256):
            return Principal(key_id=OPERATOR, tenant_id=None, tenant_slug=None, scopes=DEFAULT_PLATFORM_SCOPES)
        match = _PRESENTED.fullmatch(presented)
        if match is None:
            return None
        now_us = self._database.now_us()
        cached = self._cache.get(sha256, now_us)
        if cached is not None:
            return cached
        row = self._find(schema.api_keys.c.public_id == match.group(1))
        stored = row.secret_sha256 if row is not None else _NO_KEY
        if not hmac.compare_digest(sha256, stored) or row is None or not _is_usable(row, now_us):
            return None
        principal = _principal(row)
        self._cache.put(sha256, principal, now_us, row.expires_us)
        return principal

    def current(self, principal: Principal) -> Principal | None:
        """What someone who authenticated earlier may do now; None once the key or its tenant is out of service.

        The operator's own key stands for as long as this process runs.
        """
        if principal.key_id == OPERATOR:
            return principal if self._admin_sha256 is not None else None
        row = self._find(schema.api_keys.c.id == principal.key_id)
        if row is None or not _is_usable(row, self._database.now_us()):
            return None
        return _principal(row)

    def has_platform_admin(self) -> bool:
        """Whether somebody can administer: the operator's key is set, or a usable platform:admin key exists."""
        if self._admin_sha256 is not None:
            return True
        table = schema.api_keys
        now_us = self._database.now_us()
        with self._database.read() as connection:
            rows = connection.execute(
                select(table.c.scopes).where(
                    table.c.tenant_id.is_(None),
                    table.c.revoked_us.is_(None),
                    table.c.expires_us.is_(None) | (table.c.expires_us > now_us),
                )
            ).all()
        return any("platform:admin" in row.scopes for row in rows)

    def _find(self, is_it: ColumnElement[bool]) -> Row[Any] | None:
        keys, tenants = schema.api_keys, schema.tenants
        query = select(keys, tenants.c.slug, tenants.c.state).join_from(keys, tenants, isouter=True).where(is_it)
        with self._database.read() as connection:
            return connection.execute(query).one_or_none()


def _principal(row: Row[Any]) -> Principal:
    return Principal(key_id=row.id, tenant_id=row.tenant_id, tenant_slug=row.slug, scopes=frozenset(row.scopes))


def _is_usable(row: Row[Any], now_us: int) -> bool:
    is_expired = row.expires_us is not None and row.expires_us <= now_us
    return row.revoked_us is None and not is_expired and row.state in (None, "active")


def _checked_scopes(tenant_id: str | None, scopes: Iterable[str] | None) -> frozenset[str]:
    allowed = PLATFORM_SCOPES if tenant_id is None else TENANT_SCOPES
    if scopes is None:
        return DEFAULT_PLATFORM_SCOPES if tenant_id is None else DEFAULT_TENANT_SCOPES
    granted = frozenset(scopes)
    if not granted or granted - allowed:
        owner = "platform" if tenant_id is None else "tenant"
        raise InvalidRequest(f"scopes of a {owner} key are {', '.join(sorted(allowed))}", param="scopes")
    return granted


def _random_base62(length: int) -> str:
    return "".join(secrets.choice(BASE62) for _ in range(length))


def _sha256(text: str) -> bytes:
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).digest()


def _shown(key: ApiKey) -> dict[str, object]:
    """For the audit log."""
    return {"name": key.name, "scopes": sorted(key.scopes), "expires_us": key.expires_us, "revoked_us": key.revoked_us}


def _api_key(row: Row[Any]) -> ApiKey:
    return ApiKey(
        id=row.id,
        tenant_id=row.tenant_id,
        public_id=row.public_id,
        name=row.name,
        scopes=frozenset(row.scopes),
        created_us=row.created_us,
        expires_us=row.expires_us,
        revoked_us=row.revoked_us,
    )
