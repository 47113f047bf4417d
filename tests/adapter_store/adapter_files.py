from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from safetensors.numpy import save

from loramux.adapter_store.formats.packed.pack_target import PackTarget


def tensor_name(layer: int, module: str, half: str) -> str:
    return f"base_model.model.model.layers.{layer}.{module}.lora_{half}.weight"


@dataclass
class AdapterFiles:
    config: dict[str, Any]
    tensors: dict[str, np.ndarray] = field(default_factory=dict)

    @property
    def config_bytes(self) -> bytes:
        return json.dumps(self.config).encode()

    @property
    def tensor_bytes(self) -> bytes:
        return save(self.tensors)


@dataclass(frozen=True)
class AdapterMaker:
    target: PackTarget

    def __call__(
        self,
        seed: int = 0,
        rank: int = 4,
        modules: tuple[str, ...] = ("self_attn.q_proj", "self_attn.v_proj"),
        layers: tuple[int, ...] | None = None,
        ranks: Callable[[int, str], int] | None = None,
        dtype: Any = np.float32,
        **config: Any,
    ) -> AdapterFiles:
        """Generate an adapter. `ranks(layer, module)` overrides `rank` and is saved as the configuration's
        rank_pattern. With `use_dora` or `lora_bias`, every module has a magnitude vector or a bias.
        """
        generator = np.random.default_rng(seed)
        files = AdapterFiles(
            {
                "peft_type": "LORA",
                "task_type": "CAUSAL_LM",
                "base_model_name_or_path": "some/base",
                "bias": "none",
                "r": rank,
                "lora_alpha": 2 * rank,
                "target_modules": [name.rsplit(".", 1)[-1] for name in modules],
                **config,
            }
        )

        def add_vector(module: str, num_outputs: int) -> None:
            for key, suffix in (("use_dora", "lora_magnitude_vector"), ("lora_bias", "lora_B.bias")):
                if config.get(key):
                    files.tensors[f"{module}.{suffix}"] = generator.uniform(0.5, 1.5, num_outputs).astype(dtype)

        for shape in self.target.outer_modules:
            if shape.name in modules:
                half = "lora_embedding_{}" if shape.is_embedding else "lora_{}.weight"
                for letter, size in (("A", (rank, shape.in_features)), ("B", (shape.out_features, rank))):
                    name = f"base_model.model.{shape.name}.{half.format(letter)}"
                    files.tensors[name] = (generator.standard_normal(size) * 0.1).astype(dtype)
                add_vector(f"base_model.model.{shape.name}", shape.out_features)
        for layer in range(self.target.geometry.num_layers):
            if layers is not None and layer not in layers:
                continue
            for shape in self.target.all_modules:
                if shape.name not in modules or not shape.is_in(layer):
                    continue
                r = ranks(layer, shape.name) if ranks else rank
                if r != rank:
                    key = f"model.layers.{layer}.{shape.name}"
                    files.config.setdefault("rank_pattern", {})[key] = r
                A = generator.standard_normal((r, shape.in_features)) * 0.1
                B = generator.standard_normal((shape.out_features, r)) * 0.1
                files.tensors[tensor_name(layer, shape.name, "A")] = A.astype(dtype)
                files.tensors[tensor_name(layer, shape.name, "B")] = B.astype(dtype)
                add_vector(f"base_model.model.model.layers.{layer}.{shape.name}", shape.out_features)
        return files
