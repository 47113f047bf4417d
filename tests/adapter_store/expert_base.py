"""A small base with attention in both layers and experts in the second, and adapters with stacked tensors for it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from loramux.adapter_store.formats.packed.pack_target import PackTarget
from loramux.kernels.layout import ExpertLinear, ExpertModules, LinearShape
from tests.adapter_store.adapter_files import AdapterFiles
from tests.adapter_store.small_base import HIDDEN, MODULES, make_target

EXPERT_SIZE = 24
ROUTER = "mlp.gate"
ATTENTION = MODULES[:4]
STACKS = {"gate_up_proj": (HIDDEN, 2 * EXPERT_SIZE), "down_proj": (EXPERT_SIZE, HIDDEN)}
"""The inputs and outputs of the linear layers whose tensors can be stacked."""


def expert_modules(num_experts: int, layers: tuple[int, ...] | None = (1,)) -> ExpertModules:
    name = "mlp.experts.{}."
    linears = (
        ExpertLinear(None, "mlp.experts.gate_up_proj", HIDDEN, 2 * EXPERT_SIZE),
        ExpertLinear(name + "gate_proj", None, HIDDEN, EXPERT_SIZE),
        ExpertLinear(name + "up_proj", None, HIDDEN, EXPERT_SIZE),
        ExpertLinear(name + "down_proj", "mlp.experts.down_proj", EXPERT_SIZE, HIDDEN),
    )
    return ExpertModules(num_experts, linears, ROUTER, ROUTER, layers)


def expert_target(num_experts: int = 4, layers: tuple[int, ...] | None = (1,)) -> PackTarget:
    router = LinearShape(ROUTER, HIDDEN, num_experts, layers=layers)
    return replace(make_target(modules=(*ATTENTION, router)), experts=expert_modules(num_experts, layers))


def experts_named(*names: str, experts: tuple[int, ...] = (0, 1, 2, 3)) -> tuple[str, ...]:
    return tuple(f"mlp.experts.{expert}.{name}" for expert in experts for name in names)


def stacked_files(rank: int = 3, num_experts: int = 4, layers: tuple[int, ...] = (1,), **config: Any) -> AdapterFiles:
    """The files that peft writes for the stacked weights, where it nests `gate_up_proj` inside `down_proj`."""
    generator = np.random.default_rng(rank)
    files = AdapterFiles(
        {
            "peft_type": "LORA",
            "task_type": "CAUSAL_LM",
            "r": rank,
            "lora_alpha": 2 * rank,
            "target_modules": [],
            "target_parameters": ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"],
            **config,
        }
    )
    for layer in layers:
        for wrapper, (num_inputs, num_outputs) in zip(("base_layer.", ""), STACKS.values(), strict=True):
            above = f"base_model.model.model.layers.{layer}.mlp.experts.{wrapper}lora"
            sizes = {"A": (num_experts * rank, num_inputs), "B": (num_outputs, num_experts * rank)}
            for letter, size in sizes.items():
                files.tensors[f"{above}_{letter}.weight"] = generator.standard_normal(size).astype(np.float32) * 0.1
    return files
