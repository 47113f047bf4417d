"""Mixtures with quantised experts give the same logits as transformers on the dequantised weights."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, PreTrainedModel

from loramux.engine.device.backend import Backend, open_backend
from loramux.engine.protocol.messages import Add, SamplingParams
from tests.conformance.parity import TOLERANCE, Recorder, Subject, assert_parity, run
from tests.conformance.test_quantized_bases import CODES_TOLERANCE
from tests.conformance.tiny_models import SMALL_SHAPE, make_base
from tests.engine.device.gpu_backend import gpu_backend
from tests.quantized_layouts import LAYOUTS, bytes_of, mx_scales

CODES = "gptq-v2-channel"


class WithoutAdapters:
    """A model with the part of a PeftModel that a `Subject` needs."""

    def __init__(self, model: Any) -> None:
        self._model = model

    def disable_adapter(self) -> nullcontext[None]:
        return nullcontext()

    def __call__(self, **inputs: Any) -> Any:
        return self._model(**inputs)


def store(directory: Path, tensors: dict[str, torch.Tensor], quantization: dict[str, Any]) -> None:
    save_file(tensors, directory / "model.safetensors")
    path = directory / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "quantization_config": quantization}))


def gpt_oss(directory: Path) -> PreTrainedModel:
    """A gpt-oss with experts in mxfp4, as it is released."""
    model = make_base("gpt-oss", directory, {**SMALL_SHAPE, "intermediate_size": 96})
    tensors = load_file(directory / "model.safetensors")
    for name, parameter in model.named_parameters():
        if name.endswith(("gate_up_proj", "down_proj")):
            codes, exponents, values = mx_scales(parameter.detach().transpose(1, 2).contiguous())
            parameter.data = values.transpose(1, 2).contiguous()
            del tensors[name]
            tensors |= {f"{name}_blocks": bytes_of(codes).unflatten(-1, (-1, 16)), f"{name}_scales": exponents}
    store(directory, tensors, {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]})
    return model


def qwen3_moe(directory: Path) -> PreTrainedModel:
    """A Qwen3-MoE with experts in int4, and the other linear layers as floats."""
    make_base("qwen3-moe", directory, SMALL_SHAPE)
    tensors, means = load_file(directory / "model.safetensors"), {}
    for name in [name for name in tensors if ".experts." in name]:
        stored, means[name] = LAYOUTS[CODES].quantize(tensors.pop(name).float())
        module = name.removesuffix(".weight")
        tensors |= {module + suffix: tensor.clone() for suffix, tensor in stored.items()}
    floats = directory / "floats"
    floats.mkdir()
    (floats / "config.json").write_text((directory / "config.json").read_text())
    plain = {name: tensor for name, tensor in tensors.items() if name.endswith(".weight")}
    save_file({**plain, **means}, floats / "model.safetensors", {"format": "pt"})
    store(directory, tensors, LAYOUTS[CODES].config)
    return AutoModelForCausalLM.from_pretrained(floats, attn_implementation="eager", dtype=torch.float32).eval()


def refuse_floats(num_experts: int, weights: Iterator[torch.Tensor], bias: torch.Tensor | None) -> None:
    raise AssertionError("experts were dequantised")


def backend_of(way: str, monkeypatch: pytest.MonkeyPatch) -> Backend:
    if way == "dequantized":
        return replace(open_backend("cpu"), make_quantized_experts=None)
    backend = gpu_backend(monkeypatch) if way == "gpu" else open_backend("cpu")
    return replace(backend, make_experts=refuse_floats)


@pytest.mark.parametrize(
    ("way", "tolerance"),
    [
        ("dequantized", TOLERANCE),
        ("cpu", CODES_TOLERANCE),
        pytest.param("gpu", TOLERANCE, marks=pytest.mark.campaign),
    ],
)
@pytest.mark.parametrize("make_model", [gpt_oss, qwen3_moe])
def test_experts_are_served_from_their_codes(
    make_model: Callable[[Path], PreTrainedModel],
    way: str,
    tolerance: float,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    subject = Subject(tmp_path, WithoutAdapters(make_model(tmp_path)), {}, {}, {})
    assembled = subject.assemble(backend_of(way, monkeypatch), pool_bytes=8 << 20)
    recorder = Recorder(assembled.engine, monkeypatch)
    sampling = SamplingParams(temperature=0.0, ignore_eos=True)
    add = Add(sequence_id="one", prompt=tuple(range(3, 20)), max_tokens=3, sampling=sampling)
    assembled.engine.add(b"", add)
    run(assembled.engine)
    assert_parity(subject, None, add, recorder.by_sequence["one"], tolerance)
    assembled.adapters.close()
