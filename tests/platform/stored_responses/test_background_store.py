from __future__ import annotations

from dataclasses import replace

import pytest

from loramux.migrations.database import Database
from loramux.platform.accounts.tenants import Tenant, Tenants
from loramux.platform.stored_responses import background_store
from loramux.platform.stored_responses.background_store import BackgroundStore, NewEvents, TooManyRunning
from loramux.platform.stored_responses.response_store import ResponseStore, StoredResponse
from loramux.platform.stored_responses.sealing import Sealing
from tests.platform.clocked_databases import FakeClock
from tests.platform.stored_responses.test_response_store import KEY, stored

EVENTS = [b"data: %d\n\n" % number for number in range(6)]


def queued(tenant: Tenant, number: int = 1) -> StoredResponse:
    response_id = f"resp_{number}"
    response = {"id": response_id, "status": "queued"}
    return replace(stored(tenant, response_id), response=response, state="queued", num_events=0)


def read(store: BackgroundStore, tenant: Tenant, first: int) -> tuple[list[bytes], bool, bool]:
    found = store.events(tenant.id, "resp_1", first)
    assert found is not None
    return list(found.events), found.is_finished, found.is_expired


def test_events_are_read_from_any_number_on(clocked: Database, clock: FakeClock, acme: Tenant) -> None:
    store, made = BackgroundStore(clocked, Sealing(KEY)), queued(acme)
    store.begin(made, NewEvents(0, EVENTS[:2]), 2)
    # A repeated call stores only the rest.
    for num_events in (2, 4):
        assert store.progress(made, NewEvents(0, EVENTS[:num_events]), 1) == "in_progress"
    for first in range(4):
        assert read(store, acme, first) == (EVENTS[first:4], False, False)
    for _ in range(2):
        assert store.finish(replace(made, state="completed"), NewEvents(2, EVENTS[2:]), 3) == "completed"
    assert read(store, acme, 3) == (EVENTS[3:], True, False)
    assert read(store, acme, 6) == ([], True, False)
    assert store.progress(made, NewEvents(6, []), 3) == "completed"
    other = Tenants(clocked).create("other")
    assert store.events(other.id, "resp_1", 0) is None
    assert store.progress(replace(made, tenant_id=other.id), NewEvents(6, []), 3) is None
    clock.advance(86400)
    assert read(store, acme, 0) == ([], True, True)
    assert read(store, acme, 6) == ([], True, False)


def test_number_of_unfinished_responses_is_limited_for_each_tenant(
    clocked: Database, clock: FakeClock, acme: Tenant, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(background_store, "MAX_RUNNING", 2)
    store, other = BackgroundStore(clocked, Sealing(KEY)), Tenants(clocked).create("other")
    for number in (1, 2):
        store.begin(queued(acme, number), NewEvents(0, []), 1)
    with pytest.raises(TooManyRunning):
        store.begin(queued(acme, 3), NewEvents(0, []), 1)
    store.begin(queued(other, 3), NewEvents(0, []), 1)
    store.finish(replace(queued(acme, 1), state="failed"), NewEvents(0, []), 0)
    store.begin(queued(acme, 4), NewEvents(0, []), 1)
    # Responses without a request are those of dead servers.
    clock.advance(61)
    store.begin(queued(acme, 5), NewEvents(0, []), 1)


def test_response_without_a_request_is_lost_after_a_minute(clocked: Database, clock: FakeClock, acme: Tenant) -> None:
    store, responses, made = BackgroundStore(clocked, Sealing(KEY)), ResponseStore(clocked, Sealing(KEY)), queued(acme)
    store.begin(made, NewEvents(0, EVENTS[:2]), 1)
    lost = replace(made, state="failed")
    for is_lost, state in ((False, "queued"), (True, "failed")):
        found = responses.get(acme.id, made.id)
        assert found is not None
        assert found.is_lost == is_lost
        assert store.finish(lost, NewEvents(2, EVENTS[2:]), None) == state
        clock.advance(61)
    found = responses.get(acme.id, made.id)
    assert found is not None
    assert (found.state, found.is_lost, found.num_events) == ("failed", False, 6)


@pytest.mark.parametrize(("state", "shown"), [("completed", "cancelling"), ("failed", "failed"), ("cancelled",) * 2])
def test_cancelled_response_is_not_completed(clocked: Database, acme: Tenant, state: str, shown: str) -> None:
    store, responses, made = BackgroundStore(clocked, Sealing(KEY)), ResponseStore(clocked, Sealing(KEY)), queued(acme)
    store.begin(made, NewEvents(0, []), 1)
    store.cancel(made)
    found = responses.get(acme.id, made.id)
    assert found is not None
    assert (found.response["status"], found.is_unfinished) == ("cancelled", True)
    assert store.finish(replace(made, state=state), NewEvents(0, []), 0) == shown
