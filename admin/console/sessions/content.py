"""A session's content and its encryption: the stored content is useless without the browser's cookie."""

from __future__ import annotations

import hashlib
import hmac
import secrets
from dataclasses import dataclass, field

import msgspec
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

_NONCE_BYTES = 12


@dataclass(frozen=True, slots=True)
class Notice:
    """A message for the next page. `kind` is `done`, `error` or `secret`."""

    kind: str
    text: str
    detail: str = ""
    undo_url: str = ""
    """The page where the action can be undone."""


@dataclass(frozen=True, slots=True)
class PlaygroundKey:
    id: str
    secret: str
    expires_s: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SignOn:
    """A single sign-on: the person's roles, when they were confirmed, and the tokens for confirming them again."""

    subject: str
    held: tuple[str, ...]
    """The person's role values that appear in a role rule."""
    confirmed_us: int
    """When the provider last confirmed the roles, as Unix time in microseconds."""
    asked_us: int
    """When the provider was last asked for the roles, as Unix time in microseconds."""
    id_token: str
    """The ID token, which is sent to the provider if the person also signs out there."""
    access_token: str
    refresh_token: str | None
    needs_browser: bool = False
    """True if the roles can be confirmed only by sending the browser back to the provider."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionContent:
    """A session's content: either the hash of the key that opened it or a single sign-on, plus the pages' own data."""

    key_sha256: bytes | None = None
    sign_on: SignOn | None = None
    notices: tuple[Notice, ...] = ()
    playground_keys: dict[str, PlaygroundKey] = field(default_factory=dict)
    """The playground's keys, keyed by tenant slug."""


class SessionSeal:
    """Values derived from the token in a session's cookie. The token has the entropy of a key and is never stored."""

    def __init__(self, token: str) -> None:
        self._token = token.encode("utf-8", "surrogatepass")

    @classmethod
    def new(cls) -> tuple[str, SessionSeal]:
        token = secrets.token_urlsafe(32)
        return token, cls(token)

    @property
    def id_sha256(self) -> bytes:
        return hashlib.sha256(self._token).digest()

    @property
    def csrf(self) -> str:
        return hmac.new(self._token, b"loramux console form", hashlib.sha256).hexdigest()

    def close(self, content: SessionContent) -> bytes:
        """Encrypt with AES-256-GCM, bound to the session's ID. The output begins with a fresh nonce."""
        nonce = secrets.token_bytes(_NONCE_BYTES)
        return nonce + self._cipher().encrypt(nonce, msgspec.msgpack.encode(content), self.id_sha256)

    def open(self, sealed: bytes) -> SessionContent:
        """Decrypt the output of `close`. Raises InvalidTag, or DecodeError for content in another release's format."""
        content = self._cipher().decrypt(sealed[:_NONCE_BYTES], sealed[_NONCE_BYTES:], self.id_sha256)
        return msgspec.msgpack.decode(content, type=SessionContent)

    def _cipher(self) -> AESGCM:
        return AESGCM(hmac.new(self._token, b"loramux console session", hashlib.sha256).digest())
