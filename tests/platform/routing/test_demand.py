from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from loramux.platform.routing import demand
from loramux.platform.routing.demand import AVERAGE_S, AdapterDemand
from tests.platform.routing.replica_views import Clock


def test_part_follows_traffic_and_decays() -> None:
    clock = Clock()
    counts = AdapterDemand(clock)
    for _ in range(600):
        for prefix in (1, 1, 1, 2):
            counts.start(prefix)
            counts.end(prefix)
        clock.now_s += 0.1
    assert 0.6 < counts.part(1) < 0.75
    assert 0.15 < counts.part(2) < 0.25
    for _ in range(600):
        counts.start(2)
        counts.end(2)
        clock.now_s += AVERAGE_S / 100
    assert counts.part(1) < 0.02


def test_burst_in_flight_counts_at_once() -> None:
    counts = AdapterDemand(Clock())
    for prefix in range(1000):
        counts.start(prefix)
        counts.end(prefix)
    for _ in range(25):
        counts.start(7)
    assert counts.part(7) == pytest.approx((25 - 5) / 25)


@pytest.mark.parametrize("number", [0, 1])
def test_single_request_is_no_demand(number: int) -> None:
    counts = AdapterDemand(Clock())
    for _ in range(number):
        counts.start(7)
    assert counts.part(7) == 0.0


def test_base_requests_count_in_the_whole() -> None:
    counts = AdapterDemand(Clock())
    for _ in range(100):
        counts.start(1)
        counts.start(None)
    assert counts.part(1) < 0.5


@settings(deadline=None)
@given(st.lists(st.tuples(st.sampled_from("se"), st.integers(0, 3), st.floats(-1e6, 1e6)), max_size=50))
def test_clock_jumps_keep_parts_in_range(events: list[tuple[str, int, float]]) -> None:
    clock = Clock()
    counts = AdapterDemand(clock)
    for kind, prefix, jump_s in events:
        clock.now_s += jump_s
        (counts.start if kind == "s" else counts.end)(prefix)
        assert 0.0 <= counts.part(prefix) <= 1.0


def test_memory_of_adapters_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demand, "MAX_ADAPTERS", 2)
    counts = AdapterDemand(Clock())
    for prefix in range(5):
        for _ in range(9):
            counts.start(prefix)
    assert [counts.part(prefix) > 0 for prefix in range(5)] == [False, False, False, True, True]
    # The forgotten adapter's requests end later.
    counts.end(0)
