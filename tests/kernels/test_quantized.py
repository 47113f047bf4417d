"""The formula of a quantised weight, computed one weight at a time."""

from __future__ import annotations

import numpy as np
import pytest

from loramux.kernels.quantized import INT4, INT8, UINT4, QuantizedWeight, concatenate

NUM_OUTPUTS, GROUP, NUM_GROUPS = 3, 6, 5


def random_weight(codebook: np.ndarray, has_zeros: bool = False, seed: int = 0) -> QuantizedWeight:
    random = np.random.default_rng(seed)
    num_bytes = NUM_GROUPS * GROUP * (1 if codebook.size == 256 else 0.5)
    shape = (NUM_OUTPUTS, NUM_GROUPS)
    return QuantizedWeight(
        codes=random.integers(0, 256, (NUM_OUTPUTS, int(num_bytes)), dtype=np.uint8),
        codebook=codebook,
        scales=random.standard_normal(shape, dtype=np.float32),
        zeros=random.integers(0, 16, shape, dtype=np.int16) if has_zeros else None,
    )


def one_weight(weight: QuantizedWeight, output: int, at: int) -> np.float32:
    if weight.bits == 8:
        code = int(weight.codes[output, at])
    else:
        pair = int(weight.codes[output, at // 2])
        code = pair >> 4 if at % 2 else pair & 15
    zero = 0 if weight.zeros is None else int(weight.zeros[output, at // GROUP])
    return (weight.codebook[code] - np.float32(zero)) * weight.scales[output, at // GROUP]


@pytest.mark.parametrize("has_zeros", [False, True])
@pytest.mark.parametrize("codebook", [INT8, INT4, UINT4, np.linspace(-1, 1, 16, dtype=np.float32) ** 3])
def test_dequantize_follows_the_formula(codebook: np.ndarray, has_zeros: bool) -> None:
    weight = random_weight(codebook, has_zeros)
    wanted = [[one_weight(weight, o, i) for i in range(NUM_GROUPS * GROUP)] for o in range(NUM_OUTPUTS)]
    assert np.array_equal(weight.dequantize(), np.array(wanted))
    assert np.array_equal(weight.dequantize(1, 3), np.array(wanted)[1:3])


def test_codes_of_int8_are_its_bytes() -> None:
    values = np.arange(-128, 128, dtype=np.int8).reshape(1, 256)
    weight = QuantizedWeight(codes=values.view(np.uint8), codebook=INT8, scales=np.ones((1, 1), np.float32))
    assert np.array_equal(weight.dequantize(), values)


def test_concatenate_stacks_outputs() -> None:
    parts = [random_weight(UINT4, has_zeros, seed) for seed, has_zeros in enumerate((True, False))]
    whole = concatenate(parts)
    assert whole is not None
    assert np.array_equal(whole.dequantize(), np.concatenate([part.dequantize() for part in parts]))
    assert concatenate([random_weight(UINT4), random_weight(INT4)]) is None


@pytest.mark.parametrize(
    ("codes", "scales", "said"),
    [
        ((3, 8), (3, 3), "3 groups do not divide 16 inputs"),
        ((3, 8), (2, 2), "do not fit codes"),
        ((3, 8), (3, 0), "0 groups"),
        ((3, 3), (3, 2), "split a pair"),
    ],
)
def test_shapes_that_disagree_are_refused(codes: tuple[int, int], scales: tuple[int, int], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        QuantizedWeight(codes=np.zeros(codes, np.uint8), codebook=INT4, scales=np.ones(scales, np.float32))
