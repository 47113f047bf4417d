"""Gains and shifts of modules: `y + gain * y + shift`, where `y` already includes the product of the adapter's A and B.

DoRA (https://arxiv.org/abs/2402.09353) rescales the weights of each output in `W + scale * B A` to the norm given by
`magnitude`. PEFT's `lora_bias` adds `scale * bias`. A module's own trained bias replaces the base's. Trained weights of
a norm replace the base's: its output `n * w + b` becomes `n * w' + b'`.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from loramux.adapter_store.errors import AdapterRejected
from loramux.adapter_store.formats.packed.module_places import ModulePlace, NormPlace
from loramux.adapter_store.formats.quantization.base_weights import BaseVectors, WeightRows

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


def norm_affine(
    place: NormPlace,
    weight: npt.NDArray[np.float32] | None,
    bias: npt.NDArray[np.float32] | None,
    base: BaseVectors,
) -> npt.NDArray[np.float32]:
    """Return the gain and shift that replace a norm's weight and bias, float32 `[2, size * repeats]`.

    `weight` and `bias`, `[size]`, are None if they are the base's. Raises AdapterRejected if the base lacks the norm,
    or if a weight of 0 would have to become another.
    """
    norm = place.norm
    base_weight, base_bias = base.vector(f"{place.key}.weight"), base.vector(f"{place.key}.bias")
    if base_weight is None or base_weight.shape != (norm.size,) or (bias is not None and base_bias is None):
        raise AdapterRejected("base_mismatch", "the adapter was made for another base model", place.key)
    scales = np.ones(norm.size)
    if weight is not None:
        old, new = np.float64(base_weight) + norm.offset, np.float64(weight) + norm.offset
        is_zero = (old == 0) & (new == 0)
        with np.errstate(divide="ignore", invalid="ignore"):
            scales = np.where(is_zero, 1, new / old)
    if not np.isfinite(scales).all():
        raise AdapterRejected(
            "base_mismatch",
            "the base's norm turns off a channel that the adapter's norm uses, which cannot be served",
            place.weight_name,
        )
    old_bias = np.zeros(norm.size) if base_bias is None else base_bias
    shift = (old_bias if bias is None else bias) - scales * old_bias
    return np.tile(np.stack([scales - 1, shift]), norm.repeats).astype(np.float32)


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
