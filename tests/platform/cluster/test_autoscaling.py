from __future__ import annotations

from types import SimpleNamespace

import pytest

from loramux.platform.cluster.autoscaling import SHRINK_LOAD, TARGET_LOAD, decide, num_replicas


@pytest.mark.parametrize(
    ("current", "work", "expected"),
    [(1, 0, 1), (1, 70, 1), (1, 71, 2), (2, 700, 10), (4, 210, 4), (4, 200, 4), (4, 150, 3), (4, 0, 1), (3, 140, 3)],
)
def test_the_number_of_replicas_follows_the_work(current: int, work: int, expected: int) -> None:
    assert num_replicas(current, work, 100) == expected


def test_the_number_settles() -> None:
    for work in range(0, 5000, 37):
        for current in (1, 2, 7, 40):
            settled = num_replicas(current, work, 64)
            assert num_replicas(settled, work, 64) == settled
            assert work <= max(TARGET_LOAD, SHRINK_LOAD) * 64 * settled


def test_the_policy_reads_what_replicas_report() -> None:
    metrics = {"work": {"a": 60.0, "b": 70.0}, "capacity": {"a": 64.0, "b": 64.0}}
    assert decide(SimpleNamespace(aggregated_metrics=metrics, target_num_replicas=2)) == (3, {})
    for empty in (None, {}, {"work": {}}, {"work": {"a": 60.0}}):
        assert decide(SimpleNamespace(aggregated_metrics=empty, target_num_replicas=2)) == (2, {})
    zero = {"work": {"a": 60.0}, "capacity": {"a": 0.0}}
    assert decide(SimpleNamespace(aggregated_metrics=zero, target_num_replicas=2)) == (2, {})
