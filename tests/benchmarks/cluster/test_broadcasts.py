from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest

from benchmarks.cluster import broadcasts
from benchmarks.routing.fleet import Fleet
from benchmarks.routing.policies import POLICIES
from benchmarks.routing.setting import Setting
from loramux.platform.cluster.replica_report import HeldState, as_values, read_identity, read_state

SMALL = Setting(num_adapters=60, num_replicas=3, pool_adapters=30, load=0.7, settle_s=5, measure_s=10)


def test_reports_are_those_of_a_cluster(monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[dict[str, HeldState]] = []

    def message(setting: Setting, reports: dict[str, HeldState]) -> bytes:
        sent.append(dict(reports))
        return b"0123456789"

    monkeypatch.setattr(broadcasts, "message", message)
    fleet = Fleet(SMALL, POLICIES["router"])
    fleet.run(SMALL.settle_s)
    controller = broadcasts.Controller(fleet, SMALL)
    fleet.run(SMALL.measure_s)
    assert controller.num_sent == len(sent)
    assert controller.num_bytes == 10 * len(sent)
    assert len(sent) <= controller.num_changes <= SMALL.num_replicas * (SMALL.measure_s + 1)
    # Nothing is sent again without a change.
    assert all(one != next_one for one, next_one in pairwise(sent))
    for name, held in sent[-1].items():
        state, holds = read_state(as_values(held))
        assert state == held
        assert 0 < len(holds) <= SMALL.pool_adapters
        assert read_identity(as_values(broadcasts.identity(SMALL, name))).capacity == SMALL.capacity


def test_a_fleet_without_requests_sends_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(broadcasts, "message", lambda *_: b"0123456789")
    counted = broadcasts.count(replace(SMALL, load=1e-9))
    assert (counted["changes_per_s"], counted["bytes_per_s"]) == (0, 0)
