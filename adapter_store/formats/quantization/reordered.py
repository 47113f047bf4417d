"""Weights with groups of inputs that are not adjacent (act-order)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from loramux.adapter_store.formats.quantization.parts import Parts
from loramux.kernels.quantized import QuantizedWeight


@dataclass(frozen=True, slots=True, eq=False)
class ReorderedWeight:
    """A weight whose columns are stored by group: its column `inputs[i]` is column `i` of `by_group`."""

    by_group: QuantizedWeight
    inputs: npt.NDArray[np.int64]

    @property
    def shape(self) -> tuple[int, ...]:
        return self.by_group.shape

    def dequantize(self, begin: int = 0, end: int | None = None) -> npt.NDArray[np.float32]:
        values = self.by_group.dequantize(begin, end)
        ordered = np.empty_like(values)
        ordered[:, self.inputs] = values
        return ordered


def inputs_by_group(parts: Parts, suffix: str, in_features: int, num_groups: int) -> npt.NDArray[np.int64] | None:
    """Return the inputs sorted by group, or None if they are already sorted or the tensor is missing.

    The tensor named by `suffix`, int32 `[in]`, contains the group of each input. Raises BaseNotSupported if the groups
    differ in size.
    """
    if not parts.has(suffix):
        return None
    groups: npt.NDArray[Any] = parts.array(suffix, "I32", (in_features,))
    if groups.min() < 0 or groups.max() >= num_groups:
        raise parts.wrong(suffix, f"names a group outside [0, {num_groups})")
    if (np.bincount(groups, minlength=num_groups) != in_features // num_groups).any():
        raise parts.wrong(suffix, "divides the inputs into groups of different sizes")
    return None if (groups[1:] >= groups[:-1]).all() else np.argsort(groups, kind="stable")
