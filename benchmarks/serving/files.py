"""A base model and random PEFT adapters on disk, made on the device that will serve them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import save_file

from benchmarks.gpu.model import LLAMA_8B, Model
from benchmarks.gpu.random_models import EFFECT, llama_config
from benchmarks.gpu.random_weights import RandomWeights
from benchmarks.peers.vocabulary import FIRST_WORD, write_tokenizer

LLAMA_1B = Model(16, 2048, 8192, 32, 8, 64, 128256)
"""Llama-3.2-1B's shape with a head of its own."""

SMALLEST = Model(2, 64, 96, 4, 2, 16, FIRST_WORD + 64)
SHAPES = {"8b": LLAMA_8B, "1b": LLAMA_1B, "tiny": SMALLEST}
TARGETS = {"q_proj": 0, "k_proj": 1, "v_proj": 2, "o_proj": 3}
"""The modules that every adapter changes, with their places in `Model.modules`."""

SHARD_LAYERS = 8


@dataclass(frozen=True, slots=True)
class AdapterDirectory:
    name: str
    rank: int
    path: Path


def shape_of(base: Path) -> Model:
    """The shape of a Llama in the format of Hugging Face."""
    config = json.loads((base / "config.json").read_text())
    return Model(
        num_layers=config["num_hidden_layers"],
        hidden_size=config["hidden_size"],
        intermediate_size=config["intermediate_size"],
        num_heads=config["num_attention_heads"],
        num_kv_heads=config["num_key_value_heads"],
        # Older configurations have none.
        head_dim=config.get("head_dim", config["hidden_size"] // config["num_attention_heads"]),
        vocab_size=config["vocab_size"],
    )


def make_base(model: Model, max_len: int, directory: Path, device: torch.device, dtype: torch.dtype) -> None:
    """Write a Llama with random weights and a tokenizer in which each token has its own spelling."""
    directory.mkdir(parents=True)
    (directory / "config.json").write_text(json.dumps(llama_config(model, max_len, dtype)))
    write_tokenizer(directory, model.vocab_size)
    weights = RandomWeights(device, dtype)
    index: dict[str, str] = {}
    for number, shapes in enumerate(_shards(model)):
        file = f"model-{number:05}.safetensors"
        save_file(
            {name: weights.tensor(name, shape).to(dtype).cpu() for name, shape in shapes.items()}, directory / file
        )
        index |= dict.fromkeys(shapes, file)
    (directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))


def _shards(model: Model) -> Iterator[dict[str, tuple[int, ...]]]:
    hidden = model.hidden_size
    outer = (model.vocab_size, hidden)
    yield {"model.embed_tokens.weight": outer, "model.norm.weight": (hidden,), "lm_head.weight": outer}
    for first in range(0, model.num_layers, SHARD_LAYERS):
        shard: dict[str, tuple[int, ...]] = {}
        for layer in range(first, min(first + SHARD_LAYERS, model.num_layers)):
            prefix = f"model.layers.{layer}"
            for norm in ("input_layernorm", "post_attention_layernorm"):
                shard[f"{prefix}.{norm}.weight"] = (hidden,)
            for place, module in enumerate(model.modules):
                block = "self_attn" if place < len(TARGETS) else "mlp"
                shape = (module.out_features, module.in_features)
                shard[f"{prefix}.{block}.{module.name}_proj.weight"] = shape
        yield shard


def make_adapters(
    model: Model, names: dict[str, int], directory: Path, device: torch.device, dtype: torch.dtype
) -> list[AdapterDirectory]:
    """Write one PEFT directory for each name with its rank.

    Adapters of the same rank share their random numbers except for one matrix, so that a hundred of them are made in
    seconds.
    """
    made, shared = [], {rank: _tensors(model, rank, device, dtype) for rank in set(names.values())}
    for number, (name, rank) in enumerate(names.items()):
        path = directory / name
        path.mkdir(parents=True)
        tensors = dict(shared[rank])
        changed = next(tensor for tensor in tensors if tensor.endswith("lora_B.weight"))
        generator = torch.Generator(device).manual_seed(1000 + number)
        own = torch.empty(tensors[changed].shape, dtype=dtype, device=device)
        tensors[changed] = own.normal_(0.0, EFFECT * rank**-0.5, generator=generator).cpu()
        save_file(tensors, path / "adapter_model.safetensors")
        config = {
            "peft_type": "LORA",
            "task_type": "CAUSAL_LM",
            "r": rank,
            "lora_alpha": rank,
            "target_modules": list(TARGETS),
            "base_model_name_or_path": "base",
        }
        (path / "adapter_config.json").write_text(json.dumps(config))
        made.append(AdapterDirectory(name, rank, path))
    return made


def _tensors(model: Model, rank: int, device: torch.device, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    generator = torch.Generator(device).manual_seed(rank)
    tensors = {}
    for layer in range(model.num_layers):
        for target, place in TARGETS.items():
            module = model.modules[place]
            prefix = f"base_model.model.model.layers.{layer}.self_attn.{target}"
            halves = {
                "lora_A": ((rank, module.in_features), module.in_features**-0.5),
                "lora_B": ((module.out_features, rank), EFFECT * rank**-0.5),
            }
            for half, (shape, spread) in halves.items():
                drawn = torch.empty(shape, dtype=dtype, device=device).normal_(0.0, spread, generator=generator)
                tensors[f"{prefix}.{half}.weight"] = drawn.cpu()
    return tensors
