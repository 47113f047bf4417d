"""Adapters of fused linear layers whose files have a tensor for each part, as for a base whose layers are not fused.

The adapter of a part changes only its rows. Together, the adapters of all parts are one adapter of the fused layer. Its
rank is the sum of the ranks, and its B is block-diagonal.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from tests.conformance.tiny_models import ALL_LINEARS, SMALL_SHAPE
from tests.conformance.trainers.saved_files import SavedFiles

_HEAD_DIM = SMALL_SHAPE["hidden_size"] // SMALL_SHAPE["num_attention_heads"]
_KV = SMALL_SHAPE["num_key_value_heads"] * _HEAD_DIM
_INNER = SMALL_SHAPE["intermediate_size"]
PARTS: Mapping[str, Mapping[str, int]] = {
    "qkv_proj": {"q_proj": SMALL_SHAPE["hidden_size"], "k_proj": _KV, "v_proj": _KV},
    "gate_up_proj": {"gate_proj": _INNER, "up_proj": _INNER},
}
"""The parts of each fused layer of Phi-3, with their number of rows."""


def fused(rank: int, alpha: int) -> Mapping[str, Any]:
    """Settings of the adapter of the fused layers whose parts have `rank` and `alpha`."""
    return {
        "r": rank,
        "lora_alpha": alpha,
        "target_modules": [*PARTS, "o_proj", "down_proj"],
        "rank_pattern": {name: rank * len(parts) for name, parts in PARTS.items()},
        "alpha_pattern": {name: alpha * len(parts) for name, parts in PARTS.items()},
    }


def make_blocks(trained: Any) -> None:
    """Set B of the fused layers to zero outside its blocks."""
    for name, parameter in trained.named_parameters():
        layer = next((layer for layer in PARTS if f".{layer}.lora_B" in name), None)
        if layer is not None:
            blocks = torch.zeros_like(parameter)
            rank, row = parameter.shape[1] // len(PARTS[layer]), 0
            for index, num_rows in enumerate(PARTS[layer].values()):
                blocks[row : row + num_rows, index * rank : (index + 1) * rank] = 1
                row += num_rows
            parameter.mul_(blocks)


def writes_parts(files: SavedFiles) -> None:
    """Write a tensor for each part."""
    assert files.config is not None
    for name in list(files.tensors):
        layer = next((layer for layer in PARTS if f".{layer}.lora_" in name), None)
        if layer is None:
            continue
        tensor, parts = files.tensors.pop(name), PARTS[layer]
        if ".lora_A" in name:
            blocks = tensor.chunk(len(parts))
        else:
            rows = tensor.split(list(parts.values()))
            rank = tensor.shape[1] // len(parts)
            blocks = tuple(block[:, index * rank : (index + 1) * rank] for index, block in enumerate(rows))
        for part, block in zip(parts, blocks, strict=True):
            files.tensors[name.replace(f".{layer}.", f".{part}.")] = block.contiguous()
    files.config |= {"target_modules": ALL_LINEARS, "rank_pattern": {}, "alpha_pattern": {}}
