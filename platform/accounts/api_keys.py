"""API keys: `sk-lmx-<public id>-<secret>`. The database stores a key's SHA-256, never its secret."""

from __future__ import annotations

import hashlib
import hmac
import re
import secrets
import string
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any

import structlog
from sqlalchemy import ColumnElement, Connection, Row, insert, select, update
from sqlalchemy.exc import IntegrityError

from loramux.migrations import schema
from loramux.migrations.audit import audit
from loramux.migrations.database import Database
from loramux.migrations.identifiers import new_id
from loramux.migrations.paging import Page, keyset_page
from loramux.platform.accounts.key_authentication import KeyAuthentication
from loramux.platform.accounts.keys import (
    DEFAULT_PLATFORM_SCOPES,
    INHERIT,
    ApiKey,
    CreatedKey,
    KeyChanges,
    check_limit,
    checked_scopes,
    find_adapter_ids,
    key_of,
    principal_of,
    shown_key,
)
from loramux.platform.accounts.principals import Principal, PrincipalCache
from loramux.platform.errors import Conflict, InvalidRequest, NotFound, Unavailable
from loramux.platform.service_tiers import check_tier

OPERATOR = "operator"
MIN_ADMIN_KEY = 32
MAX_NAME = 200

OWN_PREFIX = "sk-lmx-"
"""Tokens with this prefix are API keys of loramux and are never passed to an extension."""

RETRY_S = 5.0
"""When to retry a request whose token cannot be checked now, in seconds."""

BASE62 = string.digits + string.ascii_uppercase + string.ascii_lowercase
_PRESENTED = re.compile(r"sk-lmx-([0-9A-Za-z]{16})-[0-9A-Za-z]{43}")
_NO_KEY = bytes(32)
_FOR_EVER_US = 1 << 62
_MAX_AHEAD_US = 60_000_000
"""A rotation time further in the future than this, in microseconds, means that the clock was set back."""
_LOST_ANSWER_US = 3600_000_000
"""Time after a rotation in which its secret can be replaced as lost, in microseconds."""
_log = structlog.get_logger(__name__)

_OPERATORS = Principal(key_id=OPERATOR, tenant_id=None, tenant_slug=None, scopes=DEFAULT_PLATFORM_SCOPES)


class ApiKeys:
    """Creates, changes and checks API keys. `tokens` resolves bearer tokens that are not API keys of loramux."""

    def __init__(
        self, database: Database, admin_key: str | None = None, tokens: KeyAuthentication | None = None
    ) -> None:
        if admin_key is not None and len(admin_key) < MIN_ADMIN_KEY:
            raise ValueError(f"the admin key must have at least {MIN_ADMIN_KEY} characters")
        self._database = database
        self._tokens = tokens
        self._admin_sha256 = key_sha256(admin_key) if admin_key is not None else None
        self._cache = PrincipalCache()

    def create(
        self,
        tenant_id: str | None,
        name: str,
        scopes: Iterable[str] | None = None,
        expires_us: int | None = None,
        adapters: Sequence[str] | None = None,
        max_service_tier: str | None = None,
        default_service_tier: str | None = None,
    ) -> CreatedKey:
        """Create a key for a tenant, or for the platform if `tenant_id` is None.

        `adapters` limits the key to these adapters, each an identifier or `[tenant/]name`. Without service tiers, the
        key has those of its tenant. Raises InvalidRequest or NotFound.
        """
        _check_name(name)
        granted = checked_scopes(tenant_id, scopes)
        check_tier(max_service_tier, "max_service_tier")
        check_tier(default_service_tier, "default_service_tier")
        public_id = _random_base62(16)
        secret = _new_secret(public_id)
        with self._database.write() as connection:
            now_us = self._database.now_us(connection)
            _check_expiry(expires_us, now_us)
            adapter_ids = _limit(connection, tenant_id, granted, adapters)
            key = ApiKey(
                id=new_id("key"),
                tenant_id=tenant_id,
                public_id=public_id,
                name=name,
                scopes=granted,
                adapter_ids=None if adapter_ids is None else frozenset(adapter_ids),
                created_us=now_us,
                expires_us=expires_us,
                revoked_us=None,
                previous_until_us=None,
                max_service_tier=max_service_tier,
                default_service_tier=default_service_tier,
            )
            # Only the secret's hash is stored, so nobody can read the secret again.
            values = {
                "id": key.id,
                "tenant_id": tenant_id,
                "public_id": public_id,
                "secret_sha256": key_sha256(secret),
                "name": name,
                "scopes": sorted(granted),
                "adapter_ids": adapter_ids,
                "created_us": now_us,
                "expires_us": expires_us,
                "max_service_tier": max_service_tier,
                "default_service_tier": default_service_tier,
            }
            try:
                connection.execute(insert(schema.api_keys).values(**values))
            except IntegrityError:
                # The foreign key also catches a tenant that is being deleted.
                raise NotFound(f"there is no tenant {tenant_id!r}", param="tenant_id") from None
            audit(connection, now_us, "api_key.create", key.id, tenant_id=tenant_id, after=shown_key(key))
        return CreatedKey(key=key, secret=secret)

    def list(
        self,
        tenant_id: str | None,
        limit: int,
        after: str | None = None,
        before: str | None = None,
        only: Collection[str] | None = None,
    ) -> Page[ApiKey]:
        """List a tenant's keys, or the platform's keys if `tenant_id` is None. Revoked keys are included.

        `only` restricts the list to the keys with these ids.
        """
        table = schema.api_keys
        query = select(table).where(table.c.tenant_id == tenant_id)
        if only is not None:
            query = query.where(table.c.id.in_(only))
        with self._database.read() as connection:
            return keyset_page(connection, query, table.c.id, key_of, limit, after, before)

    def get(self, key_id: str) -> ApiKey | None:
        with self._database.read() as connection:
            row = connection.execute(select(schema.api_keys).where(schema.api_keys.c.id == key_id)).one_or_none()
        return key_of(row) if row is not None else None

    def revoke(self, key_id: str) -> ApiKey | None:
        """Revoke a key permanently and return it, or return None if there is no such key.

        Revoking a key again keeps the first revocation time. Raises Conflict for the last administrator key.
        """
        table = schema.api_keys
        with self._database.write() as connection:
            now_us = self._database.now_us(connection)
            self._check_not_last_admin(connection, key_id, now_us)
            revoked = connection.execute(
                update(table).where(table.c.id == key_id, table.c.revoked_us.is_(None)).values(revoked_us=now_us)
            )
            row = connection.execute(select(table).where(table.c.id == key_id)).one_or_none()
            if row is not None and revoked.rowcount:
                after = {"revoked_us": now_us}
                audit(connection, now_us, "api_key.revoke", key_id, tenant_id=row.tenant_id, after=after)
        self._cache.forget(key_id)
        return key_of(row) if row is not None else None

    def update(self, key_id: str, changes: KeyChanges, check: Callable[[ApiKey], None]) -> ApiKey | None:
        """Change a key and return it, or return None if there is no such key.

        `check` receives the current key and can raise to prevent the change. Raises InvalidRequest, NotFound
        or, for a revoked key or the last administrator key, Conflict.
        """
        table = schema.api_keys
        if changes.name is not None:
            _check_name(changes.name)
        with self._database.write() as connection:
            key = _locked(connection, key_id)
            if key is None:
                return None
            check(key)
            _check_not_revoked(key)
            now_us = self._database.now_us(connection)
            scopes = key.scopes if changes.scopes is None else checked_scopes(key.tenant_id, changes.scopes)
            if "platform:admin" not in scopes:
                self._check_not_last_admin(connection, key_id, now_us)
            values: dict[str, Any] = {"scopes": sorted(scopes)}
            if changes.name is not None:
                values["name"] = changes.name
            if changes.expires_us is not None:
                _check_expiry(changes.expires_us, now_us)
                values["expires_us"] = changes.expires_us
            values |= _changed_tiers(changes)
            if changes.adapters is not None:
                values["adapter_ids"] = _limit(connection, key.tenant_id, scopes, changes.adapters or None)
            elif key.adapter_ids is not None:
                check_limit(scopes)
            connection.execute(update(table).where(table.c.id == key_id).values(**values))
            row = connection.execute(select(table).where(table.c.id == key_id)).one()
            shown = {"before": shown_key(key), "after": shown_key(key_of(row))}
            audit(connection, now_us, "api_key.change", key_id, tenant_id=key.tenant_id, **shown)
        self._cache.forget(key_id)
        return key_of(row)

    def rotate(self, key_id: str, grace_us: int, keep_previous: bool = False) -> CreatedKey | None:
        """Give a key a new secret and return both, or return None if there is no such key.

        The current secret stays valid for `grace_us` microseconds. An older secret that is still valid expires
        immediately. With `keep_previous`, it is the other way round: the current secret, which nobody has received,
        expires immediately, and the older one keeps its grace period. If the key was not rotated within the last hour,
        the rotation did not happen, and the current secret is in use.

        Raises Conflict if the key is revoked, and with `keep_previous` also if the key was not rotated within the last
        hour or has no older secret that is still valid.
        """
        table = schema.api_keys
        with self._database.write() as connection:
            key = _locked(connection, key_id)
            if key is None:
                return None
            _check_not_revoked(key)
            now_us = self._database.now_us(connection)
            secret = _new_secret(key.public_id)
            values: dict[str, Any] = {"secret_sha256": key_sha256(secret)}
            if keep_previous:
                rotated_us = connection.scalar(select(table.c.rotated_us).where(table.c.id == key_id))
                if rotated_us is None or rotated_us <= now_us - _LOST_ANSWER_US:
                    problem = "the key was not rotated within the last hour: rotate it normally"
                    raise Conflict(problem, code="no_previous_secret")
                if key.previous_until_us is None or key.previous_until_us <= now_us:
                    problem = "the key has no previous secret that is still valid: rotate it normally"
                    raise Conflict(problem, code="no_previous_secret")
            else:
                values |= {
                    "previous_sha256": table.c.secret_sha256 if grace_us > 0 else None,
                    "previous_until_us": now_us + grace_us if grace_us > 0 else None,
                    "rotated_us": now_us,
                }
            connection.execute(update(table).where(table.c.id == key_id).values(**values))
            row = connection.execute(select(table).where(table.c.id == key_id)).one()
            after = {"keep_previous": True} if keep_previous else {"grace_s": grace_us // 1_000_000}
            audit(connection, now_us, "api_key.rotate", key_id, tenant_id=key.tenant_id, after=after)
        self._cache.forget(key_id)
        return CreatedKey(key=key_of(row), secret=secret)

    def restart_grace_periods(self) -> int:
        """If the clock was set back, shorten the grace periods that would otherwise become longer.

        Returns the number of changed keys.
        """
        table = schema.api_keys
        with self._database.write() as connection:
            now_us = self._database.now_us(connection)
            ahead = update(table).where(table.c.rotated_us > now_us + _MAX_AHEAD_US)
            until_us = table.c.previous_until_us - (table.c.rotated_us - now_us)
            return connection.execute(ahead.values(previous_until_us=until_us, rotated_us=now_us)).rowcount

    def forget_recent(self) -> None:
        self._cache.clear()

    def confirm_recent(self, now_us: int) -> None:
        """Keep the cached keys for five more seconds, because no key or tenant had changed at this time since the last
        `forget_recent`.
        """
        self._cache.watch.confirm(now_us)

    def recent(self, presented: str) -> Principal | None:
        """Return the caller with this key, or None if the key is not in the cache. Does not block."""
        return self._cache.get(key_sha256(presented), self._database.now_us())

    def authenticate(self, presented: str) -> Principal | None:
        """Return the caller with this key, or None if the key cannot be used.

        A key cannot be used if it is unknown, revoked or expired, or if its tenant is suspended.
        """
        sha256 = key_sha256(presented)
        if self._is_operators(sha256):
            return _OPERATORS
        match = _PRESENTED.fullmatch(presented)
        if match is None:
            return None
        now_us = self._database.now_us()
        cached = self._cache.get(sha256, now_us)
        if cached is not None:
            return cached
        num_changes = self._cache.watch.num_changes
        row = self._find(schema.api_keys.c.public_id == match.group(1))
        good_until_us = _good_until_us(row, sha256, now_us)
        if row is None or good_until_us is None:
            return None
        principal = principal_of(row)
        self._cache.put(sha256, principal, now_us, good_until_us, num_changes=num_changes)
        return principal

    def authenticate_bearer(self, token: str) -> Principal | None:
        """Return the caller with this API key or with this token of the key authentication extension, or None.

        Like a key, an accepted token is not checked again for five seconds. Raises Unavailable if the extension fails.
        """
        principal = self.recent(token) or self.authenticate(token)
        if principal is not None or self._tokens is None or token.startswith(OWN_PREFIX):
            return principal
        key_id = self._key_id_of(self._tokens, token)
        if key_id is None:
            return None
        num_changes = self._cache.watch.num_changes
        now_us = self._database.now_us()
        row = self._find(schema.api_keys.c.id == key_id)
        if row is None or not _is_usable(row):
            return None
        good_until_us = _expiry_us(row)
        if good_until_us <= now_us:
            return None
        principal = principal_of(row)
        # Nobody announces that the extension no longer accepts a token.
        self._cache.put(key_sha256(token), principal, now_us, good_until_us, num_changes=num_changes, is_watched=False)
        return principal

    def reauthenticate(self, key_id: str, sha256: bytes) -> Principal | None:
        """Return the current rights of a caller who authenticated earlier with this secret, bypassing the cache.

        Returns None if the key was revoked or expired, the tenant is suspended, the secret was rotated out, or the
        operator's key has changed.
        """
        if key_id == OPERATOR:
            return _OPERATORS if self._is_operators(sha256) else None
        row = self._find(schema.api_keys.c.id == key_id)
        is_good = _good_until_us(row, sha256, self._database.now_us()) is not None
        return principal_of(row) if row is not None and is_good else None

    def has_platform_admin(self) -> bool:
        """True if the operator's key is set or a usable platform:admin key exists."""
        if self._admin_sha256 is not None:
            return True
        with self._database.read() as connection:
            return bool(_admin_key_ids(connection, self._database.now_us(), is_held=False))

    def _key_id_of(self, tokens: KeyAuthentication, token: str) -> str | None:
        try:
            key_id = tokens.key_id(token)
            if not isinstance(key_id, str | None):
                raise TypeError(f"key_id returned an object of type {type(key_id).__name__} instead of str or None")
        except Exception as error:
            _log.warning("key_authentication_failed", error=f"{type(error).__name__}: {error}")
            raise Unavailable(
                "the token cannot be checked now", code="authentication_unavailable", retry_after_s=RETRY_S
            ) from error
        return key_id

    def _check_not_last_admin(self, connection: Connection, key_id: str, now_us: int) -> None:
        if self._admin_sha256 is None and _admin_key_ids(connection, now_us, is_held=True) == [key_id]:
            problem = "this is the platform's last administrator key: create another one first"
            raise Conflict(problem, code="last_admin_key")

    def _is_operators(self, sha256: bytes) -> bool:
        return self._admin_sha256 is not None and hmac.compare_digest(sha256, self._admin_sha256)

    def _find(self, is_it: ColumnElement[bool]) -> Row[Any] | None:
        keys, tenants = schema.api_keys, schema.tenants
        query = select(keys, tenants.c.slug, tenants.c.state).join_from(keys, tenants, isouter=True).where(is_it)
        with self._database.read() as connection:
            return connection.execute(query).one_or_none()


def _admin_key_ids(connection: Connection, now_us: int, *, is_held: bool) -> list[str]:
    """Return the IDs of the usable platform:admin keys. If `is_held`, lock the keys until the transaction ends."""
    table = schema.api_keys
    query = select(table.c.id, table.c.scopes).where(
        table.c.tenant_id.is_(None),
        table.c.revoked_us.is_(None),
        table.c.expires_us.is_(None) | (table.c.expires_us > now_us),
    )
    rows = connection.execute(query.order_by(table.c.id).with_for_update() if is_held else query).all()
    return [row.id for row in rows if "platform:admin" in row.scopes]


def _locked(connection: Connection, key_id: str) -> ApiKey | None:
    table = schema.api_keys
    row = connection.execute(select(table).where(table.c.id == key_id).with_for_update()).one_or_none()
    return None if row is None else key_of(row)


def _limit(
    connection: Connection, tenant_id: str | None, scopes: frozenset[str], adapters: Sequence[str] | None
) -> list[str] | None:
    if adapters is None:
        return None
    check_limit(scopes)
    if tenant_id is None or not adapters:
        raise InvalidRequest("a limit must name at least one adapter of a tenant", param="adapters")
    return find_adapter_ids(connection, tenant_id, adapters)


def _changed_tiers(changes: KeyChanges) -> dict[str, str | None]:
    values: dict[str, str | None] = {}
    for name in ("max_service_tier", "default_service_tier"):
        tier = getattr(changes, name)
        if tier == INHERIT:
            values[name] = None
        elif tier is not None:
            check_tier(tier, name)
            values[name] = tier
    return values


def _check_name(name: str) -> None:
    if not 1 <= len(name) <= MAX_NAME or not name.isprintable():
        raise InvalidRequest(f"a key's name must have 1 to {MAX_NAME} printable characters", param="name")


def _check_expiry(expires_us: int | None, now_us: int) -> None:
    if expires_us is not None and expires_us <= now_us:
        raise InvalidRequest("a key must expire in the future", param="expires")


def _check_not_revoked(key: ApiKey) -> None:
    if key.revoked_us is not None:
        raise Conflict("the key is revoked: create another one", code="api_key_revoked")


def _new_secret(public_id: str) -> str:
    return f"sk-lmx-{public_id}-{_random_base62(43)}"


def _good_until_us(row: Row[Any] | None, sha256: bytes, now_us: int) -> int | None:
    """Expiry of this secret, in microseconds since the epoch, or None if the secret is not valid now."""
    current = row.secret_sha256 if row is not None else _NO_KEY
    previous = _NO_KEY if row is None or row.previous_sha256 is None else row.previous_sha256
    # Always compare both secrets, so that the timing reveals nothing.
    is_current, is_previous = hmac.compare_digest(sha256, current), hmac.compare_digest(sha256, previous)
    if row is None or not _is_usable(row):
        return None
    good_until_us = _expiry_us(row)
    if not is_current:
        good_until_us = min(good_until_us, (row.previous_until_us or 0) if is_previous else 0)
    return good_until_us if good_until_us > now_us else None


def _is_usable(row: Row[Any]) -> bool:
    """Return whether the key has not been revoked and its tenant is not suspended."""
    return row.revoked_us is None and row.state in (None, "active")


def _expiry_us(row: Row[Any]) -> int:
    return _FOR_EVER_US if row.expires_us is None else int(row.expires_us)


def _random_base62(length: int) -> str:
    return "".join(secrets.choice(BASE62) for _ in range(length))


def key_sha256(presented: str) -> bytes:
    return hashlib.sha256(presented.encode("utf-8", "surrogatepass")).digest()
