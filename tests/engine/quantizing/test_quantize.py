"""A float model is quantised to the nearest codes, block by block, and kept only when it is complete."""

from __future__ import annotations

import copy
import shutil
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch
from msgspec import structs
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig, LlamaForCausalLM

from loramux.adapter_store.errors import AdapterUnavailable
from loramux.adapter_store.formats.quantization.base_weights import BaseWeights
from loramux.engine.architectures.model_config import ModelConfig
from loramux.engine.loop.config import EngineConfig
from loramux.engine.protocol.errors import ConfigNotUsable, ModelNotSupported
from loramux.engine.quantizing import quality
from loramux.engine.quantizing import quantize as quantizing
from loramux.engine.quantizing.messages import QUALITY_FILES, Quality, QuantizeJob
from loramux.engine.quantizing.process import run
from loramux.engine.quantizing.quality import measure_quality
from loramux.engine.quantizing.quantize import quantize, quantized_directory, quantized_names
from loramux.engine.quantizing.reading import reading_text
from tests.conformance.tiny_models import SMALL_SHAPE, make_base
from tests.quantized_layouts import LAYOUTS, quantize_directory

STEPS = {"int8": 0.5 / 127, "int4": 1 / 15, "fp8": 1 / 16}
"""Half a step between codes, relative to the largest weight of the group.

An int4 step is about a 15th of the range, which is at most twice the largest weight.
"""

Q = "model.layers.1.self_attn.q_proj"
OTHERS = ("model.embed_tokens", "lm_head")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("model")
    torch.manual_seed(1)
    shape = {**SMALL_SHAPE, "intermediate_size": 96}
    LlamaForCausalLM(LlamaConfig(**shape)).bfloat16().save_pretrained(directory)
    return directory


@pytest.mark.parametrize("method", STEPS)
def test_codes_are_the_nearest_values(
    model: Path, tmp_path: Path, method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Several blocks for each weight.
    monkeypatch.setattr(quantizing, "_BLOCK_ELEMENTS", 1000)
    calls: list[tuple[int, int]] = []
    quantize(model, tmp_path / "new", method, lambda done, total: calls.append((done, total)))
    assert calls[-1][0] == calls[-1][1] == 2 * (128 * 128 * 2 + 128 * 32 * 2 + 128 * 96 * 3)
    assert [done for done, _ in calls] == sorted(done for done, _ in calls)
    assert [path.name for path in tmp_path.iterdir()] == ["new"]
    floats, quantized = BaseWeights(model), BaseWeights(model, tmp_path / "new")
    wanted, found = floats.rows(Q, 0, 128), quantized.rows(Q, 0, 128)
    group = 32 if method == "int4" else 128
    largest = np.abs(wanted).reshape(128, -1, group).max(2).repeat(group, axis=1)
    error = np.abs(found - wanted) / largest
    # int4 clips some weights, where that makes the error of the whole group smaller.
    assert error.max() <= (3 if method == "int4" else 1) * STEPS[method] + 1e-6
    # The nearest of evenly spaced codes is a quarter of a step away on average.
    assert error.mean() < 0.55 * STEPS[method]
    for name in OTHERS:
        np.testing.assert_array_equal(quantized.rows(name, 0, 9), floats.rows(name, 0, 9))
    assert floats.fingerprint != quantized.fingerprint


@pytest.mark.parametrize("is_tied", [False, True], ids=["own-head", "tied-head"])
def test_the_head_is_quantised_to_8_bits_only_if_asked(tmp_path: Path, is_tied: bool) -> None:
    base = tmp_path / "base"
    shape = {**SMALL_SHAPE, "intermediate_size": 96, "tie_word_embeddings": is_tied}
    LlamaForCausalLM(LlamaConfig(**shape)).bfloat16().save_pretrained(base)
    floats, config = BaseWeights(base), EngineConfig(model_dir=str(base), blob_url="", cache_dir="", dtype="float32")
    for method in ("int8+head", "int4+head"):
        quantize(base, tmp_path / method, method, lambda done, total: None)
        quantized = BaseWeights(base, tmp_path / method)
        wanted, found = floats.rows("lm_head", 0, 128), quantized.rows("lm_head", 0, 128)
        error = np.abs(found - wanted) / np.abs(wanted).max(1, keepdims=True)
        assert 0 < error.max() <= STEPS["int8"] + 1e-6
        embeddings = [one.rows("model.embed_tokens", 0, 9) for one in (floats, quantized)]
        np.testing.assert_array_equal(*embeddings)
    config = structs.replace(config, num_threads=1, quantized_dir=str(tmp_path / "int8+head"))
    found_quality = measure_quality(config, "int8+head", (5, 6, 7, 8))
    assert found_quality is not None
    assert 0 < found_quality.divergence < 0.05
    assert 0.9 < found_quality.perplexity / found_quality.float_perplexity < 1.1


def copy_with(model: Path, directory: Path, name: str, tensor: torch.Tensor) -> Path:
    shutil.copytree(model, directory)
    save_file(load_file(model / "model.safetensors") | {name: tensor}, directory / "model.safetensors")
    return directory


def test_zeros_stay_zeros(model: Path, tmp_path: Path) -> None:
    base = copy_with(model, tmp_path / "zeros", f"{Q}.weight", torch.zeros(128, 128))
    for method in STEPS:
        quantize(base, tmp_path / method, method, lambda done, total: None)
        assert not BaseWeights(base, tmp_path / method).rows(Q, 0, 128).any()


def test_int4_takes_five_bits_and_stores_the_minimum_of_each_group(model: Path, tmp_path: Path) -> None:
    quantize(model, tmp_path / "new", "int4", lambda done, total: None)
    tensors = load_file(tmp_path / "new" / "model.safetensors")
    module = "model.layers.0.mlp.gate_proj"
    assert tensors[f"{module}.weight_scale"].dtype is torch.float16
    assert tensors[f"{module}.weight_minimum"].shape == (96, 4)
    parts = [tensors[f"{module}.{name}"].nbytes for name in ("weight_packed", "weight_scale", "weight_minimum")]
    assert 8 * sum(parts) == 5 * 96 * 128


def test_sensitive_weights_of_an_int4_model_get_8_bits(model: Path, tmp_path: Path) -> None:
    quantize(model, tmp_path / "new", "int4", lambda done, total: None)
    tensors = load_file(tmp_path / "new" / "model.safetensors")
    eights = {name.removesuffix(".weight") for name, tensor in tensors.items() if tensor.dtype is torch.int8}
    fours = {name.removesuffix(".weight_packed") for name in tensors if name.endswith(".weight_packed")}
    assert eights
    assert not eights & fours
    assert {f"{name}.weight" for name in eights | fours} == set(quantized_names(ModelConfig.load(model)))
    four_bits = sum(tensors[name].nbytes for name in tensors if name.rpartition(".")[0] in fours)
    all_bits = 8 * sum(it.nbytes for name, it in tensors.items() if not name.endswith("_shape"))
    num_weights = sum(torch.Size(tensors[f"{name}.weight_shape"]).numel() for name in fours)
    num_weights += sum(tensors[f"{name}.weight"].numel() for name in eights)
    assert 8 * four_bits / num_weights < 5
    assert all_bits / num_weights < 5.6


def test_int4_without_its_minima_is_refused(model: Path, tmp_path: Path) -> None:
    quantize(model, tmp_path / "new", "int4", lambda done, total: None)
    path = tmp_path / "new" / "model.safetensors"
    module = "model.layers.0.mlp.gate_proj"
    whole = load_file(path)
    save_file({name: it for name, it in whole.items() if name != f"{module}.weight_minimum"}, path)
    with pytest.raises(AdapterUnavailable, match=f"no tensor {module}.weight_zero_point"):
        BaseWeights(model, tmp_path / "new").rows(module, 0, 1)
    save_file({**whole, f"{module}.weight_minimum": torch.zeros(96, 2).half()}, path)
    with pytest.raises(AdapterUnavailable, match=r"weight_minimum has shape \[96, 2\], not \[96, 4\]"):
        BaseWeights(model, tmp_path / "new").rows(module, 0, 1)


def test_weights_too_large_for_float16_scales_are_refused_with_advice(model: Path, tmp_path: Path) -> None:
    base = copy_with(model, tmp_path / "huge", f"{Q}.weight", torch.randn(128, 128) * 1e8)
    quantize(base, tmp_path / "eight", "int8", lambda done, total: None)
    with pytest.raises(ModelNotSupported, match="too large for 4 bits: use --quantization int8"):
        quantize(base, tmp_path / "four", "int4", lambda done, total: None)


def test_a_refused_model_leaves_nothing(model: Path, tmp_path: Path) -> None:
    base = copy_with(model, tmp_path / "inf", f"{Q}.weight", torch.full((128, 128), float("inf")))
    with pytest.raises(ModelNotSupported, match=f"{Q}.weight contains a value that is not finite"):
        quantize(base, tmp_path / "kept" / "new", "int8", lambda done, total: None)
    assert list((tmp_path / "kept").iterdir()) == []


def test_quantised_weights_are_not_quantised_again(tmp_path: Path) -> None:
    llama = LlamaForCausalLM(LlamaConfig(**{**SMALL_SHAPE, "intermediate_size": 128}))
    llama.save_pretrained(tmp_path)
    quantize_directory(llama, tmp_path, LAYOUTS["awq"])
    with pytest.raises(ConfigNotUsable, match=r"already quantised \(awq int4\): omit --quantization"):
        quantize(tmp_path, tmp_path / "new", "int8", lambda done, total: None)


def test_groups_that_do_not_divide_are_refused_with_advice(tmp_path: Path) -> None:
    shape = {**SMALL_SHAPE, "intermediate_size": 104}
    LlamaForCausalLM(LlamaConfig(**shape)).save_pretrained(tmp_path)
    with pytest.raises(ModelNotSupported, match=r"104 inputs, which is not a multiple of 16: use --quantization int8"):
        quantize(tmp_path, tmp_path / "new", "int4", lambda done, total: None)


def test_a_full_disk_is_refused_before_anything_is_written(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(1, 1, 5))
    with pytest.raises(ConfigNotUsable, match="has 5 bytes free"):
        quantize(model, tmp_path / "new", "int8", lambda done, total: None)
    assert list(tmp_path.iterdir()) == []


def test_the_directory_depends_on_weights_and_method(model: Path, tmp_path: Path) -> None:
    other = copy_with(model, tmp_path / "other", f"{Q}.weight", torch.ones(128, 128))
    paths = [quantized_directory(tmp_path, base, method) for base in (model, other) for method in STEPS]
    assert len(set(paths)) == 6
    assert quantized_directory(tmp_path, model, "int4") == paths[1]


def test_kept_weights_and_their_quality_are_used_again(model: Path, tmp_path: Path) -> None:
    config = EngineConfig(model_dir=str(model), blob_url="", cache_dir="", dtype="float32", num_threads=1)
    found = {}
    for method in ("int8", "int4"):
        job = QuantizeJob(config=config, root=str(tmp_path), method=method, text=tuple(range(2, 60)))
        result = run(job)
        assert result.quality is not None
        found[method] = result.quality
        stored = Path(result.directory) / QUALITY_FILES[None]
        assert msgspec.json.decode(stored.read_bytes(), type=Quality) == result.quality
        changed = structs.replace(result.quality, divergence=0.5)
        stored.write_bytes(msgspec.json.encode(changed))
        assert run(job).quality == changed
        stored.write_text("0.5")
        assert run(job).quality == result.quality
    # A 4-bit model is further from the float model than an 8-bit model.
    assert 0 < found["int8"].divergence < 0.1 * found["int4"].divergence
    assert found["int8"].float_perplexity == found["int4"].float_perplexity


def test_quality_equals_that_of_transformers(model: Path, tmp_path: Path) -> None:
    text = tuple(range(2, 60))
    config = EngineConfig(model_dir=str(model), blob_url="", cache_dir="", dtype="float32", num_threads=1)
    measured = run(QuantizeJob(config=config, root=str(tmp_path), method="int4", text=text)).quality
    directory = quantized_directory(tmp_path, model, "int4")
    float_model = LlamaForCausalLM.from_pretrained(model, dtype=torch.float32)
    changed = copy.deepcopy(float_model)
    weights = BaseWeights(model, directory)
    for name in quantized_names(ModelConfig.load(model)):
        module = name.removesuffix(".weight")
        parameter = changed.get_submodule(module).weight
        parameter.data.copy_(torch.from_numpy(weights.rows(module, 0, len(parameter))))
    with torch.no_grad():
        p, q = (one(torch.tensor([text])).logits[0].double().log_softmax(1) for one in (float_model, changed))
    assert measured is not None
    assert measured.divergence == pytest.approx(float((p.exp() * (p - q)).sum(1).mean()), rel=1e-3)
    for found, logs in ((measured.float_perplexity, p), (measured.perplexity, q)):
        expected = torch.nn.functional.nll_loss(logs[:-1], torch.tensor(text[1:])).exp()
        assert found == pytest.approx(float(expected), rel=1e-4)


def test_activations_in_int8_have_a_quality_of_their_own(model: Path, tmp_path: Path) -> None:
    """The other settings of K and V do not matter, nor do more threads than this machine has."""
    config = EngineConfig(model_dir=str(model), blob_url="", cache_dir="", dtype="float32", num_threads=4096)
    text = tuple(range(2, 60))
    usual = QuantizeJob(config=config, root=str(tmp_path), method="int4", text=text)
    first = run(usual)
    rounded = run(structs.replace(usual, config=structs.replace(config, activations="int8", kv_dtype="int8")))
    assert rounded.directory == first.directory
    assert rounded.quality is not None
    assert first.quality is not None
    assert (first.quality.activations, rounded.quality.activations) == (None, "int8")
    assert rounded.quality.divergence != first.quality.divergence
    assert rounded.quality.float_perplexity == first.quality.float_perplexity
    assert run(usual).quality == first.quality


def test_predictions_that_are_not_finite_have_no_quality(model: Path, tmp_path: Path) -> None:
    name = "lm_head.weight"
    head = load_file(model / "model.safetensors")[name]
    head[5] = float("nan")
    base = copy_with(model, tmp_path / "nan", name, head)
    config = EngineConfig(model_dir=str(base), blob_url="", cache_dir="", dtype="float32", num_threads=1)
    result = run(QuantizeJob(config=config, root=str(tmp_path / "kept"), method="int8", text=(5, 6, 7)))
    assert result.quality is None
    assert not (Path(result.directory) / QUALITY_FILES[None]).exists()


def test_a_long_text_is_cut_off_at_the_context_and_at_the_logits(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = EngineConfig(model_dir=str(model), blob_url="", cache_dir="", dtype="float32", num_threads=1)
    quantize(model, tmp_path / "new", "int8", lambda done, total: None)
    config = structs.replace(config, quantized_dir=str(tmp_path / "new"))
    longest = ModelConfig.load(model).max_model_len
    text = tuple(torch.randint(2, 100, (longest + 9,), generator=torch.Generator().manual_seed(2)).tolist())
    assert measure_quality(config, "int8", text) == measure_quality(config, "int8", text[:longest])
    monkeypatch.setattr(quality, "MAX_LOGITS", 40 * ModelConfig.load(model).vocab_size)
    assert measure_quality(config, "int8", text) == measure_quality(config, "int8", text[:40])
    assert measure_quality(config, "int8", text[:1]) is None


@pytest.mark.parametrize(
    ("family", "last"), [("qwen2-moe", "mlp.shared_expert.down_proj"), ("gpt-oss", "self_attn.o_proj")]
)
def test_routers_and_experts_stay_floats(tmp_path: Path, family: str, last: str) -> None:
    make_base(family, tmp_path, SMALL_SHAPE)
    names = [name for name in quantized_names(ModelConfig.load(tmp_path)) if name.startswith("model.layers.1.")]
    assert names[0] == "model.layers.1.self_attn.q_proj.weight"
    assert names[-1] == f"model.layers.1.{last}.weight"


def test_the_quality_of_a_hybrid_decoder_is_measured(tmp_path: Path) -> None:
    make_base("qwen3_5", tmp_path / "base", SMALL_SHAPE)
    config = EngineConfig(model_dir=str(tmp_path / "base"), blob_url="", cache_dir="", dtype="float32", num_threads=1)
    result = run(QuantizeJob(config=config, root=str(tmp_path), method="int8", text=tuple(range(2, 40))))
    assert result.quality is not None
    assert 0 < result.quality.divergence < 0.01


def test_the_text_is_long_enough() -> None:
    assert 1000 < len(reading_text().split()) < 2000
