"""The grids that `encode_groups` finds, compared with grids that reach from the smallest to the largest weight."""

from __future__ import annotations

import numpy as np
import pytest

from loramux.engine.quantizing.grids import Floats, encode_groups

RANDOM = np.random.default_rng(7)


def decoded(weights: Floats) -> Floats:
    codes, scales, minima = encode_groups(weights)
    assert codes.max() <= 15
    return codes * scales[:, None] + minima[:, None]


def nearest(weights: Floats) -> Floats:
    """Weights rounded to 16 values from the group's smallest to its largest."""
    low = weights.min(1, keepdims=True)
    scale = ((weights.max(1, keepdims=True) - low) / 15).astype(np.float16).astype(np.float32)
    low = low.astype(np.float16).astype(np.float32)
    return np.clip(np.rint((weights - low) / scale), 0, 15) * scale + low


def weighted_errors(found: Floats, weights: Floats) -> Floats:
    importance = np.abs(weights) + np.sqrt(np.square(weights).mean(1, keepdims=True))
    return (importance * np.square(found - weights)).sum(1)


@pytest.mark.parametrize("group", [16, 32])
def test_no_group_is_worse_than_its_nearest_values_and_most_are_better(group: int) -> None:
    weights = (RANDOM.standard_normal((4000, group)) * 0.02).astype(np.float32)
    found, plain = (weighted_errors(one(weights), weights) for one in (decoded, nearest))
    assert (found <= plain * (1 + 1e-3)).all()
    assert found.sum() < 0.9 * plain.sum()


def test_weights_on_a_grid_are_exact() -> None:
    codes = RANDOM.integers(0, 16, (300, 32))
    codes[:, 0], codes[:, 1] = 0, 15
    scales = (RANDOM.random((300, 1)) * 0.01 + 1e-3).astype(np.float16).astype(np.float32)
    minima = (scales * -7).astype(np.float16).astype(np.float32)
    weights = codes.astype(np.float32) * scales + minima
    assert np.array_equal(decoded(weights), weights)


def test_scales_and_minima_are_float16_numbers_and_no_scale_is_0() -> None:
    weights = (RANDOM.standard_normal((3000, 32)) * 10.0 ** RANDOM.uniform(-9, 4, (3000, 1))).astype(np.float32)
    _, scales, minima = encode_groups(weights)
    assert scales.all()
    for values in (scales, minima):
        assert np.array_equal(values.astype(np.float16).astype(np.float32), values)


@pytest.mark.parametrize("value", [0.0, 0.25, -3.0])
def test_a_group_of_equal_weights_is_its_minimum(value: float) -> None:
    weights = np.full((2, 32), value, np.float32)
    assert np.array_equal(decoded(weights), weights)


def test_one_large_weight_among_zeros_is_kept() -> None:
    weights = np.zeros((1, 32), np.float32)
    weights[0, 9] = -0.5
    # The scale is rounded to float16.
    assert np.abs(decoded(weights) - weights).max() < 0.5 / 2048


def test_weights_too_large_for_float16_give_scales_too_large_for_it() -> None:
    weights = np.linspace(-1e30, 1e30, 32, dtype=np.float32)[None]
    _, scales, _ = encode_groups(weights)
    assert scales[0] > 65504
