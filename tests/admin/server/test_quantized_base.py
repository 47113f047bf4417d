"""A server quantises its base when it starts, keeps the result, and says how good it is."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path

import msgspec
import pytest
from structlog.testing import capture_logs

from loramux.admin.errors import StartRefused
from loramux.admin.server import quantized_base
from loramux.admin.server.quantized_base import quantize_base
from loramux.admin.server.settings import Settings
from loramux.admin.serving.serve import read_model
from loramux.engine.loop.config import EngineConfig, check_activations
from loramux.engine.protocol.errors import DeviceNotUsable
from loramux.engine.quantizing.messages import QUALITY_FILE, Quality, QuantizeResult
from loramux.kernels.cpu.instructions import capability
from tests.conformance.tiny_models import SMALL_SHAPE
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
    (base.directory / QUALITY_FILE).write_bytes(msgspec.json.encode(quality))
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
    with pytest.raises(DeviceNotUsable, match="need a CPU, but this engine uses a GPU: omit --activations"):
        check_activations("cuda", is_quantized=True)


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
        check_activations("cpu", is_quantized=True)
