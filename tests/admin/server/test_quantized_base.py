"""A server quantises its base when it starts, keeps the result, and says how good it is."""

from __future__ import annotations

import json
import shutil
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import msgspec
import pytest
from safetensors.torch import load_file, save_file
from structlog.testing import capture_logs

from loramux.admin.errors import StartRefused
from loramux.admin.server import quantized_base
from loramux.admin.server.quantized_base import quantize_base
from loramux.admin.server.settings import Settings
from loramux.admin.serving.serve import read_model
from loramux.engine.architectures.model_config import ModelConfig
from loramux.engine.loop.config import EngineConfig, activation_bits, check_activations
from loramux.engine.protocol.errors import ConfigNotUsable, DeviceNotUsable
from loramux.engine.quantizing.messages import QUALITY_FILES, Quality, QuantizeJob, QuantizeResult
from loramux.engine.quantizing.quantize import quantized_directory
from loramux.kernels.cpu.instructions import capability
from tests.conformance.tiny_models import SMALL_SHAPE
from tests.engine.device.fake_gpu import LLAMA
from tests.quantized_layouts import LAYOUTS, quantize_directory


def test_weights_are_made_once_by_another_process(
    demo_base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    # tests/engine/quantizing measures the quality. The process of this test does not, because it would have to load two
    # models.
    monkeypatch.setattr(quantized_base, "free_memory", lambda: 0)
    config = EngineConfig(model_dir=str(demo_base), blob_url="", cache_dir="")
    base = quantize_base(config, tmp_path / "quantized", "int8")
    assert base.directory.parent == tmp_path / "quantized"
    assert sorted(path.name for path in base.directory.iterdir()) == ["config.json", "model.safetensors"]
    assert "the float model does not fit into the free memory" in base.quality
    quality = Quality(method="int8", divergence=0.0123, perplexity=14.25, float_perplexity=14)
    (base.directory / QUALITY_FILES[None]).write_bytes(msgspec.json.encode(quality))
    written = (base.directory / "model.safetensors").stat()
    again = quantize_base(config, tmp_path / "quantized", "int8")
    assert again.directory == base.directory
    assert again.quality == (
        "mean KL divergence from the float model: 0.012 nats per token; "
        "perplexity of a plain text: 14.25 (float model: 14)"
    )
    assert again.warning is None
    assert (base.directory / "model.safetensors").stat().st_ino == written.st_ino
    assert capfd.readouterr().out == ""


@pytest.mark.parametrize(
    ("method", "advice"),
    [
        ("int4", "use --quantization int8"),
        ("int4+head", "use --quantization int8+head"),
        ("int8", "omit --quantization"),
    ],
)
def test_a_large_divergence_is_a_warning_that_names_a_better_format(
    demo_base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, method: str, advice: str
) -> None:
    monkeypatch.setattr(quantized_base, "free_memory", lambda: 0)
    quality = Quality(method=method, divergence=0.41, perplexity=38, float_perplexity=25)
    monkeypatch.setattr(quantized_base, "_run", lambda job: QuantizeResult(directory=str(tmp_path), quality=quality))
    config = EngineConfig(model_dir=str(demo_base), blob_url="", cache_dir="")
    with capture_logs() as logs:
        base = quantize_base(config, tmp_path / "quantized", method)
    assert base.warning == (
        f"{method} changes this model's predictions by 0.41 nats per token, "
        f"which is more than 0.1 and shows in answers: {advice}"
    )
    assert [(line["log_level"], line["event"]) for line in logs] == [("warning", base.warning)]


def test_the_float_model_must_fit_in_the_dtype_in_which_it_is_loaded(
    demo_base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The demo's base is tied and in float16 here: its files have less than half of the bytes that a CPU loads."""
    model = tmp_path / "model"
    shutil.copytree(demo_base, model)
    tensors = load_file(demo_base / "model.safetensors")
    save_file({name: tensor.half() for name, tensor in tensors.items()}, model / "model.safetensors")
    described = json.loads((demo_base / "config.json").read_text())
    (model / "config.json").write_text(json.dumps({**described, "dtype": "float16", "torch_dtype": "float16"}))
    file_bytes = sum(2 * tensor.numel() for tensor in tensors.values())
    jobs: list[QuantizeJob] = []

    def run(job: QuantizeJob) -> QuantizeResult:
        jobs.append(job)
        return QuantizeResult(directory=str(tmp_path), quality=None)

    monkeypatch.setattr(quantized_base, "_run", run)
    for factor in (1.5, 2.4, 4.0):
        monkeypatch.setattr(quantized_base, "free_memory", lambda factor=factor: factor * file_bytes)
        for dtype in ("auto", "bfloat16"):
            config = EngineConfig(model_dir=str(model), blob_url="", cache_dir="", dtype=dtype)
            quantize_base(config, tmp_path, "int8")
    assert [bool(job.text) for job in jobs] == [False, True, False, True, True, True]


@pytest.mark.parametrize("is_complete", [True, False], ids=["measuring", "quantising"])
def test_a_process_that_dies_stops_the_start_only_without_weights(
    demo_base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_complete: bool
) -> None:
    """A script takes the place of the process."""
    script = tmp_path / "python"
    script.write_text("#!/bin/sh\ncat > /dev/null\nexit 1\n")
    script.chmod(0o755)
    monkeypatch.setattr(quantized_base, "free_memory", lambda: 1 << 40)
    monkeypatch.setattr(sys, "executable", str(script))
    directory = quantized_directory(tmp_path, demo_base, "int8")
    config = EngineConfig(model_dir=str(demo_base), blob_url="", cache_dir="")
    if is_complete:
        directory.mkdir()
        base = quantize_base(config, tmp_path, "int8")
        assert base.directory == directory
        assert base.quality == "the quality was not measured: the process that measures it ended with status 1"
    else:
        with pytest.raises(StartRefused, match="the process that quantises the model ended with status 1"):
            quantize_base(config, tmp_path, "int8")


def test_refusals_of_the_process_stop_the_start(demo_base: Path, tmp_path: Path) -> None:
    config = EngineConfig(model_dir=str(demo_base), blob_url="", cache_dir="", device="cuda")
    (tmp_path / "quantized").write_text("a file")
    with pytest.raises(StartRefused, match=r"cannot be written to .*: (Not a directory|File exists)"):
        quantize_base(config, tmp_path / "quantized", "int8")


def test_a_quantised_checkpoint_is_not_quantised_again(tmp_path: Path) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    model = LlamaForCausalLM(LlamaConfig(**{**SMALL_SHAPE, "intermediate_size": 128}))
    model.save_pretrained(tmp_path / "base")
    quantize_directory(model, tmp_path / "base", LAYOUTS["gptq-sym"])
    with pytest.raises(StartRefused, match=r"already quantised \(gptq int4\): omit --quantization"):
        read_model(Settings(model=tmp_path / "base", data_dir=tmp_path, quantization="int8"))


def test_activations_are_rounded_only_where_that_helps(demo_base: Path, tmp_path: Path) -> None:
    with pytest.raises(StartRefused, match="int8 need quantised weights: add --quantization, or omit --activations"):
        read_model(Settings(model=demo_base, data_dir=tmp_path, device="cpu", activations="int8"))
    settings = Settings(model=demo_base, data_dir=tmp_path, device="cpu", activations="fp8")
    with pytest.raises(StartRefused, match="fp8 need a GPU, but this engine uses a CPU: omit --activations"):
        read_model(settings)
    with pytest.raises(DeviceNotUsable, match="int8 need a CPU, but this engine uses a GPU: omit --activations"):
        check_activations(configured("int8", device="cuda"), is_quantized=True)
    with pytest.raises(ConfigNotUsable, match="fp8 need quantised weights: add --quantization, or omit --activations"):
        check_activations(configured("fp8", device="cuda"), is_quantized=False)
    with pytest.raises(ConfigNotUsable, match="fp8 need bfloat16, but the dtype is float32: omit --dtype or"):
        check_activations(configured("fp8", device="cuda", dtype="float32"), is_quantized=True)
    check_activations(configured("fp8", device="cuda"), is_quantized=True)
    check_activations(configured("16bit"), is_quantized=False)
    check_activations(configured(None), is_quantized=False)


def configured(activations: Any, **fields: Any) -> EngineConfig:
    return EngineConfig(model_dir="", blob_url="", cache_dir="", activations=activations, **fields)


DYNAMIC = {"num_bits": 8, "type": "float", "strategy": "token", "dynamic": True, "symmetric": True}
FP8_WEIGHTS = {"num_bits": 8, "type": "float", "strategy": "channel", "symmetric": True}


def compressed(**inputs: Any) -> dict[str, Any]:
    groups = {name: {"weights": FP8_WEIGHTS, "input_activations": one} for name, one in inputs.items()}
    return {"quant_method": "compressed-tensors", "config_groups": groups}


@pytest.mark.parametrize(
    ("quantization", "rounds"),
    [
        ({"quant_method": "fp8", "activation_scheme": "dynamic"}, True),
        ({"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}, True),
        ({"quant_method": "fp8", "activation_scheme": "static"}, False),
        ({"quant_method": "fp8", "activation_scheme": ["dynamic"]}, False),
        ({"quant_method": "fp8"}, False),
        ({"quant_method": "fbgemm_fp8", "activation_scale_ub": 1200.0}, True),
        (compressed(group_0=DYNAMIC), True),
        (compressed(group_0={**DYNAMIC, "strategy": "group", "group_size": 128}), True),
        (compressed(group_0={**DYNAMIC, "dynamic": False}), False),
        (compressed(group_0={**DYNAMIC, "dynamic": "local"}), False),
        (compressed(group_0={**DYNAMIC, "type": "int"}), False),
        (compressed(group_0=None), False),
        (compressed(group_0=[DYNAMIC]), False),
        (compressed(group_0=DYNAMIC, group_1=None), False),
        ({"quant_method": "gptq", "bits": 4, "group_size": 32, "sym": True, "desc_act": False}, False),
        (None, False),
    ],
    ids=[
        "fp8", "fp8-blocks", "fp8-static", "fp8-list", "fp8-unsaid", "fbgemm", "ct", "ct-groups", "ct-static",
        "ct-local", "ct-int8-inputs", "ct-weights-alone", "ct-list", "ct-mixed", "gptq", "float",
    ],
)  # fmt: skip
def test_a_gpu_rounds_activations_if_the_checkpoint_says_so(
    quantization: dict[str, Any] | None, rounds: bool, tmp_path: Path
) -> None:
    """The setting has precedence over the checkpoint."""
    config = {**LLAMA, "torch_dtype": "bfloat16", "quantization_config": quantization}
    (tmp_path / "config.json").write_text(json.dumps(config))
    model = ModelConfig.load(tmp_path)
    assert activation_bits(configured(None, device="cuda"), model) == (8 if rounds else 16)
    assert activation_bits(configured(None, device="cuda", dtype="float32"), model) == 16
    assert activation_bits(configured(None, device="cuda", quantized_dir="made"), model) == 16
    assert activation_bits(configured(None), model) == 16
    assert activation_bits(configured("fp8", device="cuda", quantized_dir="made"), model) == 8
    with pytest.raises(DeviceNotUsable, match="fp8 need a GPU"):
        activation_bits(configured("fp8"), model)
    assert activation_bits(configured("16bit", device="cuda"), model) == 16


@pytest.mark.parametrize(
    ("features", "has_bytes"),
    [
        ({"avx2", "avxvnni"}, True),
        ({"avx512f", "avx512bw", "avx512vnni"}, True),
        ({"avx512f", "avx512bw", "avxvnni"}, False),
        ({"avx2"}, True),
        ({"sse4.2"}, False),
        ({"neon"}, False),
    ],
    ids=["avx-vnni", "avx512-vnni", "avx512", "avx2", "sse", "arm"],
)
def test_activations_of_8_bits_need_bytes(monkeypatch: pytest.MonkeyPatch, features: set[str], has_bytes: bool) -> None:
    monkeypatch.setattr(capability, "host_features", lambda: features)
    expected = nullcontext() if has_bytes else pytest.raises(DeviceNotUsable, match="AVX2 or AVX512_VNNI: omit")
    with expected:
        check_activations(configured("int8"), is_quantized=True)
