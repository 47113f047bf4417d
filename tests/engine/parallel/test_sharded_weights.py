from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from loramux.adapter_store.formats.quantization.parts import CodedWeight
from loramux.engine.architectures.model_config import ModelConfig
from loramux.engine.architectures.weight_files import checkpoint_of
from loramux.engine.architectures.weight_shapes import weight_shapes
from loramux.engine.decoder.weights import open_weights
from loramux.engine.parallel.sharded_weights import ShardedWeights
from loramux.engine.parallel.sharding import module_shards, worker_config
from loramux.engine.parallel.weight_parts import check_groups
from loramux.engine.protocol.errors import ConfigNotUsable
from tests.engine.parallel.test_sharding import GPT_OSS, GRANITE_MOE, LLAMA, QWEN2_MOE
from tests.quantized_layouts import LAYOUTS

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


def floats(tensor: torch.Tensor | CodedWeight) -> torch.Tensor:
    return tensor if isinstance(tensor, torch.Tensor) else torch.from_numpy(tensor.dequantize())


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
        read = {name: floats(sharded.tensor(name, shape)) for name, shape in own.items()}
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


def read_mixture(
    family: dict[str, Any], directory: Path, worker: int
) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """The stored tensors of a model with random weights, and those that a worker reads."""
    (directory / "config.json").write_text(json.dumps({**LLAMA, **family, "tie_word_embeddings": True}))
    model = ModelConfig.load(directory)
    tensors = {name: torch.randn(shape) for name, shape in weight_shapes(model).items()}
    save_file(tensors, directory / "model.safetensors")
    with open_weights(directory) as weights:
        sharded = ShardedWeights(weights, model, SIZE, worker)
        own = weight_shapes(worker_config(model, SIZE))
        return tensors, {name: floats(sharded.tensor(name, shape)) for name, shape in own.items()}


@pytest.mark.parametrize("worker", range(SIZE))
def test_a_worker_reads_its_inner_features_of_each_expert(worker: int, tmp_path: Path) -> None:
    tensors, read = read_mixture(QWEN2_MOE, tmp_path, worker)
    for prefix, size in (
        ("model.layers.0.mlp", 104),
        ("model.layers.1.mlp.experts.2", 40),
        ("model.layers.1.mlp.shared_expert", 24),
    ):
        inner = slice(worker * size // 2, (worker + 1) * size // 2)
        for name in ("gate_proj", "up_proj"):
            assert torch.equal(read[f"{prefix}.{name}.weight"], tensors[f"{prefix}.{name}.weight"][inner])
        assert torch.equal(read[f"{prefix}.down_proj.weight"], tensors[f"{prefix}.down_proj.weight"][:, inner])
    for name in ("model.layers.1.mlp.gate.weight", "model.layers.1.mlp.shared_expert_gate.weight"):
        assert torch.equal(read[name], tensors[name])


@pytest.mark.parametrize("worker", range(SIZE))
def test_a_worker_reads_its_part_of_stacked_experts_and_its_heads_sinks(worker: int, tmp_path: Path) -> None:
    tensors, read = read_mixture(GPT_OSS, tmp_path, worker)
    layer, size = "model.layers.1", LLAMA["intermediate_size"]
    inner = slice(worker * size // 2, (worker + 1) * size // 2)
    # Gate and up alternate.
    both = slice(worker * size, (worker + 1) * size)
    experts = f"{layer}.mlp.experts"
    for name in (f"{experts}.gate_up_proj", f"{experts}.gate_up_proj_bias"):
        assert torch.equal(read[name], tensors[name][..., both])
    assert torch.equal(read[f"{experts}.down_proj"], tensors[f"{experts}.down_proj"][:, inner])
    down_bias = tensors[f"{experts}.down_proj_bias"]
    assert torch.equal(read[f"{experts}.down_proj_bias"], torch.zeros_like(down_bias) if worker else down_bias)
    for name in (f"{layer}.mlp.router.weight", f"{layer}.mlp.router.bias"):
        assert torch.equal(read[name], tensors[name])
    sinks = f"{layer}.self_attn.sinks"
    assert torch.equal(read[sinks], tensors[sinks][4 * worker : 4 * worker + 4])


@pytest.mark.parametrize("worker", range(SIZE))
def test_a_worker_reads_both_halves_of_fused_gates_and_ups(worker: int, tmp_path: Path) -> None:
    tensors, read = read_mixture(GRANITE_MOE, tmp_path, worker)
    for name, size, axis in (
        ("block_sparse_moe.input_linear", LLAMA["intermediate_size"], 1),
        ("shared_mlp.input_linear", 24, 0),
    ):
        full_name = f"model.layers.1.{name}.weight"
        half = torch.arange(worker * size // 2, (worker + 1) * size // 2)
        assert torch.equal(read[full_name], tensors[full_name].index_select(axis, torch.cat([half, half + size])))


def quantized_base(directory: Path, layout: str, **changes: Any) -> tuple[ModelConfig, dict[str, torch.Tensor]]:
    """A base with a quantised head. Returns the values of its tensors."""
    config = {**CONFIG, "hidden_size": 128, "intermediate_size": 192, "attention_bias": False, "mlp_bias": False}
    quantization = {"quantization_config": LAYOUTS[layout].config}
    (directory / "config.json").write_text(json.dumps({**config, **changes, **quantization}))
    model = ModelConfig.load(directory)
    stored, values = {}, {}
    for name, shape in weight_shapes(model).items():
        values[name] = torch.randn(shape)
        if name.endswith(("_proj.weight", "lm_head.weight")):
            module = name.removesuffix(".weight")
            tensors, values[name] = LAYOUTS[layout].quantize(values[name])
            stored |= {module + suffix: tensor.clone() for suffix, tensor in tensors.items()}
        else:
            stored[name] = values[name]
    save_file(stored, directory / "model.safetensors")
    return model, values


@pytest.mark.parametrize("worker", range(SIZE))
@pytest.mark.parametrize("layout", ["ct-w8a16", "ct-w4a16-asymmetric", "awq"])
def test_a_worker_keeps_its_part_of_the_codes(layout: str, worker: int, tmp_path: Path) -> None:
    model, values = quantized_base(tmp_path, layout, vocab_size=24)
    own = {**weight_shapes(worker_config(model, SIZE)), "lm_head.weight": (12, 128)}
    check_groups(checkpoint_of(tmp_path), model, SIZE)
    with open_weights(tmp_path) as weights:
        sharded = ShardedWeights(weights, model, SIZE, worker)
        read = {name: sharded.tensor(name, shape) for name, shape in own.items()}
    assert not any(
        isinstance(read[f"{name}.weight"], torch.Tensor) for name in ("lm_head", "model.layers.0.mlp.up_proj")
    )
    for index, module in enumerate(model.modules):
        shard = module_shards(model, SIZE, worker)[index]
        inputs, outputs = ([i for one in ranges for i in one] for ranges in (shard.inputs, shard.outputs))
        name = f"model.layers.1.{module.name}.weight"
        torch.testing.assert_close(floats(read[name]), values[name][outputs][:, inputs])
    torch.testing.assert_close(floats(read["lm_head.weight"]), values["lm_head.weight"][12 * worker :][:12])


def test_rows_of_a_quantised_head_that_stand_for_no_token_are_zero(tmp_path: Path) -> None:
    model, values = quantized_base(tmp_path, "ct-w8a16")
    with open_weights(tmp_path) as weights:
        for name, shape in weight_shapes(model).items():
            weights.tensor(name, shape)
        head = floats(ShardedWeights(weights, model, SIZE, 1).tensor("lm_head.weight", (11, 128)))
    torch.testing.assert_close(head[:10], values["lm_head.weight"][11:])
    assert not head[10].any()


@pytest.mark.parametrize(
    ("layout", "said"),
    [
        ("ct-w4a16", r"model\.layers\.0\.mlp\.down_proj\.weight: inputs 0 to 96 are not whole groups of 64"),
        ("gptq-act-order", r"model\.layers\.0\.self_attn\.o_proj\.weight: the inputs of a group are not adjacent"),
    ],
)
def test_groups_that_workers_cannot_divide_are_refused(layout: str, said: str, tmp_path: Path) -> None:
    model, _ = quantized_base(tmp_path, layout, vocab_size=32)
    with pytest.raises(ConfigNotUsable, match=f"^tensor_parallel_size 2 cannot divide the quantised weight {said}"):
        check_groups(checkpoint_of(tmp_path), model, SIZE)
