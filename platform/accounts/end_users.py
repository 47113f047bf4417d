"""Ledger labels for a tenant's end users. Only the tenant knows who they are."""

from __future__ import annotations

import hashlib

MAX_END_USER = 128


def end_user_label(user: str | None) -> str | None:
    """Return the request's `user` if it is short and printable, otherwise its SHA-256. Without one, return None.

    Long names stay distinct, and no request is refused because of its `user`.
    """
    if not user:
        return None
    if len(user) <= MAX_END_USER and user.isprintable():
        return user
    return f"sha256:{hashlib.sha256(user.encode('utf-8', 'surrogatepass')).hexdigest()}"
