from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from loramux.platform.quotas.counters import UNITS, Counter

START_US = 1_800_000_000_000_000
MINUTE_US = 60_000_000
WEEK_US = 7 * 86_400_000_000

rates = st.tuples(st.integers(1, 10**6), st.integers(1, 10**6))
passing = st.integers(0, 3 * MINUTE_US)


def used_up(counter: Counter, limit: int, burst: int, now_us: int) -> tuple[Counter, int]:
    counter = counter.refilled(limit, burst, now_us)
    admitted = max(0, counter.free_units // UNITS)
    return counter.changed(level=-admitted * UNITS), admitted


@settings(deadline=None)
@given(rates, st.lists(st.tuples(passing, st.integers(0, MINUTE_US)), max_size=40))
def test_oscillating_clock_refills_no_minute_twice(rate: tuple[int, int], steps: list[tuple[int, int]]) -> None:
    limit, burst = rate
    counter, true_us, total = Counter.fresh(burst, START_US), 0, 0
    for passed_us, ahead_us in steps:
        true_us += passed_us
        counter, admitted = used_up(counter, limit, burst, START_US + true_us + ahead_us)
        total += admitted
        assert total * MINUTE_US <= burst * MINUTE_US + limit * (true_us + MINUTE_US)


@settings(deadline=None)
@given(rates, st.lists(st.tuples(passing, st.integers(0, WEEK_US)), max_size=40))
def test_forward_jump_refills_at_most_one_bucket(rate: tuple[int, int], steps: list[tuple[int, int]]) -> None:
    limit, burst = rate
    counter, true_us, before_us, total, jumped = Counter.fresh(burst, START_US), 0, 0, 0, 0
    for passed_us, ahead_us in steps:
        true_us += passed_us
        jumped += min(burst * MINUTE_US, limit * max(0, ahead_us - before_us))
        before_us = ahead_us
        counter, admitted = used_up(counter, limit, burst, START_US + true_us + ahead_us)
        total += admitted
        assert total * MINUTE_US <= burst * MINUTE_US + limit * true_us + jumped


@settings(deadline=None)
@given(rates, st.integers(0, WEEK_US), st.integers(-WEEK_US, 0), st.integers(1, 3))
def test_clock_step_stalls_a_bucket_for_at_most_a_minute(
    rate: tuple[int, int], ahead_us: int, back_us: int, times: int
) -> None:
    limit, burst = rate
    counter, now_us = Counter.fresh(burst, START_US), START_US
    for _ in range(times):
        counter, _ = used_up(counter, limit, burst, now_us + ahead_us)
        counter, _ = used_up(counter, limit, burst, now_us + back_us)
        now_us += back_us
    wait_us = counter.wait_us(1, limit, now_us)
    assert wait_us <= MINUTE_US + -(-UNITS // limit)
    assert used_up(counter, limit, burst, now_us + wait_us)[1] >= 1
    if wait_us:
        assert used_up(counter, limit, burst, now_us + wait_us - 1)[1] == 0


def test_largest_bucket_fits_its_column() -> None:
    largest = 10**11
    counter = Counter.fresh(largest, START_US).changed(level=-largest * UNITS - 10**15)
    for _ in range(3):
        counter = counter.refilled(largest, largest, START_US + WEEK_US).changed(level=-largest * UNITS)
        counter = counter.refilled(largest, largest, START_US)
        assert -(2**63) <= counter.level < 2**63
