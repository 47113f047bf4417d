"""Gains and shifts of modules: `y + gain * y + shift`, where `y` already includes the product of the adapter's A and B.

DoRA (https://arxiv.org/abs/2402.09353) rescales the weights of each output in `W + scale * B A` to the norm given by
`magnitude`. PEFT's `lora_bias` adds `scale * bias`.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from loramux.adapter_store.errors import AdapterRejected
from loramux.adapter_store.formats.base_weights import WeightRows
from loramux.adapter_store.formats.module_places import ModulePlace

_BLOCK_ELEMENTS = 1 << 22
"""Maximum number of the base's weights to read at a time. At least one row is read."""


def dora_affine(
    place: ModulePlace,
    A: npt.NDArray[np.float32],
    B: npt.NDArray[np.float32],
    scale: float,
    magnitude: npt.NDArray[np.float32],
    base: WeightRows,
) -> npt.NDArray[np.float32]:
    """Return the gain and shift of a DoRA module, float32 `[2, num_outputs]`.

    `A` is `[rank, in_features]`, `B` is `[num_outputs, rank]` and `magnitude` is `[num_outputs]`, for the module's
    outputs `place.module_outputs`. The shift restores the base's bias, which DoRA does
    not scale. Raises AdapterRejected if a gain is not finite, for example because an output's norm is 0.
    """
    norm = np.sqrt(
        _squares_of_columns(place, A, B, scale, base)
        if place.shape.is_embedding
        else _squares_of_rows(place, A, B, scale, base)
    )
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        gain = magnitude / norm - 1
    if not np.isfinite(gain).all():
        raise AdapterRejected("invalid_magnitude", "a magnitude scales weights that are all zero", place.magnitude_name)
    bias, outputs = base.bias(place.name), place.module_outputs
    shift = np.zeros_like(gain) if bias is None else -gain * bias[outputs.start : outputs.stop]
    return np.stack([gain, shift]).astype(np.float32)


def _squares_of_rows(
    place: ModulePlace, A: npt.NDArray[np.float32], B: npt.NDArray[np.float32], scale: float, base: WeightRows
) -> npt.NDArray[np.float64]:
    """Return the squared norms of the rows of `W + scale * B A`, one per output."""
    first, num_rows = place.module_outputs.start, len(B)
    block = max(1, _BLOCK_ELEMENTS // place.shape.in_features)
    squares = np.empty(num_rows)
    for begin in range(0, num_rows, block):
        end = min(begin + block, num_rows)
        weights = base.rows(place.name, first + begin, first + end)
        changed = weights + np.float32(scale) * (B[begin:end] @ A)
        squares[begin:end] = np.einsum("ij,ij->i", changed, changed)
    return squares


def _squares_of_columns(
    place: ModulePlace, A: npt.NDArray[np.float32], B: npt.NDArray[np.float32], scale: float, base: WeightRows
) -> npt.NDArray[np.float64]:
    """Return the squared norms of an embedding's columns, one per output. The base stores one row per token."""
    num_tokens, block = place.shape.in_features, max(1, _BLOCK_ELEMENTS // place.shape.out_features)
    squares = np.zeros(place.shape.out_features)
    for begin in range(0, num_tokens, block):
        end = min(begin + block, num_tokens)
        changed = base.rows(place.key, begin, end) + np.float32(scale) * (A[:, begin:end].T @ B.T)
        squares += np.einsum("ij,ij->j", changed, changed)
    return squares
