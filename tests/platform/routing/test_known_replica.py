from __future__ import annotations

import pytest

from loramux.platform.routing.known_replica import LOCAL_CREDIT, KnownReplica
from loramux.platform.routing.views import digest_prefix
from tests.platform.routing.replica_views import digest_of, view


def test_own_requests_count_until_reports_contain_them() -> None:
    replica = KnownReplica(view("a", load=0.50, since_s=1))
    replica.note_started()
    assert replica.load == 0.51
    # This report can be older than the request, so the request still counts in addition.
    replica.receive(view("a", load=0.51, since_s=2))
    assert replica.load == 0.52
    replica.receive(view("a", load=0.51, since_s=3))
    assert replica.load == 0.51
    replica.note_ended()
    assert replica.load == 0.50


def test_same_report_changes_nothing() -> None:
    replica = KnownReplica(view("a", load=0.5, since_s=1))
    replica.note_started()
    for _ in range(5):
        replica.receive(view("a", load=0.5, since_s=1))
    assert replica.load == 0.51


def test_load_is_at_least_its_own_requests() -> None:
    replica = KnownReplica(view("a", load=0.0, since_s=1))
    for since_s in range(2, 6):
        replica.note_started()
        replica.receive(view("a", load=0.0, since_s=since_s))
    assert replica.load >= 0.04
    for _ in range(9):
        replica.note_ended()
    assert replica.load == 0.0


def test_expected_adapter_counts_for_two_reports() -> None:
    replica = KnownReplica(view("a", since_s=1))
    prefix = digest_prefix(digest_of("x"))
    replica.expect(prefix)
    held = []
    for since_s in range(2, 5):
        held.append(replica.holds(prefix))
        replica.receive(view("a", since_s=since_s))
    assert held == [True, True, False]


@pytest.mark.parametrize(("free", "cost"), [(1.0, 0.3), (0.1, 0.3), (0.05, 0.8), (0.0, 1.3)])
def test_full_pool_costs(free: float, cost: float) -> None:
    assert KnownReplica(view("a", load=0.3, pages_free_fraction=free)).cost == pytest.approx(cost)


def test_local_engine_has_a_credit() -> None:
    assert KnownReplica(view("a", load=0.3, is_local=True)).cost == pytest.approx(0.3 - LOCAL_CREDIT)
