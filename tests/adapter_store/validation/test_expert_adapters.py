"""Which modules of experts and routers a configuration selects, and what the report says about them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from loramux.adapter_store.validation.report import Report
from loramux.adapter_store.validation.validation import validate_files
from tests.adapter_store.adapter_files import AdapterFiles, AdapterMaker
from tests.adapter_store.expert_base import EXPERT_SIZE, ROUTER, expert_target, experts_named, stacked_files
from tests.adapter_store.small_base import HIDDEN

TARGET = expert_target()
Q = "self_attn.q_proj"
DOWN = experts_named("down_proj")
LAYER = "base_model.model.model.layers.1."


def validated(files: AdapterFiles, target: Any = TARGET) -> Report:
    return validate_files(files.config_bytes, files.tensor_bytes, target)


@pytest.mark.parametrize(
    ("targets", "modules"),
    [
        pytest.param(["q_proj", "down_proj"], (Q,), id="names without experts, as transformers 5 writes them"),
        pytest.param(["q_proj", "down_proj"], (Q, *DOWN), id="names with experts, as transformers 4 writes them"),
        pytest.param(["experts.1.down_proj"], experts_named("down_proj", experts=(1,)), id="one expert"),
        pytest.param(["gate"], (ROUTER,), id="router"),
        pytest.param(r".*experts\.[13]\..*", experts_named("up_proj", experts=(1, 3)), id="expression"),
    ],
)
def test_the_tensors_show_whether_names_mean_experts(targets: Any, modules: tuple[str, ...]) -> None:
    report = validated(AdapterMaker(TARGET)(modules=modules, target_modules=targets))
    expected = {f"model.layers.{layer}.{name}" for name in modules for layer in ((0, 1) if name == Q else (1,))}
    assert report.scales.keys() == expected


@pytest.mark.parametrize("extra", [(), DOWN, (ROUTER, *DOWN)], ids=["none", "experts", "experts-and-router"])
def test_all_linear_means_experts_and_routers_if_the_file_has_them(extra: tuple[str, ...]) -> None:
    attention = tuple(f"self_attn.{name}_proj" for name in "qkvo")
    report = validated(AdapterMaker(TARGET)(modules=(*attention, *extra), target_modules="all-linear"))
    assert len(report.scales) == 2 * len(attention) + len(extra)


def test_patterns_apply_to_parameters() -> None:
    # peft writes such patterns when it stacks gate and up.
    patterns: dict[str, Any] = {
        "rank_pattern": {r".*\.gate_up_proj": 6},
        "alpha_pattern": {r".*\.gate_up_proj": 3, "experts.down_proj": 5.0},
    }
    files, inner = stacked_files(rank=2, **patterns), stacked_files(rank=6)
    name = f"{LAYER}mlp.experts.base_layer.lora_{{}}.weight"
    files.tensors |= {name.format(half): inner.tensors[name.format(half)] for half in "AB"}
    report = validated(files)
    above = "model.layers.1.mlp.experts."
    assert report.scales == {above + "gate_up_proj": 0.5, above + "down_proj": 2.5}
    assert report.max_rank == 6
    scale = validated(stacked_files(rank=4, use_rslora=True)).scales[above + "down_proj"]
    assert scale == 8 / 2


def test_routers_are_found_under_the_name_of_transformers_5() -> None:
    assert TARGET.experts is not None
    target = replace(TARGET, experts=replace(TARGET.experts, stacked_router="moe.router"))
    config = {"target_modules": [], "target_parameters": ["router.weight"], "rank_pattern": {"router.weight": 2}}
    files = AdapterMaker(target)(modules=(ROUTER,), **config)
    matrices = {"A": np.ones((2, HIDDEN), np.float32), "B": np.ones((4, 2), np.float32)}
    files.tensors = {f"{LAYER}moe.router.lora_{half}.weight": matrix for half, matrix in matrices.items()}
    report = validated(files, target)
    assert report.names == {
        f"{LAYER}mlp.gate.lora_{half}.weight": name for half, name in zip("AB", files.tensors, strict=True)
    }
    assert report.scales == {"model.layers.1.mlp.gate": 4.0}


def test_linears_may_be_targeted_as_parameters() -> None:
    files = AdapterMaker(TARGET)(modules=(Q,), target_modules=None, target_parameters=["q_proj.weight"])
    assert validated(files).scales.keys() == {f"model.layers.{layer}.{Q}" for layer in (0, 1)}


def test_the_report_gives_the_largest_effect_of_all_experts() -> None:
    files = AdapterMaker(TARGET)(rank=4, modules=(*DOWN, Q))
    large = f"{LAYER}mlp.experts.2.down_proj.lora_B.weight"
    files.tensors[large] = np.full((HIDDEN, 4), 3.0, np.float32)
    modules = validated(files).document()["modules"]
    assert modules.keys() == {Q, "mlp.experts.down_proj"}
    facts = modules["mlp.experts.down_proj"]
    assert (facts["layers"], facts["ranks"], facts["scales"]) == ([1], [4], [2.0])
    generator = np.random.default_rng(EXPERT_SIZE)
    probes = generator.standard_normal((4, EXPERT_SIZE), np.float32)
    a = files.tensors[large.replace("lora_B", "lora_A")]
    effect = float(np.abs(2.0 * (probes @ a.T) @ files.tensors[large].T).max())
    assert facts["largest_effect"] == pytest.approx(effect, rel=1e-3)
