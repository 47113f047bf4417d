"""Float copies of quantised bases have the names, order and values that peft needs."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from benchmarks.peers.float_copies import WEIGHTS, named, own_copy
from benchmarks.peers.model_files import ModelFiles
from benchmarks.random_model import Shape, make_base

SHAPE = Shape(64, 1, 4, 2, 128, vocab_size=96)


@pytest.mark.parametrize(("method", "levels"), [("int8", 127), ("int4", 8)])
def test_own_copy_rounds_the_linears_and_keeps_the_rest(method: str, levels: int, tmp_path: Path) -> None:
    files = ModelFiles(tmp_path, SHAPE, num_adapters=0, rank=1)
    make_base(SHAPE, files.base)
    before, after = load_file(files.base / WEIGHTS), load_file(own_copy(files, method).base / WEIGHTS)
    assert before.keys() == after.keys()
    for name, weight in before.items():
        error = (after[name] - weight.float()).abs().max()
        if ".layers." in name and "norm" not in name:
            assert 0 < error <= weight.float().abs().max() / levels
        else:
            assert error == 0


@pytest.mark.parametrize(("kind", "num_heads"), [("q", SHAPE.num_heads), ("k", SHAPE.num_kv_heads)])
def test_rotated_rows_return_to_the_order_of_transformers(kind: str, num_heads: int) -> None:
    weight = torch.arange(num_heads * 16 * 3.0).view(num_heads * 16, 3)
    # llama.cpp's converter interleaves the halves of each head.
    interleaved = torch.cat([head.view(2, 8, 3).transpose(0, 1).reshape(16, 3) for head in weight.view(-1, 16, 3)])
    name, values = named(f"blk.5.attn_{kind}.weight", interleaved, SHAPE)
    assert name == f"model.layers.5.self_attn.{kind}_proj.weight"
    assert torch.equal(values, weight)


def test_other_tensors_are_renamed() -> None:
    assert named("token_embd.weight", torch.ones(2, 2), SHAPE)[0] == "model.embed_tokens.weight"
    assert named("blk.0.ffn_down.weight", torch.ones(2, 2), SHAPE)[0] == "model.layers.0.mlp.down_proj.weight"
