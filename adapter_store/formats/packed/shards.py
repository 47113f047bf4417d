"""Divides each module's weights among the GPUs of a tensor-parallel engine. So far, each engine uses one GPU."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import accumulate

from loramux.kernels.layout import LinearShape

_SPLIT_BY_INPUT = ("o_proj", "down_proj")
_SPLIT_BY_OUTPUT = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj", "lm_head")
_OF_HEADS = ("q_proj", "k_proj", "v_proj", "qkv_proj", "o_proj")


@dataclass(frozen=True, slots=True)
class Shard:
    """One rank's share of a module's inputs and outputs, as half-open ranges of the whole module's indices.

    With `y = scale B (A x)`: if the inputs are split, each rank computes a partial sum with its part of A, and the
    outputs are added. If the outputs are split, each rank has all of A and its own rows of B, and the outputs are
    concatenated.
    """

    inputs: tuple[range, ...]
    outputs: tuple[range, ...]

    def shape(self, whole: LinearShape) -> LinearShape:
        num_inputs, num_outputs = (sum(map(len, ranges)) for ranges in (self.inputs, self.outputs))
        return replace(whole, in_features=num_inputs, out_features=num_outputs)


def shard_of(module: LinearShape, head_dim: int, kv_features: int, tp_size: int, tp_rank: int) -> Shard:
    """Return rank `tp_rank`'s part of a module.

    `kv_features` is the number of K features in a layer of the whole model. As usual, attention is split by heads, the
    feed-forward block by its inner features, and vocabularies by tokens. Raises ValueError if the module cannot be
    split into equal parts.
    """
    inputs, outputs = (range(module.in_features),), (range(module.out_features),)
    if tp_size == 1:
        return Shard(inputs, outputs)
    name = module.name.rsplit(".", 1)[-1]
    half = module.out_features // 2
    is_split_by_input = name in _SPLIT_BY_INPUT or module.is_embedding
    parts: tuple[int, ...]
    if is_split_by_input:
        parts = (module.in_features,)
    elif name in _SPLIT_BY_OUTPUT:
        parts = (module.out_features,)
    elif name == "qkv_proj":
        parts = (module.out_features - 2 * kv_features, kv_features, kv_features)
    elif name == "gate_up_proj":
        parts = (half, module.out_features - half)
    else:
        raise ValueError(f"no tensor-parallel split is defined for {module.name}")
    unit = head_dim if name in _OF_HEADS else 1
    if any(part <= 0 or part % (unit * tp_size) for part in parts):
        raise ValueError(f"{module.name} cannot be split into {tp_size} equal parts")
    ranges = _shares(parts, tp_size, tp_rank)
    return Shard(ranges, outputs) if is_split_by_input else Shard(inputs, ranges)


def _shares(parts: tuple[int, ...], tp_size: int, tp_rank: int) -> tuple[range, ...]:
    """Return this rank's share of each of the consecutive `parts`."""
    ends = accumulate(parts)
    shares = ((end - size + tp_rank * size // tp_size, size // tp_size) for size, end in zip(parts, ends, strict=True))
    return tuple(range(begin, begin + size) for begin, size in shares)
