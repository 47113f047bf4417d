from __future__ import annotations

import numpy as np
import pytest

from tests.reliability.growth import grows, growth

DICE = np.random.default_rng(4)


def test_line_is_found_and_noise_is_not() -> None:
    rise, bound = growth([100.0 + number for number in range(1600)])
    # The line rises by one per sample between the middles of the first block and of the last.
    assert rise == pytest.approx(1400 * 15 / 16, rel=0.01)
    assert bound < 0.03 * 1000
    noise = DICE.normal(0, 50, (200, 800)) + 1000
    assert not any(grows(series) for series in noise.tolist())
    leak = noise + np.linspace(0, 150, 800)
    assert sum(grows(series) for series in leak.tolist()) > 190


def test_warm_up_and_steps_down_do_not_count() -> None:
    assert not grows([*range(100), *[100.0] * 700])
    assert not grows([100.0] * 400 + [50.0] * 400)


def test_growth_below_the_resolution_does_not_count() -> None:
    crawling = list(np.linspace(1000, 1015, 800))
    assert not grows(crawling)
    assert grows(crawling, resolution=0.01)
    # Less than one file or row is noise, however flat the rest is.
    assert not grows([5.0] * 700 + [6.0] * 100)


def test_bursts_do_not_count() -> None:
    assert not grows([1000.0 + 5000 * (number % 10 == 9) for number in range(800)])


def test_too_few_samples_are_refused() -> None:
    with pytest.raises(ValueError, match="too few"):
        growth([1.0] * 30)
