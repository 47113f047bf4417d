"""Converting an adapter of mlx-lm restores the PEFT adapter."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from loramux.adapter_store.errors import AdapterRejected
from loramux.adapter_store.formats.files import tensor_file
from loramux.adapter_store.formats.files.tensor_file import TensorFile
from loramux.adapter_store.formats.mlx import written_tensor
from loramux.adapter_store.formats.mlx.base_facts import BaseFacts
from loramux.adapter_store.formats.mlx.conversion import convert_mlx
from loramux.adapter_store.formats.packed.pack_target import PackTarget
from loramux.adapter_store.validation.validation import validate_files
from tests.adapter_store.adapter_files import AdapterMaker
from tests.adapter_store.formats.mlx.mlx_files import random_pair, write_mlx, write_tensors
from tests.adapter_store.small_base import HIDDEN, OUTER_MODULES, VOCAB_SIZE, make_target

TARGET = make_target()
MODULES = ("self_attn.q_proj", "mlp.down_proj")


def facts() -> BaseFacts:
    return BaseFacts.of(TARGET)


def no_facts() -> BaseFacts:
    raise AssertionError("only adapters of experts or of the embedding need facts about the base")


@pytest.mark.parametrize("use_dora", [False, True], ids=["LoRA", "DoRA"])
@pytest.mark.parametrize("dtype", [np.float32, np.float16])
def test_an_adapter_of_mlx_becomes_a_peft_adapter(tmp_path: Path, use_dora: bool, dtype: Any) -> None:
    files = AdapterMaker(TARGET)(rank=3, modules=MODULES, lora_alpha=7.5, use_dora=use_dora, dtype=dtype)
    convert_mlx(write_mlx(tmp_path / "mlx", files), tmp_path, no_facts)
    found = load_file(tmp_path / "adapter_model.safetensors")
    assert found.keys() == files.tensors.keys()
    for name, values in files.tensors.items():
        assert found[name].dtype == dtype
        np.testing.assert_array_equal(found[name], values, err_msg=name)
    config = (tmp_path / "adapter_config.json").read_bytes()
    report = validate_files(config, tmp_path / "adapter_model.safetensors", TARGET)
    assert report.scales == pytest.approx(validate_files(files.config_bytes, files.tensor_bytes, TARGET).scales)
    assert set(report.scales.values()) == {2.5}


def test_large_matrices_are_transposed_in_blocks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(written_tensor, "BLOCK_ELEMENTS", 50)
    monkeypatch.setattr(tensor_file, "BLOCK_ELEMENTS", 50)
    blocks: list[int] = []
    for method in ("raw_rows", "raw_columns"):
        read = getattr(TensorFile, method)

        def counted(self: TensorFile, name: str, part: range, read: Any = read) -> Any:
            values = read(self, name, part)
            blocks.append(values.size)
            return values

        monkeypatch.setattr(TensorFile, method, counted)
    files = AdapterMaker(TARGET)(rank=3, modules=MODULES)
    convert_mlx(write_mlx(tmp_path / "mlx", files), tmp_path, no_facts)
    assert max(blocks) <= 50
    found = load_file(tmp_path / "adapter_model.safetensors")
    for name, values in files.tensors.items():
        np.testing.assert_array_equal(found[name], values, err_msg=name)


@pytest.mark.parametrize(
    ("config", "param", "says"),
    [
        ({"r": 8}, "lora_parameters", "must be mlx-lm's"),
        ([], "lora_parameters", "must be mlx-lm's"),
        ({"fine_tune_type": "full", "lora_parameters": {"scale": 2.0}}, "fine_tune_type", "serve the model as a base"),
        ({"lora_parameters": {"rank": 4}}, "lora_parameters.scale", "positive number"),
        ({"lora_parameters": {"scale": True}}, "lora_parameters.scale", "positive number"),
        ({"lora_parameters": {"scale": 10**400}}, "lora_parameters.scale", "at most 65536$"),
        ({"lora_parameters": {"scale": 1e308}}, "lora_parameters.scale", "at most 65536$"),
        ({"lora_parameters": {"scale": 16385.0}}, "lora_parameters.scale", "for this rank, .* at most 16384$"),
        ({"lora_parameters": {"rank": 4, "alpha": 10**400, "scale": 1.0}}, "lora_parameters.alpha", "the product$"),
        ({"lora_parameters": {"rank": 10**400, "alpha": 8, "scale": 1.0}}, "lora_parameters.alpha", "the product$"),
        (
            {"lora_parameters": {"rank": 4, "alpha": 8, "scale": 10.0}},
            "lora_parameters.alpha",
            "releases of mlx-lm differ .* set scale to the product, 20$",
        ),
        ({"lora_parameters": {"alpha": 8, "scale": 10.0}}, "lora_parameters.alpha", "set scale to the product$"),
    ],
    ids=[
        "PEFT's",
        "list",
        "full",
        "no scale",
        "no number",
        "long",
        "large",
        "large for the rank",
        "long alpha",
        "long rank",
        "alpha",
        "alpha without rank",
    ],
)
def test_another_configuration_is_refused(tmp_path: Path, config: Any, param: str, says: str) -> None:
    directory = write_mlx(tmp_path / "mlx", AdapterMaker(TARGET)())
    (directory / "adapter_config.json").write_text(json.dumps(config))
    with pytest.raises(AdapterRejected, match=says) as refused:
        convert_mlx(directory, tmp_path, facts)
    assert refused.value.param == param


def test_an_alpha_without_effect_is_accepted(tmp_path: Path) -> None:
    convert_mlx(write_mlx(tmp_path / "mlx", AdapterMaker(TARGET)(rank=4), alpha=4), tmp_path, no_facts)
    assert json.loads((tmp_path / "adapter_config.json").read_text())["lora_alpha"] == 8.0


@pytest.mark.parametrize(
    ("name", "shape", "code", "says"),
    [
        ("model.layers.0.mlp.switch_mlp.up_proj.lora_a", (8, 4, 64), "missing_tensor", "has no lora_b"),
        ("model.embed_tokens.lora_a", (70, 4), "missing_tensor", "has no lora_b"),
        ("model.layers.0.self_attn.q_proj.weight", (64, 64), "unexpected_tensor", "only lora_a, lora_b and m"),
        ("model.layers.0.self_attn.k_proj.lora_a", (64, 5), "rank_mismatch", "ranks of the modules differ"),
        ("model.layers.0.self_attn.k_proj.lora_a", (64, 5, 1), "tensor_not_2d", "must have two dimensions"),
        ("vision_tower.q_proj.lora_a", (8,), "tensor_not_2d", "must have two dimensions"),
        ("vision_tower.q_proj.lora_b", (), "tensor_not_2d", "must have two dimensions"),
        ("vision_tower.q_proj.m", (2, 2), "wrong_dimensions", "must have one dimension"),
        ("model.layers.0.self_attn.k_proj.lora_a", (300, 257), "rank_out_of_range", "between 1 and 256"),
        ("model.layers.0.self_attn.k_proj.lora_b", (257, 300), "rank_out_of_range", "between 1 and 256"),
    ],
    ids=["experts", "embedding", "weight", "other rank", "3d", "vector", "scalar", "magnitudes", "A", "B"],
)
def test_tensors_that_cannot_be_served_are_named(
    tmp_path: Path, name: str, shape: tuple[int, ...], code: str, says: str
) -> None:
    directory = write_mlx(tmp_path / "mlx", AdapterMaker(TARGET)())
    path = directory / "adapters.safetensors"
    save_file({**load_file(path), name: np.ones(shape, np.float32)}, path)
    with pytest.raises(AdapterRejected, match=says) as refused:
        convert_mlx(directory, tmp_path, facts)
    assert refused.value.code == code
    assert not (tmp_path / "adapter_model.safetensors").exists()


def outer_target(is_tied: bool) -> PackTarget:
    return replace(make_target(outer_modules=OUTER_MODULES), tied_embeddings=is_tied)


@pytest.mark.parametrize("is_tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("prefix", ["", "language_model."])
def test_a_lora_of_the_embedding_also_changes_a_tied_head(tmp_path: Path, is_tied: bool, prefix: str) -> None:
    target = outer_target(is_tied)
    pair = random_pair(np.random.default_rng(0), VOCAB_SIZE, HIDDEN, rank=3)
    tensors = {f"{prefix}model.embed_tokens.{leaf}": values for leaf, values in pair.items()}
    convert_mlx(write_tensors(tmp_path / "mlx", tensors, rank=3, scale=2.5), tmp_path, lambda: BaseFacts.of(target))
    config = (tmp_path / "adapter_config.json").read_bytes()
    report = validate_files(config, tmp_path / "adapter_model.safetensors", target)
    stored = load_file(tmp_path / "adapter_model.safetensors")
    found = {name: stored[original].tolist() for name, original in report.names.items()}
    wanted = {
        "base_model.model.model.embed_tokens.lora_embedding_A": pair["lora_a"].T.tolist(),
        "base_model.model.model.embed_tokens.lora_embedding_B": pair["lora_b"].T.tolist(),
    }
    if is_tied:
        # The head's weight is the embedding's, [vocab_size, hidden_size], to which mlx-lm adds lora_a @ lora_b.
        wanted["base_model.model.lm_head.lora_A.weight"] = pair["lora_b"].tolist()
        wanted["base_model.model.lm_head.lora_B.weight"] = pair["lora_a"].tolist()
    assert found == wanted
    assert set(report.scales.values()) == {2.5}


def test_a_tied_head_has_no_lora_of_its_own(tmp_path: Path) -> None:
    generator = np.random.default_rng(0)
    sizes = {"model.embed_tokens": (VOCAB_SIZE, HIDDEN), "lm_head": (HIDDEN, VOCAB_SIZE)}
    tensors = {
        f"{module}.{leaf}": values
        for module, size in sizes.items()
        for leaf, values in random_pair(generator, *size, rank=3).items()
    }
    directory = write_tensors(tmp_path / "mlx", tensors, rank=3, scale=2.5)
    with pytest.raises(AdapterRejected, match="ties its head to its embedding") as refused:
        convert_mlx(directory, tmp_path, lambda: BaseFacts.of(outer_target(is_tied=True)))
    assert (refused.value.code, refused.value.param) == ("base_mismatch", "lm_head")
    convert_mlx(directory, tmp_path, lambda: BaseFacts.of(outer_target(is_tied=False)))
    report = validate_files(
        (tmp_path / "adapter_config.json").read_bytes(), tmp_path / "adapter_model.safetensors", outer_target(False)
    )
    assert report.scales == {"model.embed_tokens": 2.5, "lm_head": 2.5}


def test_a_dora_of_the_embedding_is_refused(tmp_path: Path) -> None:
    pair = random_pair(np.random.default_rng(0), VOCAB_SIZE, HIDDEN, rank=3)
    tensors = {f"model.embed_tokens.{leaf}": values for leaf, values in pair.items()}
    tensors["model.embed_tokens.m"] = np.ones(VOCAB_SIZE, np.float32)
    directory = write_tensors(tmp_path / "mlx", tensors, "dora", rank=3, scale=2.5)
    with pytest.raises(AdapterRejected, match="a magnitude for each token, and PEFT's for each feature") as refused:
        convert_mlx(directory, tmp_path, facts)
    assert (refused.value.code, refused.value.param) == ("unsupported_config", "model.embed_tokens")
