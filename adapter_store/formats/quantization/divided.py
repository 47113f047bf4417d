"""Divides quantised weights, for workers that share a model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from loramux.adapter_store.formats.quantization.mxfp4 import Mxfp4Experts
from loramux.adapter_store.formats.quantization.parts import CodedWeight
from loramux.adapter_store.formats.quantization.reordered import ReorderedWeight
from loramux.kernels.quantized import QuantizedWeight


@dataclass(frozen=True, slots=True, eq=False)
class _Part:
    """Some indices along `axis` of a weight, for a weight that can only be dequantised."""

    whole: CodedWeight
    axis: int
    indices: npt.NDArray[np.intp]

    @property
    def shape(self) -> tuple[int, ...]:
        shape = self.whole.shape
        return (*shape[: self.axis], len(self.indices), *shape[self.axis + 1 :])

    def dequantize(self, begin: int = 0, end: int | None = None) -> npt.NDArray[np.float32]:
        if self.axis == 0:
            indices = self.indices[begin:end]
            if not len(indices):
                return self.whole.dequantize(0, 0)
            first = int(indices.min())
            return self.whole.dequantize(first, int(indices.max()) + 1)[indices - first]
        return self.whole.dequantize(begin, end).take(self.indices, self.axis)


def divided(weight: CodedWeight, axis: int, ranges: Sequence[range]) -> CodedWeight:
    """The indices in `ranges` along `axis` of a weight, which stays quantised.

    A matrix is `[out, in]`, and the weights of several experts are `[num_experts, in, out]`. Raises ValueError if
    inputs are not whole groups (see `QuantizedWeight.inputs`), or if a group's inputs are not adjacent.
    """
    if isinstance(weight, Mxfp4Experts):
        return Mxfp4Experts(tuple(_matrix(expert, 2 - axis, ranges) for expert in weight.experts))
    if isinstance(weight, QuantizedWeight):
        return _matrix(weight, axis, ranges)
    if isinstance(weight, ReorderedWeight):
        if axis == 1:
            raise ValueError("the inputs of a group are not adjacent (act-order)")
        return ReorderedWeight(_matrix(weight.by_group, axis, ranges), weight.inputs)
    return _Part(weight, axis, _indices(ranges))


def _matrix(weight: QuantizedWeight, axis: int, ranges: Sequence[range]) -> QuantizedWeight:
    if axis == 0:
        return weight.outputs(_indices(ranges))
    (inputs,) = ranges
    return weight.inputs(inputs.start, inputs.stop)


def _indices(ranges: Sequence[range]) -> npt.NDArray[np.intp]:
    return np.concatenate([np.arange(one.start, one.stop) for one in ranges])
