"""Converts per-tensor, per-output, per-group and per-block scales to scales of groups."""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

from loramux.adapter_store.formats.quantization.parts import Parts


def grouped_scales(
    parts: Parts, suffix: str, shape: tuple[int, int], block: tuple[int, int] | None
) -> npt.NDArray[np.float32]:
    """Return the scales of a weight `[out, in]`, repeated to `[out, groups]`.

    With `block`, each scale belongs to a rectangle of outputs and inputs. Rectangles at the edges may be smaller.
    """
    scales = parts.scales(suffix)
    out_features, in_features = shape
    if scales.size == 1:
        return np.full((out_features, 1), scales.reshape(()))
    if block is not None:
        wanted = (-(-out_features // block[0]), -(-in_features // block[1]))
        if scales.shape != wanted:
            raise parts.wrong(suffix, f"has shape {list(scales.shape)}; blocks of {list(block)} need {list(wanted)}")
        # Groups must have equal sizes. If a row ends with a partial block, groups are therefore smaller than a block.
        group = math.gcd(block[1], in_features)
        inputs = np.arange(0, in_features, group) // block[1]
        return np.ascontiguousarray(scales.repeat(block[0], axis=0)[:out_features, inputs])
    if scales.size == out_features:
        return scales.reshape(out_features, 1)
    if scales.ndim != 2 or scales.shape[0] != out_features or in_features % scales.shape[1]:
        raise parts.wrong(suffix, f"has shape {list(scales.shape)}, which does not fit a weight of shape {list(shape)}")
    return scales


def check_group(parts: Parts, suffix: str, num_groups: int, in_features: int, group: int | None) -> None:
    """Raise BaseNotSupported unless the inputs form `num_groups` groups of `group` inputs.

    If `group` is None, all inputs must form one group.
    """
    wanted = 1 if group is None else in_features / group
    if num_groups != wanted:
        size = "all" if group is None else group
        raise parts.wrong(suffix, f"has {num_groups} groups, but groups of {size} of {in_features} inputs are expected")
