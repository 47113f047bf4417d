"""Which part of a module's weights one of several GPUs holds, when they share a model's linears."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import accumulate

from loramux.kernels.layout import LinearShape

_SPLIT_BY_INPUT = ("o_proj", "down_proj")
_SPLIT_BY_OUTPUT = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj", "lm_head")
_OF_HEADS = ("q_proj", "k_proj", "v_proj", "qkv_proj", "o_proj")


@dataclass(frozen=True, slots=True)
class Shard:
    """The inputs and outputs of a module that are one rank's, as half-open ranges in the order of its own tensors.

    With `y = scale B (A x)`: where the inputs are split, each rank's part of A gives a part of every sum, and what the
    ranks compute is added up; where the outputs are, each has whole A and its own rows of B, and what they compute is
    laid side by side.
    """

    inputs: tuple[range, ...]
    outputs: tuple[range, ...]

    def shape(self, whole: LinearShape) -> LinearShape:
        num_inputs, num_outputs = (sum(map(len, ranges)) for ranges in (self.inputs, self.outputs))
        return replace(whole, in_features=num_inputs, out_features=num_outputs)


def shard_of(module: LinearShape, head_dim: int, kv_features: int, tp_size: int, tp_rank: int) -> Shard:
    """Rank `tp_rank`'s part of a module; `kv_features` are K's outputs of the whole model.

    Attention is split by heads, the feed-forward block by its inner features, and vocabularies by tokens, as is usual.
    Raises ValueError where that cannot be done in equal parts.
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
        raise ValueError(f"it is not known how {module.name} is split between GPUs")
    unit = head_dim if name in _OF_HEADS else 1
    if any(part <= 0 or part % (unit * tp_size) for part in parts):
        raise ValueError(f"{module.name} cannot be split into {tp_size} equal parts")
    ranges = _shares(parts, tp_size, tp_rank)
    return Shard(ranges, outputs) if is_split_by_input else Shard(inputs, ranges)


def _shares(parts: tuple[int, ...], tp_size: int, tp_rank: int) -> tuple[range, ...]:
    """This rank's share of each of the `parts`, which follow one another."""
    ends = accumulate(parts)
    shares = ((end - size + tp_rank * size // tp_size, size // tp_size) for size, end in zip(parts, ends, strict=True))
    return tuple(range(begin, begin + size) for begin, size in shares)
