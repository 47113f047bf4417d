"""How the ledger names the people behind a tenant's requests, whom only the tenant knows."""

from __future__ import annotations

import hashlib

MAX_END_USER = 128


def end_user_label(user: str | None) -> str | None:
    """The request's `user` as it is, where a column and a report can hold it; else its SHA-256.

    Two users keep apart however long their names are, and nobody is refused for one.
    """
    if not user:
        return None
    if len(user) <= MAX_END_USER and user.isprintable():
        return user
    return f"sha256:{hashlib.sha256(user.encode('utf-8', 'surrogatepass')).hexdigest()}"
