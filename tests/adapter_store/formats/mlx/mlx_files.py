"""Writes adapters as mlx-lm would."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from safetensors.numpy import save

from tests.adapter_store.adapter_files import AdapterFiles

_LEAVES = {
    ".lora_A.weight": ".lora_a",
    ".lora_B.weight": ".lora_b",
    ".lora_embedding_A": ".lora_a",
    ".lora_embedding_B": ".lora_b",
    ".lora_magnitude_vector": ".m",
}


def write_mlx(directory: Path, files: AdapterFiles, **changes: Any) -> Path:
    """Write a PEFT adapter's two files into a new directory. `changes` are fields of `lora_parameters`."""
    tensors = {}
    for name, values in files.tensors.items():
        suffix = next(suffix for suffix in _LEAVES if name.endswith(suffix))
        module = name.removeprefix("base_model.model.").removesuffix(suffix)
        tensors[module + _LEAVES[suffix]] = np.ascontiguousarray(values.T)
    rank = files.config["r"]
    kind = "dora" if files.config.get("use_dora") else "lora"
    return write_tensors(directory, tensors, kind, rank=rank, scale=files.config["lora_alpha"] / rank, **changes)


def write_tensors(directory: Path, tensors: dict[str, npt.NDArray[Any]], kind: str = "lora", **parameters: Any) -> Path:
    """Write tensors that have mlx-lm's names and shapes. `parameters` are fields of `lora_parameters`."""
    directory.mkdir()
    content = save(tensors)
    # mlx-lm's files have this in their headers.
    length = int.from_bytes(content[:8], "little")
    header = b'{"__metadata__":null,' + content[9 : 8 + length].lstrip()
    (directory / "adapters.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + content[8 + length :])
    lora = {"dropout": 0.0, **parameters}
    config = {"fine_tune_type": kind, "num_layers": 16, "model": "some/base", "lora_parameters": lora}
    (directory / "adapter_config.json").write_text(json.dumps(config))
    return directory


def random_pair(generator: np.random.Generator, *shape: int, rank: int) -> dict[str, npt.NDArray[Any]]:
    """A random lora_a and lora_b of a linear layer or an embedding `(in_features, out_features)`, or of the experts
    `(num_experts, in_features, out_features)`.
    """
    *num_experts, in_features, out_features = shape
    sizes = {"lora_a": (in_features, rank), "lora_b": (rank, out_features)}
    if num_experts:
        # mlx-lm does not transpose the matrices of experts.
        sizes = {"lora_a": (*num_experts, rank, in_features), "lora_b": (*num_experts, out_features, rank)}
    return {leaf: (generator.standard_normal(size) * 0.1).astype(np.float32) for leaf, size in sizes.items()}


def expert_tensors(
    above: str, sizes: Mapping[str, tuple[int, int]], num_experts: int, rank: int, seed: int = 0
) -> dict[str, npt.NDArray[Any]]:
    """Random tensors of experts. `sizes` are the inputs and outputs of their linear layers, by name."""
    generator = np.random.default_rng(seed)
    return {
        f"{above}.{name}.{leaf}": values
        for name, size in sizes.items()
        for leaf, values in random_pair(generator, num_experts, *size, rank=rank).items()
    }
