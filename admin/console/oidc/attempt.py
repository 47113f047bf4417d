"""A sign-in under way at the provider: known to the browser that began it, so that any server may finish it."""

from __future__ import annotations

import base64
import hashlib
import hmac
import secrets

from loramux.admin.console.browser_guard import local_path
from loramux.admin.console.oidc.provider import Attempt

ATTEMPT_S = 600
CLOCKS_APART_S = 60
"""Of the servers of which one may begin a sign-in that another finishes."""
_NAMED_BY = 16
"""So many characters of the state name its cookie."""


class OidcAttempt:
    """Made from a cookie: when it began, where it was to lead, and a secret from which all else follows.

    Whoever changes the first two changes the `state` that must come back, and so has no sign-in under way.
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
        """None of what `begin` has not made."""
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
        """What tells this sign-in from those of the same browser's other tabs."""
        return name_of(self._derived("state"))

    def told(self, redirect_url: str) -> Attempt:
        """What the provider is told, and what must come back."""
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
    """The name of the sign-in that a `state` belongs to."""
    return state[:_NAMED_BY]
