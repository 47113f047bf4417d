"""Stores responses in the database."""

from __future__ import annotations

import hmac
import secrets
import zlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import msgspec
import structlog
from sqlalchemy import delete, insert, select

from loramux.migrations import schema
from loramux.migrations.database import Database

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.ciphers.aead import AESGCM

MAX_CONTENT_BYTES = 4 * 1024 * 1024
"""Longest encrypted content of a stored response, in bytes."""
DAY_US = 24 * 3600 * 1_000_000

_NONCE_BYTES = 12
log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredResponse:
    """A response object, and the items of its whole conversation before its output, each with an ID."""

    id: str
    tenant_id: str
    adapter_id: str | None
    """The adapter that answered. None for the base."""
    input: list[dict[str, Any]]
    response: dict[str, Any]


class ResponseStore:
    """Encrypts each response with AES-256-GCM, under a key of its tenant that is derived from `secret`.

    Without a secret, nothing is stored, and no stored response can be read. Blocking.
    """

    def __init__(self, database: Database, secret: bytes | None) -> None:
        self._database = database
        self._secret = secret

    @property
    def is_open(self) -> bool:
        return self._secret is not None

    def put(self, stored: StoredResponse, days: int) -> bool:
        """Store a response for a number of days. Return False if it is too long."""
        content = zlib.compress(msgspec.json.encode({"input": stored.input, "response": stored.response}))
        if len(content) > MAX_CONTENT_BYTES:
            return False
        nonce = secrets.token_bytes(_NONCE_BYTES)
        sealed = nonce + self._cipher(stored.tenant_id).encrypt(nonce, content, stored.id.encode())
        with self._database.write() as connection:
            now_us = self._database.now_us(connection)
            connection.execute(
                insert(schema.responses).values(
                    id=stored.id,
                    tenant_id=stored.tenant_id,
                    adapter_id=stored.adapter_id,
                    created_us=now_us,
                    expires_us=now_us + days * DAY_US,
                    content=sealed,
                )
            )
        return True

    def get(self, tenant_id: str, response_id: str) -> StoredResponse | None:
        """Return a tenant's response, or None if it does not exist, has expired, or was encrypted with another
        secret.
        """
        table = schema.responses
        if self._secret is None:
            return None
        with self._database.read() as connection:
            query = select(table).where(table.c.id == response_id, table.c.tenant_id == tenant_id)
            row = connection.execute(query).one_or_none()
            if row is None or row.expires_us <= self._database.now_us(connection):
                return None
        from cryptography.exceptions import InvalidTag

        nonce, sealed = row.content[:_NONCE_BYTES], row.content[_NONCE_BYTES:]
        try:
            content = self._cipher(tenant_id).decrypt(nonce, sealed, response_id.encode())
        except InvalidTag:
            log.warning("a stored response was encrypted with another response_key", response=response_id)
            return None
        document = msgspec.json.decode(zlib.decompress(content))
        return StoredResponse(id=response_id, tenant_id=tenant_id, adapter_id=row.adapter_id, **document)

    def delete(self, tenant_id: str, response_id: str) -> None:
        table = schema.responses
        with self._database.write() as connection:
            connection.execute(delete(table).where(table.c.id == response_id, table.c.tenant_id == tenant_id))

    def _cipher(self, tenant_id: str) -> AESGCM:
        # Most servers store no responses, so they never import the library.
        from cryptography.hazmat.primitives.ciphers.aead import AESGCM

        assert self._secret is not None
        return AESGCM(hmac.digest(self._secret, b"loramux stored responses " + tenant_id.encode(), "sha256"))
