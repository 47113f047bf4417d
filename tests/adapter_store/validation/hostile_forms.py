"""Hostile uploads in the forms that other trainers use: parts of fused layers, and tensors of a multimodal base."""

from __future__ import annotations

from typing import Any

import numpy as np

from tests.adapter_store.adapter_files import AdapterFiles, tensor_name
from tests.adapter_store.small_base import FUSED_MODULES, OUTER_MODULES, make_target
from tests.adapter_store.validation.hostile import MARK, Hostile, good_files

FUSED = make_target(modules=FUSED_MODULES, outer_modules=OUTER_MODULES)
PARTS = tuple(f"self_attn.{name}_proj" for name in "qkv")
VISION = f"base_model.model.model.visual.{MARK}.lora_A.weight"


def _fused(name: str, code: str, param: str, change: Any) -> Hostile:
    """An adapter for a fused base, which `change` replaces."""
    return Hostile(
        name=name, code=code, param=param, change=change, base=FUSED, adapter={"modules": ("self_attn.qkv_proj",)}
    )


def _with_parts(files: AdapterFiles, **adapter: Any) -> None:
    parts = good_files(modules=PARTS, **adapter)
    files.config, files.tensors = parts.config, parts.tensors


def _without_k(files: AdapterFiles) -> None:
    _with_parts(files)
    del files.tensors[tensor_name(1, "self_attn.k_proj", "A")]


def _with_both(files: AdapterFiles) -> None:
    files.tensors |= good_files(modules=PARTS).tensors
    files.config["target_modules"] = ["qkv_proj", "q_proj", "k_proj", "v_proj"]


def _with_wide_k(files: AdapterFiles) -> None:
    _with_parts(files)
    files.tensors[tensor_name(0, "self_attn.k_proj", "B")] = np.ones((32, 4), np.float32)


def _with_infinite_v(files: AdapterFiles) -> None:
    _with_parts(files)
    files.tensors[tensor_name(1, "self_attn.v_proj", "B")][3, 1] = np.inf


def _only_vision(files: AdapterFiles) -> None:
    files.config["target_modules"] = ".*"
    files.tensors = {VISION: np.ones((4, 32), np.float32)}


def _vision(name: str, code: str, param: str, tensor: np.ndarray, of: str = VISION) -> Hostile:
    return Hostile(name=name, code=code, param=param, change=lambda files: files.tensors.update({of: tensor}))


FORMS = [
    _fused("split names without a part", "missing_tensor", tensor_name(1, "self_attn.k_proj", "A"), _without_k),
    _fused("a fused layer beside its parts", "ambiguous_names", tensor_name(0, "self_attn.qkv_proj", "A"), _with_both),
    _fused("a part of the wrong size", "base_mismatch", tensor_name(0, "self_attn.k_proj", "B"), _with_wide_k),
    _fused("a part with infinity", "not_finite", tensor_name(1, "self_attn.v_proj", "B"), _with_infinite_v),
    _fused(
        "parts of too high a rank",
        "rank_out_of_range",
        "model.layers.0.self_attn.v_proj",
        lambda files: _with_parts(files, rank=100),
    ),
    Hostile(name="only a vision tower", code="unsupported_config", param="target_modules", change=_only_vision),
    _vision("vision of nine dimensions", "tensor_not_2d", VISION, np.ones((1,) * 9, np.float32)),
    _vision("vision of integers", "unsupported_dtype", VISION, np.ones((4, 4), np.int32)),
    _vision(
        "vision in the text decoder",
        "unexpected_tensor",
        VISION.replace("visual", "layers.0.visual"),
        np.ones((4, 4), np.float32),
        VISION.replace("visual", "layers.0.visual"),
    ),
    _vision(
        "a state of training without its module",
        "unexpected_tensor",
        "base_model.model.model.layers.0.lora_velora.weight",
        np.ones((4, 4), np.float32),
        "base_model.model.model.layers.0.lora_velora.weight",
    ),
]
