from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from loramux.platform.routing import rendezvous
from loramux.platform.routing.rendezvous import RendezvousOrder

KEYS = st.integers(min_value=0, max_value=2**64 - 1)
IDS = st.lists(st.text(min_size=1, max_size=8), min_size=2, max_size=12, unique=True)


@settings(deadline=None)
@given(KEYS, IDS, st.data())
def test_leaving_replica_changes_no_other_place(key: int, ids: list[str], data: st.DataObject) -> None:
    leaving = data.draw(st.sampled_from(ids))
    order = RendezvousOrder(ids)
    before = order.order(key)
    order.set_replicas(one for one in ids if one != leaving)
    assert order.order(key) == tuple(one for one in before if one != leaving)


@settings(deadline=None)
@given(KEYS, IDS)
def test_order_does_not_depend_on_the_listing(key: int, ids: list[str]) -> None:
    assert RendezvousOrder(ids).order(key) == RendezvousOrder(reversed(ids)).order(key)


@pytest.mark.parametrize("place", [0, 1, 9])
def test_each_replica_has_its_part_of_each_place(place: int) -> None:
    order = RendezvousOrder(f"replica-{number}" for number in range(10))
    # Consecutive keys are the hardest for a weak hash.
    counts = Counter(order.order(key)[place] for key in range(5000))
    assert len(counts) == 10
    assert min(counts.values()) > 400
    assert max(counts.values()) < 600


def test_memory_of_orders_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rendezvous, "MAX_ORDERS", 3)
    order = RendezvousOrder(["a", "b"])
    expected = [order.order(key) for key in range(10)]
    assert len(order._orders) == 3
    assert [order.order(key) for key in range(10)] == expected
