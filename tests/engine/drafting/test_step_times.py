from __future__ import annotations

import pytest

from loramux.engine.drafting.step_times import FIRST_SLOPE, MAX_AGE, StepTimes


def test_nothing_is_assumed_before_the_first_step() -> None:
    times = StepTimes()
    assert times.seconds(4) == 0.0
    assert times.ratio(1, 8) == 1.0


def test_the_first_step_of_a_number_of_rows_does_not_count() -> None:
    times = StepTimes()
    times.note(1, 5.0)
    assert times.seconds(1) == 0.0
    times.note(1, 1.0)
    assert times.seconds(1) == 1.0


def measured(**seconds: float) -> StepTimes:
    times = StepTimes()
    for name, value in seconds.items():
        for _ in range(2):
            times.note(int(name.removeprefix("rows")), value)
    return times


def test_times_between_measured_numbers_of_rows_are_interpolated() -> None:
    times = measured(rows1=1.0, rows5=2.0)
    assert times.seconds(3) == 1.5
    assert times.ratio(1, 4) == 2.0
    assert times.seconds(9) == 3.0


def test_noise_does_not_make_rows_look_free() -> None:
    times = measured(rows1=1.0, rows2=3.0, rows4=2.0)
    assert times.ratio(1, 3) == 3.0
    assert times.ratio(2, 2) == 1.5


def test_a_slow_step_counts_little() -> None:
    times = measured(rows1=1.0)
    times.note(1, 100.0)
    assert times.seconds(1) <= 1.2


def test_times_that_are_not_measured_again_are_forgotten() -> None:
    times = measured(rows1=1.0, rows4=40.0)
    assert times.ratio(1, 3) == 40.0
    for _ in range(MAX_AGE + 1):
        times.note(1, 1.0)
    assert times.ratio(1, 3) == pytest.approx((1 + 4 * FIRST_SLOPE) / (1 + FIRST_SLOPE))
