"""Engines start from GGUF files and give the same logits as transformers on the dequantised weights."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from loramux.adapter_store.gguf.base_directory import base_directory
from loramux.engine.architectures.model_config import ModelConfig
from loramux.engine.device.backend import open_backend
from loramux.engine.loop.config import pack_target
from tests.conformance.gguf_families import STORED
from tests.conformance.gguf_models import TYPES, by_turns, write_base
from tests.conformance.parity import TOLERANCE, Subject
from tests.conformance.test_quantized_bases import CODES_TOLERANCE, check_engine
from tests.conformance.tiny_models import (
    ALL_LINEARS,
    SMALL_SHAPE,
    SMALL_WINDOW,
    AdapterPlan,
    add_adapters,
    make_base,
    pack_peft_directory,
)
from tests.engine.device.gpu_backend import gpu_backend

SHAPE = {**SMALL_SHAPE, "hidden_size": 256, "intermediate_size": 256, "num_key_value_heads": 2}
SHAPE["initializer_range"] = 0.08
FREQUENT = ("llama", "gemma3", "gpt-oss")
"""The families of every test run. `make campaign NAME=parity` adds the others."""

PLAN = AdapterPlan("r8", 8, ALL_LINEARS, use_dora=True)


def make_gguf(family: str, directory: Path, types: tuple[str, ...]) -> Subject:
    stored = STORED[family]
    directory.mkdir(exist_ok=True)
    model = make_base(family, directory / "float", SHAPE, SMALL_WINDOW, stored.make)
    write_base(model, directory / "base.gguf", stored.family, by_turns(types), stored.entries)
    base = base_directory(directory / "base.gguf", directory / "views")
    plan = PLAN.for_family(family)
    config = ModelConfig.load(base)
    if config.mixture is not None:
        plan = plan.for_experts(model)
    reference = add_adapters(model, [plan], directory / "adapters")
    packed = pack_peft_directory(directory / "adapters" / "r8", pack_target(config, "float32"), base)
    return Subject(base, reference, {"r8": packed.digest}, {packed.digest: packed}, {"r8": packed.num_pages})


@pytest.mark.parametrize(
    "family", [pytest.param(name, marks=() if name in FREQUENT else pytest.mark.campaign) for name in STORED]
)
def test_every_architecture_equals_transformers(family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    subject = make_gguf(family, tmp_path, TYPES)
    backend = open_backend("cpu")
    dequantizing = replace(backend, make_quantized_linear=None, make_quantized_experts=None)
    check_engine(subject, [None, "r8"], dequantizing, TOLERANCE, monkeypatch)
    check_engine(subject, [None, "r8"], backend, CODES_TOLERANCE, monkeypatch)


@pytest.mark.campaign
def test_a_gpu_serves_every_type(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    subject = make_gguf("llama", tmp_path, TYPES)
    check_engine(subject, ["r8"], gpu_backend(monkeypatch), TOLERANCE, monkeypatch, num_tokens=1)
