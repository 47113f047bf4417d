"""A sign-in in progress at the provider. The browser keeps the state, so that any server can finish the sign-in."""

from __future__ import annotations

import base64
import hashlib
import hmac
import secrets

from loramux.admin.console.browser_guard import local_path
from loramux.admin.console.oidc.provider import Attempt

ATTEMPT_S = 600
CLOCKS_APART_S = 60
"""Tolerated clock difference between the servers that begin and finish a sign-in, in seconds."""
_NAMED_BY = 16
"""Number of leading characters of the `state` that are used in the cookie's name."""


class OidcAttempt:
    """A sign-in cookie's content: the start time, the requested page, and a secret from which other values are derived.

    Changing the time or the page changes the `state` that the provider must return, which invalidates the sign-in.
    """

    def __init__(self, cookie: str, secret: str, begun_s: int, wanted: str) -> None:
        self.cookie = cookie
        self.begun_s = begun_s
        self.wanted = wanted
        self._secret = secret.encode()

    @classmethod
    def begin(cls, now_s: int, wanted: str) -> OidcAttempt:
        secret = secrets.token_urlsafe(32)
        path = base64.urlsafe_b64encode(wanted.encode()).decode().rstrip("=")
        return cls(f"{secret}.{now_s}.{path}", secret, now_s, wanted)

    @classmethod
    def read(cls, cookie: str | None) -> OidcAttempt | None:
        secret, _, rest = (cookie or "").partition(".")
        begun, _, path = rest.partition(".")
        if not (secret.isascii() and len(secret) >= 32 and begun.isascii() and begun.isdecimal() and len(begun) < 16):
            return None
        try:
            wanted = base64.urlsafe_b64decode(path + "=" * (-len(path) % 4)).decode()
        except ValueError:
            return None
        if local_path(wanted) is None:
            return None
        return cls(cookie or "", secret, int(begun), wanted)

    @property
    def name(self) -> str:
        """A name that distinguishes this sign-in from sign-ins in the browser's other tabs."""
        return name_of(self._derived("state"))

    def told(self, redirect_url: str) -> Attempt:
        return Attempt(
            state=self._derived("state"),
            nonce=self._derived("nonce"),
            code_verifier=self._derived("code verifier"),
            redirect_url=redirect_url,
        )

    def _derived(self, purpose: str) -> str:
        text = f"loramux sign-in {purpose}\n{self.begun_s}\n{self.wanted}".encode()
        digest = hmac.new(self._secret, text, hashlib.sha256).digest()
        return base64.urlsafe_b64encode(digest).decode().rstrip("=")


def name_of(state: str) -> str:
    return state[:_NAMED_BY]
