"""Tensor-parallel engines with quantised bases and with experts choose the tokens of an engine with one worker."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from transformers import LlamaConfig, LlamaForCausalLM

from loramux.adapter_store.gguf.base_directory import base_directory
from loramux.admin.doctor.memory_plan import plan_workers
from loramux.engine.architectures.model_config import ModelConfig
from loramux.engine.loop.config import pack_target
from loramux.engine.parallel import workers
from loramux.engine.protocol.errors import ConfigNotUsable
from loramux.engine.quantizing.quantize import quantize
from tests.conformance.expert_adapters import ExpertPlan, make_expert_subject, plans_for
from tests.conformance.gguf_families import STORED
from tests.conformance.gguf_models import by_turns, write_base
from tests.conformance.parity import Subject, assert_parity, make_subject
from tests.conformance.test_parity import OUTER_PLANS
from tests.conformance.test_quantized_bases import SHAPE as QUANTIZED_SHAPE
from tests.conformance.test_quantized_bases import make_quantized
from tests.conformance.test_quantized_experts import WithoutAdapters, qwen3_moe
from tests.conformance.test_tensor_parallel import END_S, Exchanges, assembled, logits_of, requests
from tests.conformance.tiny_models import (
    PLANS,
    SHAPE,
    SMALL_SHAPE,
    SMALL_WINDOW,
    VOCAB_SIZE,
    AdapterPlan,
    add_adapters,
    make_base,
    pack_peft_directory,
)

campaign = pytest.mark.campaign

MIXED = [
    AdapterPlan("plain", 8, ["q_proj", "k_proj", "o_proj", "up_proj"]),
    AdapterPlan("gains", 4, ["v_proj", "o_proj", "gate_proj", "down_proj"], use_dora=True),
    *OUTER_PLANS,
]
"""Plain adapters and DoRA, of all linear layers, the embedding and the head."""

TRAINED_HEAD = "trained-head"


def with_trained_head(subject: Subject, directory: Path) -> Subject:
    """The subject with a further adapter that replaces the head."""
    path = directory / TRAINED_HEAD
    path.mkdir()
    generator, model = torch.Generator().manual_seed(7), ModelConfig.load(subject.directory)
    tensors = {"base_model.model.lm_head.weight": torch.randn(VOCAB_SIZE, model.hidden_size, generator=generator) * 0.2}
    for layer in range(model.num_layers):
        q_proj = f"base_model.model.model.layers.{layer}.self_attn.q_proj"
        tensors[f"{q_proj}.lora_A.weight"] = torch.randn(4, model.hidden_size, generator=generator) * 0.1
        tensors[f"{q_proj}.lora_B.weight"] = torch.randn(model.modules[0].out_features, 4, generator=generator) * 0.1
    save_file(tensors, path / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": 4, "lora_alpha": 4, "target_modules": ["q_proj"]}
    (path / "adapter_config.json").write_text(json.dumps({**config, "modules_to_save": ["lm_head"]}))
    packed = pack_peft_directory(path, pack_target(model, "float32"), subject.directory)
    return dataclasses.replace(
        subject,
        digests={**subject.digests, TRAINED_HEAD: packed.digest},
        adapters={**subject.adapters, packed.digest: packed},
    )


MakeBase = Callable[[Path], tuple[Subject, dict[str, Any]]]
"""Makes a base with adapters in a directory, and the settings with which an engine loads it."""


def released(layout: str) -> MakeBase:
    """A base in a released format."""

    def make(directory: Path) -> tuple[Subject, dict[str, Any]]:
        return make_quantized(directory, layout, MIXED), {}

    return make


def quantised(method: str) -> MakeBase:
    """A float base that the server quantises."""

    def make(directory: Path) -> tuple[Subject, dict[str, Any]]:
        torch.manual_seed(3)
        model = LlamaForCausalLM(LlamaConfig(**QUANTIZED_SHAPE)).eval()
        base = directory / "base"
        model.save_pretrained(base)
        quantize(base, directory / "quantized", method, lambda done, total: None)
        reference = add_adapters(model, MIXED, directory / "adapters")
        return packed_subject(base, reference, directory), {"quantized_dir": str(directory / "quantized")}

    return make


def gguf(types: tuple[str, ...], family: str = "llama") -> MakeBase:
    """A base in a GGUF file, whose kinds of matrices take turns with `types`."""

    def make(directory: Path) -> tuple[Subject, dict[str, Any]]:
        stored, shape = STORED[family], {**SMALL_SHAPE, "hidden_size": 256, "intermediate_size": 256}
        shape |= {"num_key_value_heads": 2, "initializer_range": 0.08}
        model = make_base(family, directory / "float", shape, SMALL_WINDOW, stored.make)
        write_base(model, directory / "base.gguf", stored.family, by_turns(types), stored.entries)
        base = base_directory(directory / "base.gguf", directory / "views")
        has_experts = ModelConfig.load(base).mixture is not None
        plans = [plan.for_experts(model) for plan in MIXED] if has_experts else MIXED
        return packed_subject(base, add_adapters(model, plans, directory / "adapters"), directory), {}

    return make


def int4_experts(directory: Path) -> tuple[Subject, dict[str, Any]]:
    """A mixture with experts in int4, with a group for all inputs, and no adapters."""
    base = directory / "base"
    base.mkdir()
    return Subject(base, WithoutAdapters(qwen3_moe(base)), {}, {}, {}), {}


def packed_subject(base: Path, reference: Any, directory: Path) -> Subject:
    target = pack_target(ModelConfig.load(base), "float32")
    packed = {plan.name: pack_peft_directory(directory / "adapters" / plan.name, target, base) for plan in MIXED}
    digests = {name: one.digest for name, one in packed.items()}
    return Subject(base, reference, digests, {one.digest: one for one in packed.values()}, {})


BASES = {
    "int8": quantised("int8+head"),
    "int4": quantised("int4"),
    "compressed-tensors int8": released("ct-w8a16"),
    "compressed-tensors int4": released("ct-w4a16-asymmetric"),
    "awq": released("awq"),
    "fp8": released("ct-fp8-channel"),
    "gguf": gguf(("Q4_K", "Q6_K", "Q8_0", "Q5_1", "IQ4_XS")),
    "gguf tied": gguf(("Q8_0", "Q4_0"), "qwen2"),
    "gguf with experts": gguf(("MXFP4", "Q8_0"), "gpt-oss"),
    "int4 experts": int4_experts,
}


@campaign
@pytest.mark.parametrize("base", BASES)
def test_tokens_of_a_quantised_base_equal_those_of_one_worker(
    base: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(workers, "END_S", END_S)
    subject, settings = BASES[base](tmp_path)
    subject = with_trained_head(subject, tmp_path)
    asked, tokens, num_dequantized = requests(subject), [], []
    for size in (1, 2, 4):
        with assembled(subject, **settings, tensor_parallel_size=size, num_threads=size) as engine:
            logits = logits_of(engine, asked, monkeypatch)
            num_dequantized.append(engine.ready.num_dequantized)
        tokens.append({name: [int(row.argmax()) for row in rows] for name, rows in logits.items()})
    assert tokens[0] == tokens[1] == tokens[2]
    assert len(set(num_dequantized)) == 1


@campaign
@pytest.mark.parametrize(
    ("layout", "said"),
    [
        ("ct-w4a16", "inputs 0 to 32 are not whole groups of 64"),
        ("gptq-act-order", "the inputs of a group are not adjacent"),
    ],
)
def test_groups_that_workers_cannot_divide_are_refused(layout: str, said: str, tmp_path: Path) -> None:
    subject = make_quantized(tmp_path, layout, MIXED[:1])
    with pytest.raises(ConfigNotUsable, match=rf"^tensor_parallel_size 4 cannot divide .*self_attn\.o_proj.*{said}"):
        subject.assemble(tensor_parallel_size=4, num_threads=4)


@campaign
@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("family", ["qwen2-moe", "gpt-oss", "mixtral", "granite-moe-shared", "glm4_moe", "llama4"])
def test_adapters_on_mixtures_equal_peft_and_one_worker(
    family: str, size: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(workers, "END_S", END_S)
    subject = make_subject(family, tmp_path, [*PLANS, *OUTER_PLANS], SHAPE, SMALL_WINDOW)
    check(subject, size, monkeypatch)


@pytest.mark.parametrize(
    ("family", "size"),
    [
        ("qwen2-moe", 2),
        *(
            pytest.param(family, size, marks=campaign)
            for family in ("qwen2-moe", "gpt-oss", "mixtral", "qwen3-moe")
            for size in (2, 4)
            if (family, size) != ("qwen2-moe", 2)
        ),
    ],
)
def test_adapters_on_experts_equal_the_references_and_one_worker(
    family: str, size: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(workers, "END_S", END_S)
    plans: list[ExpertPlan] = plans_for(family)
    check(make_expert_subject(family, tmp_path, plans, SHAPE, SMALL_WINDOW), size, monkeypatch)


def check(subject: Subject, size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = requests(subject)
    with assembled(subject) as alone:
        expected = logits_of(alone, asked, monkeypatch)
    exchanges = Exchanges(monkeypatch)
    with assembled(subject, tensor_parallel_size=size, num_threads=size) as engine:
        found = logits_of(engine, asked, monkeypatch)
    # A layer with experts has as many exchanges as a dense one.
    exchanges.check(plan_workers(subject.directory, "cpu", size), size)
    for sequence_id, (name, add) in asked.items():
        assert_parity(subject, name, add, found[sequence_id])
        assert [row.argmax() for row in found[sequence_id]] == [row.argmax() for row in expected[sequence_id]]
