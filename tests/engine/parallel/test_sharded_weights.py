from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from loramux.engine.architectures.model_config import ModelConfig
from loramux.engine.architectures.weight_shapes import weight_shapes
from loramux.engine.decoder.weights import open_weights
from loramux.engine.parallel.sharded_weights import ShardedWeights
from loramux.engine.parallel.sharding import module_shards, worker_config

CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "attention_bias": True,
    "mlp_bias": True,
    "hidden_size": 32,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 21,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-6,
    "dtype": "float32",
}
SIZE = 2


@pytest.fixture(params=[False, True], ids=["own head", "tied head"])
def base(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[ModelConfig, dict[str, torch.Tensor], Path]:
    (tmp_path / "config.json").write_text(json.dumps({**CONFIG, "tie_word_embeddings": request.param}))
    model = ModelConfig.load(tmp_path)
    tensors = {name: torch.randn(shape) for name, shape in weight_shapes(model).items()}
    save_file(tensors, tmp_path / "model.safetensors")
    return model, tensors, tmp_path


@pytest.mark.parametrize("worker", range(SIZE))
def test_a_worker_reads_its_part_of_each_tensor(
    base: tuple[ModelConfig, dict[str, torch.Tensor], Path], worker: int
) -> None:
    model, tensors, directory = base
    shards = module_shards(model, SIZE, worker)
    own = {**weight_shapes(worker_config(model, SIZE)), "lm_head.weight": (11, 32)}
    # Closing the files checks that each tensor was read.
    with open_weights(directory) as weights:
        sharded = ShardedWeights(weights, model, SIZE, worker)
        read = {name: sharded.tensor(name, shape) for name, shape in own.items()}
    for index, module in enumerate(model.modules):
        inputs, outputs = (
            [i for one in ranges for i in one] for ranges in (shards[index].inputs, shards[index].outputs)
        )
        for layer in range(2):
            name = f"model.layers.{layer}.{module.name}"
            assert torch.equal(read[f"{name}.weight"], tensors[f"{name}.weight"][outputs][:, inputs])
            bias = tensors[f"{name}.bias"][outputs]
            if shards[index].is_summed and worker > 0:
                bias = torch.zeros_like(bias)
            assert torch.equal(read[f"{name}.bias"], bias)
    head = tensors["model.embed_tokens.weight" if model.tied_embeddings else "lm_head.weight"]
    expected = torch.cat([head, torch.zeros(1, 32)])[11 * worker :][:11]
    assert torch.equal(read["lm_head.weight"], expected)
    for name in ("model.embed_tokens.weight", "model.norm.weight", "model.layers.1.input_layernorm.weight"):
        assert torch.equal(read[name], tensors[name])
