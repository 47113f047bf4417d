"""The parts of a quantised weight dequantise to the parts of its values, and keep its codes."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pytest

from loramux.adapter_store.formats.quantization.divided import divided
from loramux.adapter_store.formats.quantization.mxfp4 import Mxfp4Experts
from loramux.adapter_store.formats.quantization.parts import CodedWeight
from loramux.adapter_store.formats.quantization.reordered import ReorderedWeight
from loramux.kernels.quantized import INT4, INT8, UINT4, QuantizedWeight

OUTPUTS, INPUTS, GROUP = 12, 48, 8
ROWS = (range(2, 5), range(8, 11))
COLUMNS = (range(16, 32),)


def weight(codebook: npt.NDArray[np.float32], group: int = GROUP, shift: str | None = None) -> QuantizedWeight:
    dice = np.random.default_rng(3)
    shape = OUTPUTS, INPUTS // group
    return QuantizedWeight(
        codes=dice.integers(0, 256, (OUTPUTS, INPUTS if codebook.size == 256 else INPUTS // 2), dtype=np.uint8),
        codebook=codebook,
        scales=dice.standard_normal(shape).astype(np.float32),
        zeros=dice.integers(0, 16, shape).astype(np.int16) if shift == "zeros" else None,
        minima=dice.standard_normal(shape).astype(np.float32) if shift == "minima" else None,
    )


class OnlyValues:
    """A weight that can only be dequantised, as an extension may read one."""

    def __init__(self, values: npt.NDArray[np.float32]) -> None:
        self._values = values
        self.shape = values.shape
        self.read: list[int] = []

    def dequantize(self, begin: int = 0, end: int | None = None) -> npt.NDArray[np.float32]:
        self.read.append(len(self._values[begin:end]))
        return self._values[begin:end]


def values_of(whole: npt.NDArray[np.float32], axis: int, ranges: tuple[range, ...]) -> npt.NDArray[np.float32]:
    return whole.take([index for one in ranges for index in one], axis)


@pytest.mark.parametrize(
    "whole",
    [
        weight(INT8),
        weight(INT4),
        weight(UINT4, shift="zeros"),
        weight(UINT4, shift="minima"),
        weight(INT8, group=INPUTS),
        weight(INT4, group=INPUTS),
    ],
    ids=["int8", "int4", "zeros", "minima", "a group for all inputs", "int4 with a group for all inputs"],
)
@pytest.mark.parametrize(("axis", "ranges"), [(0, ROWS), (1, COLUMNS)], ids=["outputs", "inputs"])
def test_a_part_has_the_values_of_the_whole(whole: QuantizedWeight, axis: int, ranges: tuple[range, ...]) -> None:
    part = divided(whole, axis, ranges)
    assert isinstance(part, QuantizedWeight)
    np.testing.assert_array_equal(part.dequantize(), values_of(whole.dequantize(), axis, ranges))
    assert part.codes.flags.c_contiguous
    assert part.scales.flags.c_contiguous


@pytest.mark.parametrize(("axis", "ranges"), [(2, ROWS), (1, COLUMNS)], ids=["outputs", "inputs"])
def test_stacked_experts_are_divided_alike(axis: int, ranges: tuple[range, ...]) -> None:
    whole = Mxfp4Experts((weight(INT4), weight(INT4, shift="minima")))
    part = divided(whole, axis, ranges)
    assert isinstance(part, Mxfp4Experts)
    np.testing.assert_array_equal(part.dequantize(), values_of(whole.dequantize(), axis, ranges))


def test_outputs_of_a_reordered_weight_keep_its_order() -> None:
    order = np.random.default_rng(1).permutation(INPUTS)
    whole = ReorderedWeight(weight(INT4), order)
    part = divided(whole, 0, ROWS)
    np.testing.assert_array_equal(part.dequantize(), values_of(whole.dequantize(), 0, ROWS))
    with pytest.raises(ValueError, match=r"the inputs of a group are not adjacent \(act-order\)"):
        divided(whole, 1, COLUMNS)


@pytest.mark.parametrize("axis", [0, 1, 2])
def test_other_weights_are_divided_when_they_are_dequantised(axis: int) -> None:
    values = np.random.default_rng(2).standard_normal((4, 5, 6)).astype(np.float32)
    whole: CodedWeight = OnlyValues(values)
    ranges = (range(1), range(2, 4))
    part = divided(whole, axis, ranges)
    expected = values_of(values, axis, ranges)
    assert part.shape == expected.shape
    np.testing.assert_array_equal(part.dequantize(), expected)
    np.testing.assert_array_equal(part.dequantize(1, 3), expected[1:3])


def test_a_block_dequantises_only_its_own_rows() -> None:
    values = np.random.default_rng(2).standard_normal((100, 3)).astype(np.float32)
    whole = OnlyValues(values)
    part = divided(whole, 0, (range(50, 90),))
    np.testing.assert_array_equal(part.dequantize(10, 14), values[60:64])
    assert part.dequantize(40, 50).shape == (0, 3)
    assert whole.read == [4, 0]


@pytest.mark.parametrize(
    ("whole", "inputs", "said"),
    [
        (weight(INT8), range(12), "inputs 0 to 12 are not whole groups of 8"),
        (weight(INT8), range(4, 16), "inputs 4 to 16 are not whole groups of 8"),
        (weight(INT4, group=INPUTS), range(3), "inputs 0 to 3 are not whole groups of 2"),
    ],
)
def test_a_group_is_not_divided(whole: QuantizedWeight, inputs: range, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        divided(whole, 1, (inputs,))
