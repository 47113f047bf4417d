"""What a session holds, and how it is sealed: what the database keeps is of no use without the browser's cookie."""

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
    """What the next page tells its reader; `kind` is `done`, `error` or `secret`."""

    kind: str
    text: str
    detail: str = ""
    undo_url: str = ""
    """Where it can be taken back."""


@dataclass(frozen=True, slots=True)
class PlaygroundKey:
    """A key that the playground made for a tenant."""

    id: str
    secret: str
    expires_s: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SignOn:
    """A single sign-on: what the provider said of the person, when, and what it is asked again with."""

    subject: str
    held: tuple[str, ...]
    """Which of the rules' values the person has."""
    confirmed_us: int
    """When the provider last said so."""
    asked_us: int
    """When it was last asked."""
    id_token: str
    """What it is shown when the person signs out there too."""
    access_token: str
    refresh_token: str | None
    needs_browser: bool = False
    """Whether it confirms the roles to nobody but the browser, which must go there again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionContent:
    """Either the SHA-256 of the key that opened the session, or a single sign-on; and what the pages keep in it."""

    key_sha256: bytes | None = None
    sign_on: SignOn | None = None
    notices: tuple[Notice, ...] = ()
    playground_keys: dict[str, PlaygroundKey] = field(default_factory=dict)
    """By the tenant's slug."""


class SessionSeal:
    """All that is made from the token in a session's cookie, which is as long as a key and never stored."""

    def __init__(self, token: str) -> None:
        self._token = token.encode("utf-8", "surrogatepass")

    @classmethod
    def new(cls) -> tuple[str, SessionSeal]:
        token = secrets.token_urlsafe(32)
        return token, cls(token)

    @property
    def id_sha256(self) -> bytes:
        """What the session is found by."""
        return hashlib.sha256(self._token).digest()

    @property
    def csrf(self) -> str:
        """What each form of the session must send along."""
        return hmac.new(self._token, b"loramux console form", hashlib.sha256).hexdigest()

    def close(self, content: SessionContent) -> bytes:
        """AES-256-GCM under a fresh nonce, which stands in front; bound to the session's id."""
        nonce = secrets.token_bytes(_NONCE_BYTES)
        return nonce + self._cipher().encrypt(nonce, msgspec.msgpack.encode(content), self.id_sha256)

    def open(self, sealed: bytes) -> SessionContent:
        """What `close` was given; raises InvalidTag for anything else, DecodeError for another release's."""
        content = self._cipher().decrypt(sealed[:_NONCE_BYTES], sealed[_NONCE_BYTES:], self.id_sha256)
        return msgspec.msgpack.decode(content, type=SessionContent)

    def _cipher(self) -> AESGCM:
        return AESGCM(hmac.new(self._token, b"loramux console session", hashlib.sha256).digest())
