"""Whether something that is sampled over a long run grows, or is flat with noise."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

WARM_SHARE = 1 / 8
"""Part of a run in which caches and pools fill. Its samples do not count."""

NUM_BLOCKS = 16

QUANTILE = 6.2
"""The quantile of Student's t distribution with NUM_BLOCKS - 2 degrees of freedom that a flat series exceeds once in
about 100,000 runs.
"""

RESOLUTION = 0.02
"""Growth that does not count, as a part of the series' median."""


def growth(samples: Sequence[float], resolution: float = RESOLUTION) -> tuple[float, float]:
    """How much a series has grown after its warm-up, and how much it could have grown by chance.

    The samples after the warm-up are divided into NUM_BLOCKS blocks. A line is fitted to the blocks' medians with least
    squares, and the growth is its rise from the first block to the last. Medians of long blocks are almost independent,
    so the rise has a standard error of `(NUM_BLOCKS - 1) * s / sqrt(sum((i - mean(i))**2))`, where `s**2` is the
    variance of the residuals. The bound is QUANTILE standard errors, but at least `resolution` of the median and at
    least 1. Raises ValueError with fewer than two samples in a block.
    """
    medians = np.array(block_medians(samples))
    centred = np.arange(NUM_BLOCKS) - (NUM_BLOCKS - 1) / 2
    slope = float(centred @ medians / (centred @ centred))
    residuals = medians - medians.mean() - slope * centred
    variance = float(residuals @ residuals) / (NUM_BLOCKS - 2)
    error = (NUM_BLOCKS - 1) * (variance / float(centred @ centred)) ** 0.5
    return (NUM_BLOCKS - 1) * slope, max(QUANTILE * error, resolution * float(np.median(medians)), 1.0)


def block_medians(samples: Sequence[float]) -> list[float]:
    counted = samples[int(len(samples) * WARM_SHARE) :]
    if len(counted) < 2 * NUM_BLOCKS:
        raise ValueError(f"{len(samples)} samples are too few")
    return [float(np.median(block)) for block in np.array_split(np.asarray(counted, float), NUM_BLOCKS)]


def grows(samples: Sequence[float], resolution: float = RESOLUTION) -> bool:
    rise, bound = growth(samples, resolution)
    return rise > bound
