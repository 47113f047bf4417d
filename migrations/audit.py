"""The audit log. Each administrative change and its log row are written in one transaction."""

from __future__ import annotations

import re
from collections.abc import Mapping
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

from sqlalchemy import Connection, ScalarSelect, insert

from loramux.migrations.identifiers import new_id
from loramux.migrations.schema import audit_log

MAX_TEXT = 300
"""Longest text that is logged in full, in characters. Longer texts are truncated: the log is not a copy of the data."""

_KEY = re.compile(r"sk-lmx-([0-9A-Za-z]{16})-[0-9A-Za-z]{43}")
_SECRET_FIELDS = re.compile(r"secret|password|token$|sha256")


@dataclass(frozen=True, slots=True)
class Actor:
    """The author of a change.

    `key_id` is a key's identifier, `operator` for the operator's own key, `oidc_...` for a single sign-on user, or
    `system`. `address` and `request_id` come from the API call that made the change.
    """

    key_id: str = "system"
    address: str | None = None
    request_id: str | None = None


_SYSTEM = Actor()
# The actor is a context variable, so that no service can forget to pass it on.
_acting: ContextVar[Actor] = ContextVar("acting", default=_SYSTEM)


def act_as(actor: Actor) -> None:
    _acting.set(actor)


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
    """Record one change, in the transaction that makes it. `action` is `what.how`, such as `alias.set`.

    `before` and `after` describe the object as small JSON values. Only fields that differ are kept, and an update that
    changes no field is not recorded. Anything that looks like a key is masked, and a field whose name suggests a secret
    fails an assertion. `tenant_id` may be a subquery.
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
    """Return the fields that differ, each as [before, after], with None for a missing field."""
    names = {**before, **after}
    assert not any(_SECRET_FIELDS.search(name) for name in names), "secrets stay out of the audit log"
    pairs = {name: [_safe(before.get(name)), _safe(after.get(name))] for name in names}
    return {name: pair for name, pair in pairs.items() if pair[0] != pair[1]}


def _safe(value: Any) -> Any:
    """Return the value with API keys masked and long strings truncated."""
    if isinstance(value, str):
        shown = _KEY.sub(r"sk-lmx-\1-...", value)
        return shown if len(shown) <= MAX_TEXT else f"{shown[:MAX_TEXT]}..."
    if isinstance(value, Mapping):
        return {str(name): _safe(item) for name, item in value.items()}
    if isinstance(value, (list, tuple, set, frozenset)):
        return [_safe(item) for item in (sorted(value) if isinstance(value, (set, frozenset)) else value)]
    return value
