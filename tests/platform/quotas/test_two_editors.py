from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from loramux.migrations.database import Database
from loramux.platform.accounts.api_keys import ApiKeys
from loramux.platform.accounts.keys import KeyChanges
from loramux.platform.accounts.tenants import TenantChanges, Tenants
from loramux.platform.errors import PreconditionFailed
from loramux.platform.quotas.policies import QuotaPolicies

NUM_EDITORS = 6

Edit = Callable[[int, Callable[[Any], None]], Any]


def _tenant(database: Database) -> tuple[Any, Edit]:
    tenants = Tenants(database)
    seen = tenants.create("acme")
    return seen, lambda number, check: tenants.update(seen.id, TenantChanges(weight=2 + number), check)


def _key(database: Database) -> tuple[Any, Edit]:
    keys = ApiKeys(database)
    seen = keys.create(Tenants(database).create("acme").id, "caller").key
    return seen, lambda number, check: keys.update(seen.id, KeyChanges(name=f"caller {number}"), check)


def _quota(database: Database) -> tuple[Any, Edit]:
    quotas = QuotaPolicies(database)
    seen = quotas.set(Tenants(database).create("acme").id, "tokens_per_minute", 10)
    return seen, lambda number, check: quotas.change(seen.id, limit=100 + number, check=check)


@pytest.mark.parametrize("make", [_tenant, _key, _quota], ids=["tenant", "key", "quota"])
def test_exactly_one_of_several_concurrent_editors_wins(
    clocked: Database, make: Callable[[Database], tuple[Any, Edit]]
) -> None:
    seen, edit = make(clocked)
    together = threading.Barrier(NUM_EDITORS)

    def check(present: Any) -> None:
        if present != seen:
            raise PreconditionFailed("it has been changed since")

    def attempt(number: int) -> Any:
        together.wait(60)
        try:
            return edit(number, check)
        except PreconditionFailed:
            return None

    with ThreadPoolExecutor(NUM_EDITORS) as threads:
        outcomes = list(threads.map(attempt, range(NUM_EDITORS)))
    winners = [outcome for outcome in outcomes if outcome is not None]
    assert len(winners) == 1
    # The losers' changes appear nowhere, and the next editor sees the winner's changes.
    found: list[Any] = []
    edit(NUM_EDITORS, found.append)
    assert found == winners
