"""The audit trail: a row in the transaction of each administrative change, or none where the change is rolled back."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

from sqlalchemy import Connection, ScalarSelect, insert

from loramux.migrations.identifiers import new_id
from loramux.migrations.schema import audit_log

MAX_TEXT = 300
"""Longer texts are cut: the trail says what changed, it is no second copy."""

_KEY = re.compile(r"sk-lmx-([0-9A-Za-z]{16})-[0-9A-Za-z]{43}")
_SECRET_FIELDS = re.compile(r"secret|password|token$|sha256")


@dataclass(frozen=True, slots=True)
class Actor:
    """Who changes something: a key's identifier, `operator` for the operator's own key, or `system`.

    `address` and `request_id` are those of the call that asked for it.
    """

    key_id: str = "system"
    address: str | None = None
    request_id: str | None = None


_SYSTEM = Actor()
# Not handed through every service: each would only hand it on, and one that forgot would hide who did it.
_acting: ContextVar[Actor] = ContextVar("acting", default=_SYSTEM)


def act_as(actor: Actor) -> None:
    """Say who is behind the changes of this call, and of the threads that it is run on."""
    _acting.set(actor)


@contextmanager
def acting_as(actor: Actor) -> Iterator[None]:
    """The same for a block only."""
    token = _acting.set(actor)
    try:
        yield
    finally:
        _acting.reset(token)


def audit(
    connection: Connection,
    now_us: int,
    action: str,
    target: str,
    *,
    tenant_id: str | ScalarSelect[str] | None,
    before: Mapping[str, Any] | None = None,
    after: Mapping[str, Any] | None = None,
) -> None:
    """Write down one change, in its own transaction: `action` is `what.how`, such as `alias.set`.

    `before` and `after` describe the thing in small JSON values; only what differs is kept, and where nothing does
    there was no change. What looks like a key is
    blotted out, wherever it stands; a field that is named like a secret is a mistake of ours. `tenant_id` may be a
    subquery that finds it.
    """
    changes = difference(before or {}, after or {})
    if before and not changes:
        return
    actor = _acting.get()
    connection.execute(
        insert(audit_log).values(
            id=new_id("aud"),
            created_us=now_us,
            actor=actor.key_id,
            address=actor.address,
            request_id=actor.request_id,
            action=action,
            tenant_id=tenant_id,
            target=_safe(target),
            changes=changes,
        )
    )


def difference(before: Mapping[str, Any], after: Mapping[str, Any]) -> dict[str, list[Any]]:
    """The fields that differ, each as [before, after]; a field that one side lacks is None there."""
    names = {**before, **after}
    assert not any(_SECRET_FIELDS.search(name) for name in names), "secrets stay out of the audit log"
    pairs = {name: [_safe(before.get(name)), _safe(after.get(name))] for name in names}
    return {name: pair for name, pair in pairs.items() if pair[0] != pair[1]}


def _safe(value: Any) -> Any:
    """A value without keys and without great length."""
    if isinstance(value, str):
        shown = _KEY.sub(r"sk-lmx-\1-...", value)
        return shown if len(shown) <= MAX_TEXT else f"{shown[:MAX_TEXT]}..."
    if isinstance(value, Mapping):
        return {str(name): _safe(item) for name, item in value.items()}
    if isinstance(value, (list, tuple, set, frozenset)):
        return [_safe(item) for item in (sorted(value) if isinstance(value, (set, frozenset)) else value)]
    return value
