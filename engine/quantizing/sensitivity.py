"""Chooses the weights of an int4 model that get 8 bits, because 4 bits would change them most."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from loramux.adapter_store.formats.files.mapped_tensors import MappedTensor
from loramux.engine.quantizing.methods import INT4, SENSITIVE_METHOD, Floats

EXTRA_BYTES = 0.1
"""Most bytes that the weights in 8 bits may add, relative to the size of all weights in 4 bits.

A weight then takes at most 5.5 bits on average, instead of 5.
"""

_SAMPLED_ROWS = 64
"""Maximum number of rows of a weight, evenly spaced, whose error is measured."""


@np.errstate(invalid="ignore", over="ignore")
def sensitive_weights(groups: Sequence[Sequence[str]], tensors: Mapping[str, MappedTensor], group: int) -> set[str]:
    """The weights to encode with `SENSITIVE_METHOD`.

    Weights in one of `groups` share a product, so all or none of them are chosen. `group` is the number of inputs that
    share a scale in 4 bits. The groups of weights with the largest gain per added byte come first. The gain is the
    reduction of the squared error, relative to the squares of the weights.
    """
    gains: list[tuple[float, int, Sequence[str]]] = []
    size = 0
    for names in groups:
        gain, squares, added = 0.0, 0.0, 0
        for name in names:
            shape, rows = tensors[name].shape, _sample(tensors[name])
            gain += _squares(_in_4_bits(rows, group) - rows) - _squares(_in_8_bits(rows) - rows)
            squares += _squares(rows)
            num_bytes = INT4.nbytes(shape[0], shape[1], group)
            size += num_bytes
            added += SENSITIVE_METHOD.nbytes(shape[0], shape[1], None) - num_bytes
        # NaN and infinity are refused when the weights are encoded.
        if gain > 0 and np.isfinite(gain):
            gains.append((gain / squares / added, added, names))
    chosen: set[str] = set()
    left = EXTRA_BYTES * size
    for _, added, names in sorted(gains, reverse=True):
        if added <= left:
            left -= added
            chosen.update(names)
    return chosen


def _sample(tensor: MappedTensor) -> Floats:
    out_features = tensor.shape[0]
    count = min(out_features, _SAMPLED_ROWS)
    rows = [sample * out_features // count for sample in range(count)]
    return np.concatenate([tensor.float_rows(row, row + 1) for row in rows])


def _in_4_bits(rows: Floats, group: int) -> Floats:
    # Imported here because the other methods do not need numba.
    from loramux.engine.quantizing.grids import encode_groups

    codes, scales, minima = encode_groups(rows.reshape(-1, group))
    return (codes * scales[:, None] + minima[:, None]).reshape(rows.shape)


def _in_8_bits(rows: Floats) -> Floats:
    encoded = SENSITIVE_METHOD.encode(rows, rows.shape[1])
    values: Floats = encoded.items * encoded.scales
    return values


def _squares(values: Floats) -> float:
    return float(np.square(values, dtype=np.float64).sum())
