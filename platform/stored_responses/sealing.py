"""Encrypts what is stored for tenants."""

from __future__ import annotations

import hmac
import secrets
import zlib
from typing import TYPE_CHECKING, Any

import msgspec
import structlog

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.ciphers.aead import AESGCM

MAX_CONTENT_BYTES = 8 * 1024 * 1024
"""Longest content of a row before compression, in bytes."""
MAX_ID_CHARACTERS = 64

_NONCE_BYTES = 12
_TAG_DIGITS = 32
log = structlog.get_logger(__name__)


class ContentTooLong(Exception):
    """The content is too long to be stored."""


class Sealing:
    """Encrypts each content with AES-256-GCM, under a key of its tenant that is derived from `secret`.

    A content is bound to its name, which is unique within the tenant. Without a secret, nothing can be sealed or
    opened.
    """

    def __init__(self, secret: bytes | None) -> None:
        self._secret = secret

    @property
    def is_open(self) -> bool:
        return self._secret is not None

    def seal(self, tenant_id: str, name: str, document: Any) -> bytes:
        """Encrypt a document. Raises ContentTooLong."""
        content = document if isinstance(document, bytes) else msgspec.json.encode(document)
        # A tenant's bytes can be compressed a thousandfold, so the compressed length does not limit memory.
        if len(content) > MAX_CONTENT_BYTES:
            raise ContentTooLong(f"more than {MAX_CONTENT_BYTES} bytes cannot be stored")
        nonce = secrets.token_bytes(_NONCE_BYTES)
        return nonce + self._cipher(tenant_id).encrypt(nonce, zlib.compress(content), name.encode())

    def open(self, tenant_id: str, name: str, sealed: bytes) -> Any:
        """Return a document, or None if it was encrypted with another secret or is longer than MAX_CONTENT_BYTES."""
        content = self.open_bytes(tenant_id, name, sealed)
        return None if content is None else msgspec.json.decode(content)

    def open_bytes(self, tenant_id: str, name: str, sealed: bytes) -> bytes | None:
        """Return bytes that were sealed as they are. See `open`."""
        from cryptography.exceptions import InvalidTag

        if self._secret is None:
            return None
        try:
            compressed = self._cipher(tenant_id).decrypt(sealed[:_NONCE_BYTES], sealed[_NONCE_BYTES:], name.encode())
        except InvalidTag:
            log.warning("a stored object was encrypted with another response_key", name=name)
            return None
        content = zlib.decompressobj().decompress(compressed, MAX_CONTENT_BYTES + 1)
        if len(content) > MAX_CONTENT_BYTES:
            log.warning("a stored object is too long to be read", name=name)
            return None
        return content

    def tag(self, tenant_id: str, text: str) -> str:
        """Return a tag of 32 hexadecimal digits by which a row can be found without storing the text itself."""
        return hmac.digest(self._key(tenant_id), b"tag " + text.encode(), "sha256").hex()[:_TAG_DIGITS]

    def _key(self, tenant_id: str) -> bytes:
        assert self._secret is not None
        return hmac.digest(self._secret, b"loramux stored responses " + tenant_id.encode(), "sha256")

    def _cipher(self, tenant_id: str) -> AESGCM:
        # Most servers store no responses, so they never import the library.
        from cryptography.hazmat.primitives.ciphers.aead import AESGCM

        return AESGCM(self._key(tenant_id))


def is_possible_id(text: str) -> bool:
    """Return whether a caller's text can be the identifier of a stored object. PostgreSQL refuses some characters."""
    return len(text) <= MAX_ID_CHARACTERS and text.isascii() and text.isprintable()
