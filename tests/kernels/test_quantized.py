"""The formula of a quantised weight, computed one weight at a time."""

from __future__ import annotations

import numpy as np
import pytest

from loramux.kernels.quantized import INT4, INT8, UINT4, QuantizedWeight, concatenate

NUM_OUTPUTS, GROUP, NUM_GROUPS = 3, 6, 5


def random_weight(
    codebook: np.ndarray, has_zeros: bool = False, seed: int = 0, has_minima: bool = False
) -> QuantizedWeight:
    random = np.random.default_rng(seed)
    num_bytes = NUM_GROUPS * GROUP * (1 if codebook.size == 256 else 0.5)
    shape = (NUM_OUTPUTS, NUM_GROUPS)
    return QuantizedWeight(
        codes=random.integers(0, 256, (NUM_OUTPUTS, int(num_bytes)), dtype=np.uint8),
        codebook=codebook,
        scales=random.standard_normal(shape, dtype=np.float32),
        zeros=random.integers(0, 16, shape, dtype=np.int16) if has_zeros else None,
        minima=random.standard_normal(shape, dtype=np.float32) if has_minima else None,
    )


def one_weight(weight: QuantizedWeight, output: int, at: int) -> np.float32:
    if weight.bits == 8:
        code = int(weight.codes[output, at])
    else:
        pair = int(weight.codes[output, at // 2])
        code = pair >> 4 if at % 2 else pair & 15
    zero = 0 if weight.zeros is None else int(weight.zeros[output, at // GROUP])
    minimum = np.float32(0) if weight.minima is None else weight.minima[output, at // GROUP]
    return (weight.codebook[code] - np.float32(zero)) * weight.scales[output, at // GROUP] + minimum


@pytest.mark.parametrize(("has_zeros", "has_minima"), [(False, False), (True, False), (False, True)])
@pytest.mark.parametrize("codebook", [INT8, INT4, UINT4, np.linspace(-1, 1, 16, dtype=np.float32) ** 3])
def test_dequantize_follows_the_formula(codebook: np.ndarray, has_zeros: bool, has_minima: bool) -> None:
    weight = random_weight(codebook, has_zeros, has_minima=has_minima)
    wanted = [[one_weight(weight, o, i) for i in range(NUM_GROUPS * GROUP)] for o in range(NUM_OUTPUTS)]
    assert np.array_equal(weight.dequantize(), np.array(wanted))
    assert np.array_equal(weight.dequantize(1, 3), np.array(wanted)[1:3])


def test_codes_of_int8_are_its_bytes() -> None:
    values = np.arange(-128, 128, dtype=np.int8).reshape(1, 256)
    weight = QuantizedWeight(codes=values.view(np.uint8), codebook=INT8, scales=np.ones((1, 1), np.float32))
    assert np.array_equal(weight.dequantize(), values)


WITH_ZEROS = random_weight(UINT4, has_zeros=True)
WITH_MINIMA = random_weight(UINT4, has_minima=True, seed=1)


@pytest.mark.parametrize("shifted", [WITH_ZEROS, WITH_MINIMA], ids=["zeros", "minima"])
def test_concatenate_stacks_outputs(shifted: QuantizedWeight) -> None:
    parts = [shifted, random_weight(UINT4, seed=2)]
    whole = concatenate(parts)
    assert whole is not None
    assert np.array_equal(whole.dequantize(), np.concatenate([part.dequantize() for part in parts]))


def test_weights_that_differ_are_not_concatenated() -> None:
    assert concatenate([random_weight(UINT4), random_weight(INT4)]) is None
    assert concatenate([WITH_ZEROS, WITH_MINIMA]) is None


@pytest.mark.parametrize("weight", [WITH_ZEROS, WITH_MINIMA], ids=["zeros", "minima"])
def test_outputs_can_be_reordered(weight: QuantizedWeight) -> None:
    order = np.array([2, 0])
    assert np.array_equal(weight.outputs(order).dequantize(), weight.dequantize()[order])


def test_bytes_include_scales_and_minima() -> None:
    plain = random_weight(UINT4)
    assert plain.nbytes == plain.codes.nbytes + 4 * NUM_OUTPUTS * NUM_GROUPS
    assert WITH_ZEROS.nbytes == plain.nbytes + 2 * NUM_OUTPUTS * NUM_GROUPS
    assert WITH_MINIMA.nbytes == plain.nbytes + 4 * NUM_OUTPUTS * NUM_GROUPS


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


@pytest.mark.parametrize(
    ("zeros", "minima", "said"),
    [
        (None, (2, 1), "minima .* do not fit scales"),
        ((2, 1), None, "zero points .* do not fit scales"),
        ((3, 1), (3, 1), "not both"),
    ],
)
def test_shifts_that_disagree_are_refused(
    zeros: tuple[int, int] | None, minima: tuple[int, int] | None, said: str
) -> None:
    with pytest.raises(ValueError, match=said):
        QuantizedWeight(
            codes=np.zeros((3, 8), np.uint8),
            codebook=UINT4,
            scales=np.ones((3, 1), np.float32),
            zeros=None if zeros is None else np.zeros(zeros, np.int16),
            minima=None if minima is None else np.zeros(minima, np.float32),
        )
