"""Encodes float weights as int8, int4 or FP8."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from loramux.adapter_store.formats.files.mapped_tensors import STORED
from loramux.engine.protocol.errors import ModelNotSupported

GROUPS = (32, 16)
"""Possible numbers of inputs that share an int4 scale and minimum. The first number that divides the number of inputs
of every linear layer is used.
"""

_LARGEST_E4M3 = 448.0

Floats = npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class EncodedRows:
    """The stored items of rows, and their scales and minima `[num_rows, num_groups]`."""

    items: npt.NDArray[Any]
    scales: Floats
    minima: Floats | None = None


Encode = Callable[[Floats, int], EncodedRows]


@dataclass(frozen=True, slots=True)
class Method:
    """Stores codes in a tensor of safetensors dtype `dtype` whose name ends in `suffix`. Each item contains
    `codes_per_item` codes.

    `encode` takes rows `[num_rows, in_features]` and the number of inputs in a group. `weights` describes the codes in
    the format of compressed-tensors. Scales, and minima if the weights have them, are stored in `scale_dtype`.
    """

    suffix: str
    dtype: str
    codes_per_item: int
    encode: Encode
    weights: Mapping[str, Any]
    groups: tuple[int, ...] = ()
    scale_dtype: str = "F32"
    has_minima: bool = False

    def nbytes(self, out_features: int, in_features: int, group: int | None) -> int:
        """Size in bytes of a weight's codes, scales and minima."""
        codes = out_features * in_features // self.codes_per_item * STORED[self.dtype].itemsize
        num_values = out_features * (in_features // (group or in_features)) * (2 if self.has_minima else 1)
        return codes + num_values * STORED[self.scale_dtype].itemsize

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


def _int8(rows: Floats, group: int) -> EncodedRows:
    scales = _nonzero(np.abs(rows).max(axis=1, keepdims=True) / np.float32(127))
    return EncodedRows(np.rint(rows / scales).astype(np.int8), scales)


def _int4(rows: Floats, group: int) -> EncodedRows:
    # Imported here because the other methods do not need numba.
    from loramux.engine.quantizing.grids import encode_groups

    codes, scales, minima = encode_groups(rows.reshape(-1, group))
    codes = codes.reshape(rows.shape)
    items = (codes[:, ::2] | codes[:, 1::2] << np.uint8(4)).view("<i4")
    return EncodedRows(items, scales.reshape(len(rows), -1), minima.reshape(len(rows), -1))


def _fp8(rows: Floats, group: int) -> EncodedRows:
    # Imported here because the other methods do not need torch, whose import takes seconds.
    import torch

    scales = _nonzero(np.abs(rows).max(axis=1, keepdims=True) / np.float32(_LARGEST_E4M3))
    return EncodedRows(torch.from_numpy(rows / scales).to(torch.float8_e4m3fn).view(torch.uint8).numpy(), scales)


def _nonzero(scales: Floats) -> Floats:
    """Replace scales of 0, from groups whose weights are all 0, with 1."""
    return np.where(scales == 0, np.float32(1), scales)


def _weights(bits: int, kind: str, strategy: str, is_symmetric: bool = True) -> dict[str, Any]:
    return {"num_bits": bits, "type": kind, "strategy": strategy, "symmetric": is_symmetric}


METHODS: dict[str, Method] = {
    "int8": Method(".weight", "I8", 1, _int8, _weights(8, "int", "channel")),
    "int4": Method(
        ".weight_packed",
        "I32",
        8,
        _int4,
        _weights(4, "int", "group", is_symmetric=False),
        GROUPS,
        "F16",
        has_minima=True,
    ),
    "fp8": Method(".weight", "F8_E4M3", 1, _fp8, _weights(8, "float", "channel")),
}
"""The methods by which `--quantization` can quantise linear layers. See `quantized_names`."""

WITH_HEAD = "+head"
"""Suffix of the values of `--quantization` that also quantise the head, always to int8."""

HEAD_METHOD = METHODS["int8"]

INT4 = METHODS["int4"]

SENSITIVE_METHOD = METHODS["int8"]
"""Encodes the weights of an int4 model that would lose most with 4 bits. See `sensitivity.py`."""

CHOICES = (*METHODS, *(method + WITH_HEAD for method in METHODS))
"""The values of `--quantization`."""
