"""The interface with which an extension resolves bearer tokens that are not API keys of loramux."""

from __future__ import annotations

from typing import Protocol, runtime_checkable

from loramux.adapter_store.extensions import ExtensionKind


@runtime_checkable
class KeyAuthentication(Protocol):
    """Resolves bearer tokens, such as those of a company's identity provider, to API keys in the database.

    The key decides what the caller may do, which quotas apply and who is billed. Safe to use from several threads.
    """

    def key_id(self, token: str) -> str | None:
        """Return the ID (`key_...`) of the API key with which the bearer of a token acts.

        Returns None if the token is unknown, forged or expired. Any exception means that the token cannot be checked
        now, and the caller gets a 503. May block.
        """
        ...


KEY_AUTHENTICATION = ExtensionKind[KeyAuthentication]("key_authentication", "key authentication", KeyAuthentication)
"""Extensions that resolve bearer tokens. Each is called without arguments, once per process."""


def open_key_authentication(name: str | None) -> KeyAuthentication | None:
    """Create the key authentication of this name, or return None if no name is given. Raises ExtensionRefused."""
    return None if name is None else KEY_AUTHENTICATION.required(name)
