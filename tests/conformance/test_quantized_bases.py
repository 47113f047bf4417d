"""Engines start from every released layout and give the same logits as transformers on the dequantised weights."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from loramux.engine.architectures.model_config import ModelConfig
from loramux.engine.device.backend import Backend, Linear, open_backend
from loramux.engine.loop.config import pack_target
from loramux.engine.protocol.errors import ConfigNotUsable
from loramux.engine.protocol.messages import Add, SamplingParams
from loramux.kernels.cpu.instructions.capability import byte_products
from loramux.kernels.cpu.instructions.compiled import cpu_features
from loramux.kernels.cpu.instructions.integer_blocks import IS_SUPPORTED
from tests.conformance.parity import TOLERANCE, Recorder, Subject, assert_parity, run
from tests.conformance.tiny_models import ALL_LINEARS, SMALL_SHAPE, AdapterPlan, add_adapters, pack_peft_directory
from tests.engine.device.gpu_backend import gpu_backend, has_fp8_products
from tests.kernels.gpu.interpreted import HAS_GPU, import_kernels
from tests.quantized_layouts import LAYOUTS, quantize_directory

SHAPE = {**SMALL_SHAPE, "intermediate_size": 256, "initializer_range": 0.1}
PLANS = [
    AdapterPlan("r8", 8, ALL_LINEARS),
    AdapterPlan("dora", 4, ["q_proj", "gate_proj", "down_proj"], use_dora=True),
]
FREQUENT = ("fp8-blocks", "ct-w4a16-asymmetric", "gptq-act-order")
"""The layouts of every test run. `make campaign NAME=parity` adds the others."""

FREQUENT_ON_GPU = ("gptq-act-order",)

CODES_TOLERANCE = 1e-3
"""Kernels that multiply by codes round `x` to 13 bits for NF4, and otherwise to 16 bits."""

BYTES_TOLERANCE = 0.1
"""The tolerance with 8-bit activations."""

FP8_TOLERANCE = 0.2
"""The tolerance with FP8 activations, which have 3 bits of mantissa."""

needs_bytes = pytest.mark.skipif(
    byte_products(cpu_features()) is None, reason="this CPU multiplies no weights by activations of 8 bits"
)


def make_quantized(directory: Path, layout: str, plans: Sequence[AdapterPlan], keep: str = "lm_head") -> Subject:
    """A quantised base, and a reference with the dequantised weights."""
    torch.manual_seed(3)
    model = LlamaForCausalLM(LlamaConfig(**SHAPE)).eval()
    base = directory / "base"
    model.save_pretrained(base)
    quantize_directory(model, base, LAYOUTS[layout], keep)
    reference = add_adapters(model, list(plans), directory / "adapters")
    target = pack_target(ModelConfig.load(base), "float32")
    packed = {plan.name: pack_peft_directory(directory / "adapters" / plan.name, target, base) for plan in plans}
    return Subject(
        base,
        reference,
        {name: one.digest for name, one in packed.items()},
        {one.digest: one for one in packed.values()},
        {name: one.num_pages for name, one in packed.items()},
    )


@needs_bytes
def test_activations_of_8_bits_are_near_the_float_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    subject = make_quantized(tmp_path, "gptq-act-order", PLANS[:1])
    backend = open_backend("cpu", activation_bits=8)
    check_engine(subject, [None, "r8"], backend, BYTES_TOLERANCE, monkeypatch)


@needs_bytes
def test_an_engine_names_activations_of_8_bits(tmp_path: Path) -> None:
    subject = make_quantized(tmp_path, "gptq-act-order", PLANS[:1])
    assembled = subject.assemble(activations="int8", pool_bytes=8 << 20)
    assert assembled.ready.quantization == "gptq int4, activations in int8"
    assembled.adapters.close()


@pytest.mark.parametrize("layout", ["fp8-blocks", "nf4"])
def test_activations_of_8_bits_need_integers_of_8_bits(layout: str, tmp_path: Path) -> None:
    subject = make_quantized(tmp_path, layout, PLANS[:1])
    with pytest.raises(ConfigNotUsable, match=r"any of the base's weights in int8 .*: omit --activations"):
        subject.assemble(activations="int8", pool_bytes=8 << 20)


class CountedLinears:
    """Counts the linear layers that multiply by dequantised weights."""

    def __init__(self, backend: Backend) -> None:
        self.num_made = 0
        self._make = backend.make_linear

    def __call__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> Linear:
        self.num_made += 1
        return self._make(weight, bias)


def check(subject: Subject, names: list[str | None], monkeypatch: pytest.MonkeyPatch) -> None:
    """Compare an engine that dequantises its weights, then one that multiplies by their codes."""
    backend = open_backend("cpu")
    dequantizing = replace(backend, make_quantized_linear=None, make_quantized_experts=None)
    check_engine(subject, names, dequantizing, TOLERANCE, monkeypatch)
    check_engine(subject, names, backend, CODES_TOLERANCE, monkeypatch)


def check_engine(
    subject: Subject,
    names: list[str | None],
    backend: Backend,
    tolerance: float,
    monkeypatch: pytest.MonkeyPatch,
    num_tokens: int = 3,
) -> None:
    assembled = subject.assemble(backend, pool_bytes=8 << 20)
    recorder = Recorder(assembled.engine, monkeypatch)
    adds = {}
    for name in names:
        add = Add(
            sequence_id=str(name),
            prompt=(5, 90, 11, 200, 7, 301),
            max_tokens=num_tokens,
            sampling=SamplingParams(temperature=0.0, ignore_eos=True),
            digest=None if name is None else subject.digests[name],
        )
        adds[name] = add
        assembled.engine.add(b"", add)
    run(assembled.engine)
    for name, add in adds.items():
        assert_parity(subject, name, add, recorder.by_sequence[add.sequence_id], tolerance)
    assembled.adapters.close()


@pytest.mark.parametrize(
    "layout", [pytest.param(name, marks=() if name in FREQUENT else pytest.mark.campaign) for name in LAYOUTS]
)
def test_every_layout_serves_the_weights_that_it_means(
    layout: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    check(make_quantized(tmp_path, layout, PLANS[:1]), [None, "r8"], monkeypatch)


@pytest.mark.parametrize(
    "layout", [pytest.param(name, marks=() if name in FREQUENT_ON_GPU else pytest.mark.campaign) for name in LAYOUTS]
)
def test_a_gpu_keeps_the_codes_of_every_layout(layout: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The head is quantised, too, so no linear is dequantised."""
    backend = gpu_backend(monkeypatch)
    counted = CountedLinears(backend)
    subject = make_quantized(tmp_path, layout, PLANS[:1], keep="no linear")
    check_engine(subject, ["r8"], replace(backend, make_linear=counted), TOLERANCE, monkeypatch, num_tokens=1)
    assert counted.num_made == 0


@pytest.mark.skipif(HAS_GPU, reason="a GPU's engine rounds only bfloat16")
@pytest.mark.skipif(not has_fp8_products(torch.device("cpu")), reason="this torch has no such products on a CPU")
def test_a_gpu_rounds_inputs_of_fp8_weights_in_large_steps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The reference rounds no inputs. The decodes have one row each, so they multiply by codes."""
    subject = make_quantized(tmp_path, "ct-fp8-channel", PLANS[:1])
    backend = gpu_backend(monkeypatch, rounds_inputs=True)
    (coded_linear,) = import_kernels("coded_linear")
    monkeypatch.setattr(coded_linear, "MIN_DEQUANTIZED_ROWS", 2)
    multiply, rows = torch._scaled_mm, []

    def note(codes: torch.Tensor, *arguments: Any, **named: Any) -> torch.Tensor:
        rows.append(len(codes))
        return multiply(codes, *arguments, **named)

    monkeypatch.setattr(torch, "_scaled_mm", note)
    check_engine(subject, [None, "r8"], backend, FP8_TOLERANCE, monkeypatch, num_tokens=1)
    assert rows


def test_a_quantised_head_keeps_its_codes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    backend = open_backend("cpu")
    counted = CountedLinears(backend)
    subject = make_quantized(tmp_path, "ct-w8a8", PLANS[:1], keep="no linear")
    check_engine(subject, [None, "r8"], replace(backend, make_linear=counted), CODES_TOLERANCE, monkeypatch)
    assert counted.num_made == (0 if IS_SUPPORTED else 9)


def test_modules_that_are_not_converted_are_read_as_they_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # The q of one layer is not quantised, so it is fused with quantised k and v.
    check(make_quantized(tmp_path, "awq", PLANS[:1], keep="0.self_attn.q_proj"), [None], monkeypatch)


def test_adapters_over_nf4_equal_peft_over_the_same_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The gains of DoRA are also computed from the dequantised weights."""
    check(make_quantized(tmp_path, "nf4-double", PLANS), [None, "r8", "dora"], monkeypatch)
