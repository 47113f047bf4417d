"""Rounds float weights to the nearest codes of int8, int4 or FP8."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from loramux.engine.protocol.errors import ModelNotSupported

GROUPS = (64, 32, 16)
"""Possible numbers of inputs that share an int4 scale. The first number that divides the number of inputs of every
linear layer is used.
"""

_LARGEST_E4M3 = 448.0

Floats = npt.NDArray[np.float32]
Encode = Callable[[Floats, int], tuple[npt.NDArray[Any], Floats]]


@dataclass(frozen=True, slots=True)
class Method:
    """Stores codes in a tensor of safetensors dtype `dtype` whose name ends in `suffix`. Each item contains
    `codes_per_item` codes.

    `encode` takes rows `[num_rows, in_features]` and the number of inputs in a group, and returns the items and the
    scales `[num_rows, num_groups]`. `weights` describes the codes in the format of compressed-tensors.
    """

    suffix: str
    dtype: str
    codes_per_item: int
    encode: Encode
    weights: Mapping[str, Any]
    groups: tuple[int, ...] = ()

    def group(self, in_features: set[int]) -> int | None:
        """Number of inputs that share a scale, or None for all. Raises ModelNotSupported if no group fits."""
        if not self.groups:
            return None
        for group in self.groups:
            if not any(size % group for size in in_features):
                return group
        uneven = next(size for size in sorted(in_features) if size % self.groups[-1])
        raise ModelNotSupported(
            f"a linear layer has {uneven} inputs, which is not a multiple of {self.groups[-1]}: use --quantization int8"
        )


def _int8(rows: Floats, group: int) -> tuple[npt.NDArray[np.int8], Floats]:
    scales = _nonzero(np.abs(rows).max(axis=1, keepdims=True) / np.float32(127))
    return np.rint(rows / scales).astype(np.int8), scales


def _int4(rows: Floats, group: int) -> tuple[npt.NDArray[np.int32], Floats]:
    grouped = rows.reshape(len(rows), -1, group)
    # The weight with the largest magnitude becomes -8, because there is no code 8. The scale has the opposite sign of
    # this weight.
    at = np.abs(grouped).argmax(axis=2, keepdims=True)
    scales = _nonzero(np.take_along_axis(grouped, at, axis=2) / np.float32(-8))
    codes = np.clip(np.rint(grouped / scales) + 8, 0, 15).astype(np.uint8).reshape(rows.shape)
    return (codes[:, ::2] | codes[:, 1::2] << np.uint8(4)).view("<i4"), scales[..., 0]


def _fp8(rows: Floats, group: int) -> tuple[npt.NDArray[np.uint8], Floats]:
    # Imported here because the other methods do not need torch, whose import takes seconds.
    import torch

    scales = _nonzero(np.abs(rows).max(axis=1, keepdims=True) / np.float32(_LARGEST_E4M3))
    return torch.from_numpy(rows / scales).to(torch.float8_e4m3fn).view(torch.uint8).numpy(), scales


def _nonzero(scales: Floats) -> Floats:
    """Replace scales of 0, from groups whose weights are all 0, with 1."""
    return np.where(scales == 0, np.float32(1), scales)


def _weights(bits: int, kind: str, strategy: str) -> dict[str, Any]:
    return {"num_bits": bits, "type": kind, "strategy": strategy, "symmetric": True}


METHODS: dict[str, Method] = {
    "int8": Method(".weight", "I8", 1, _int8, _weights(8, "int", "channel")),
    "int4": Method(".weight_packed", "I32", 8, _int4, _weights(4, "int", "group"), GROUPS),
    "fp8": Method(".weight", "F8_E4M3", 1, _fp8, _weights(8, "float", "channel")),
}
"""The methods by which `--quantization` can quantise linear layers. See `quantized_names`."""

WITH_HEAD = "+head"
"""Suffix of the values of `--quantization` that also quantise the head, always to int8."""

HEAD_METHOD = METHODS["int8"]

CHOICES = (*METHODS, *(method + WITH_HEAD for method in METHODS))
"""The values of `--quantization`."""
