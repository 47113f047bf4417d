"""A random mixture of experts of Qwen3-MoE's shape, and adapters on its attention and on all of its experts."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from benchmarks.peers.model_files import ATTENTION, CONFIG, TENSORS, ModelFiles, make_once
from benchmarks.random_model import Shape

Tensors = dict[str, torch.Tensor]

EXPERT = ("gate_proj", "up_proj", "down_proj")
SPREAD, ADAPTER_SPREAD = 0.05, 0.15
"""Standard deviations of the base's and the adapters' weights. They are larger than usual, so that adapters change
greedy choices but rounding does not."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MixtureShape(Shape):
    head_dim: int
    expert_size: int
    num_experts: int
    top_k: int

    def linears(self, layer: int) -> Iterator[tuple[str, int, int]]:
        """Yield the name and the numbers of inputs and outputs of each linear layer that the adapters target."""
        prefix, heads = f"model.layers.{layer}", self.num_heads * self.head_dim
        kv = self.num_kv_heads * self.head_dim
        sizes = (self.hidden_size, heads), (self.hidden_size, kv), (self.hidden_size, kv), (heads, self.hidden_size)
        for name, (inputs, outputs) in zip(ATTENTION, sizes, strict=True):
            yield f"{prefix}.self_attn.{name}", inputs, outputs
        for expert in range(self.num_experts):
            for name in EXPERT:
                inputs, outputs = self.hidden_size, self.expert_size
                if name == "down_proj":
                    inputs, outputs = outputs, inputs
                yield f"{prefix}.mlp.experts.{expert}.{name}", inputs, outputs


SHAPES = {
    "4b": MixtureShape(2048, 16, 32, 4, 6144, head_dim=128, expert_size=768, num_experts=48, top_k=8),
    "small": MixtureShape(256, 4, 8, 2, 384, head_dim=32, expert_size=96, num_experts=16, top_k=4),
}
"""`4b` has 4.0 billion parameters. A token uses 1.0 billion of them. Its layers have the shape of Qwen3-30B-A3B's
layers, but with 48 experts instead of 128.
"""


def make_mixture_files(scratch: Path, size: str, num_adapters: int, rank: int) -> ModelFiles:
    """A base with adapters `a0`, `a1`, ... on attention and on all experts, in files with a tensor for each expert."""
    directory = scratch.absolute() / f"mixture-{size}-{num_adapters}-adapters-rank{rank}"
    shape = SHAPES[size]

    def write(files: ModelFiles) -> None:
        _write_base(shape, files.base)
        for seed, adapter in enumerate(files.adapters.values()):
            adapter.mkdir(parents=True)
            _write_adapter(shape, rank, seed, adapter)

    return make_once(ModelFiles(directory, shape, num_adapters, rank, has_attention_adapters=False), write)


def write_merged(files: ModelFiles, adapter: Path, directory: Path) -> None:
    """Write a copy of the base with the adapter's products B A added to the weights in float32."""
    shutil.copytree(files.base, directory)
    factors = {name: tensor.float() for name, tensor in load_file(adapter / TENSORS).items()}
    for path in directory.glob("*.safetensors"):
        tensors = load_file(path)
        for name, tensor in tensors.items():
            a = factors.get(f"base_model.model.{name.removesuffix('.weight')}.lora_A.weight")
            if a is not None:
                b = factors[f"base_model.model.{name.removesuffix('.weight')}.lora_B.weight"]
                tensors[name] = tensor.float() + b @ a
        save_file(tensors, path, metadata={"format": "pt"})


def _write_base(shape: MixtureShape, directory: Path) -> None:
    """Write one file per layer, so that only one layer is in memory."""
    config = {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "dtype": "bfloat16",
        "hidden_size": shape.hidden_size,
        "num_hidden_layers": shape.num_layers,
        "num_attention_heads": shape.num_heads,
        "num_key_value_heads": shape.num_kv_heads,
        "head_dim": shape.head_dim,
        "intermediate_size": shape.intermediate_size,
        "moe_intermediate_size": shape.expert_size,
        "num_experts": shape.num_experts,
        "num_experts_per_tok": shape.top_k,
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "rope_theta": 1e6,
        "max_position_embeddings": 2048,
        "vocab_size": shape.vocab_size,
        "tie_word_embeddings": True,
        "attention_bias": False,
        "use_sliding_window": False,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    (directory / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    random = torch.Generator().manual_seed(0)
    names: dict[str, str] = {}
    for layer in range(shape.num_layers + 1):
        name = f"model-{layer:05}-of-{shape.num_layers:05}.safetensors"
        tensors = _layer(shape, layer, random) if layer < shape.num_layers else _ends(shape, random)
        save_file(tensors, directory / name, metadata={"format": "pt"})
        names |= dict.fromkeys(tensors, name)
    index = {"metadata": {}, "weight_map": names}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index) + "\n")


def _layer(shape: MixtureShape, layer: int, random: torch.Generator) -> Tensors:
    prefix = f"model.layers.{layer}"
    tensors = {f"{name}.weight": _drawn(random, outputs, inputs) for name, inputs, outputs in shape.linears(layer)}
    tensors[f"{prefix}.mlp.gate.weight"] = _drawn(random, shape.num_experts, shape.hidden_size)
    for name in ("input_layernorm", "post_attention_layernorm"):
        tensors[f"{prefix}.{name}.weight"] = torch.ones(shape.hidden_size, dtype=torch.bfloat16)
    for name in ("q_norm", "k_norm"):
        tensors[f"{prefix}.self_attn.{name}.weight"] = torch.ones(shape.head_dim, dtype=torch.bfloat16)
    return tensors


def _ends(shape: MixtureShape, random: torch.Generator) -> Tensors:
    return {
        "model.embed_tokens.weight": _drawn(random, shape.vocab_size, shape.hidden_size),
        "model.norm.weight": torch.ones(shape.hidden_size, dtype=torch.bfloat16),
    }


def _write_adapter(shape: MixtureShape, rank: int, seed: int, directory: Path) -> None:
    random = torch.Generator().manual_seed(1000 + seed)
    tensors: Tensors = {}
    for layer in range(shape.num_layers):
        for name, inputs, outputs in shape.linears(layer):
            tensors[f"base_model.model.{name}.lora_A.weight"] = _drawn(random, rank, inputs, ADAPTER_SPREAD)
            tensors[f"base_model.model.{name}.lora_B.weight"] = _drawn(random, outputs, rank, ADAPTER_SPREAD)
    save_file(tensors, directory / TENSORS, metadata={"format": "pt"})
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": "base",
        "r": rank,
        "lora_alpha": rank,
        "target_modules": [*ATTENTION, *EXPERT],
        "bias": "none",
    }
    (directory / CONFIG).write_text(json.dumps(config, indent=2) + "\n")


def _drawn(random: torch.Generator, rows: int, columns: int, spread: float = SPREAD) -> torch.Tensor:
    return (torch.randn(rows, columns, generator=random) * spread).to(torch.bfloat16)
