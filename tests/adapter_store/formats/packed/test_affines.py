"""Gains and shifts from the base's files equal the gains and shifts of dense matrices."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from loramux.adapter_store.errors import AdapterCorrupt, AdapterRejected, AdapterUnavailable
from loramux.adapter_store.formats.packed import affines
from loramux.adapter_store.formats.packed.affines import dora_affine
from loramux.adapter_store.formats.packed.canonical import write_canonical
from loramux.adapter_store.formats.packed.module_places import ModulePlace
from loramux.adapter_store.formats.packed.pack_target import PackTarget
from loramux.adapter_store.formats.packed.packed_file import write_packed
from loramux.adapter_store.formats.packed.packing import needs_base, pack
from loramux.adapter_store.formats.quantization.base_weights import BaseWeights
from loramux.adapter_store.validation.validation import validate_files
from loramux.kernels.layout import LinearShape
from tests.adapter_store.packed_files import read_packed

Q = ModulePlace("model.layers.0.self_attn.q_proj", 0, 0, LinearShape("self_attn.q_proj", 24, 40), "self_attn.q_proj")
EMBEDDING = ModulePlace(
    "model.embed_tokens", None, 0, LinearShape("model.embed_tokens", 70, 24, is_embedding=True), "embedding"
)
HEAD = ModulePlace("lm_head", None, 1, LinearShape("lm_head", 24, 70), "lm_head")


def tensors(dtype: torch.dtype) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    shapes = {f"{Q.key}.weight": (40, 24), f"{Q.key}.bias": (40,), f"{EMBEDDING.key}.weight": (70, 24)}
    return {name: torch.randn(shape, generator=generator).to(dtype) for name, shape in shapes.items()}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("place", [Q, EMBEDDING, HEAD], ids=lambda place: place.key)
def test_equals_dense_matrices(
    place: ModulePlace, dtype: torch.dtype, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Read a few rows at a time.
    monkeypatch.setattr(affines, "_BLOCK_ELEMENTS", 100)
    base = tensors(dtype)
    save_file(base, tmp_path / "model.safetensors")
    generator = np.random.default_rng(0)
    A = generator.standard_normal((4, place.shape.in_features), np.float32)
    B = generator.standard_normal((place.shape.out_features, 4), np.float32)
    magnitude = generator.uniform(-2, 2, place.shape.out_features).astype(np.float32)
    gain, shift = dora_affine(place, A, B, 0.7, magnitude, BaseWeights(tmp_path))
    # The head is tied to the embedding.
    name = EMBEDDING.key if place is HEAD else place.key
    weight = base[f"{name}.weight"].double().numpy()
    changed = (weight.T if place is EMBEDDING else weight) + 0.7 * (B.astype(np.float64) @ A)
    expected = magnitude / np.linalg.norm(changed, axis=1) - 1
    np.testing.assert_allclose(gain, expected, rtol=1e-4, atol=1e-5)
    bias = base[f"{Q.key}.bias"].double().numpy() if place is Q else 0.0
    np.testing.assert_allclose(shift, -expected * bias, rtol=1e-4, atol=1e-5)


def test_weights_in_several_files_are_found(tmp_path: Path) -> None:
    base = tensors(torch.float32)
    names = sorted(base)
    save_file({names[0]: base[names[0]]}, tmp_path / "a.safetensors")
    save_file({name: base[name] for name in names[1:]}, tmp_path / "b.safetensors")
    weight_map = {name: "a.safetensors" if name == names[0] else "b.safetensors" for name in names}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    (tmp_path / "whole").mkdir()
    save_file(base, tmp_path / "whole" / "model.safetensors")
    weights = BaseWeights(tmp_path)
    np.testing.assert_array_equal(weights.rows(Q.key, 3, 9), base[f"{Q.key}.weight"][3:9].numpy())
    assert weights.fingerprint == BaseWeights(tmp_path / "whole").fingerprint


def test_fingerprint_depends_on_the_values(tmp_path: Path) -> None:
    fingerprints = set()
    for index, name in enumerate([None, f"{Q.key}.weight", f"{Q.key}.bias"]):
        base = tensors(torch.float32)
        if name is not None:
            base[name][-1] += 1
        directory = tmp_path / str(index)
        directory.mkdir()
        save_file(base, directory / "model.safetensors")
        fingerprints.add(BaseWeights(directory).fingerprint)
    assert len(fingerprints) == 3


@pytest.mark.parametrize("content", [None, b"", b"\xff" * 40], ids=["missing", "empty", "garbage"])
def test_unreadable_base_makes_the_adapter_unavailable(content: bytes | None, tmp_path: Path) -> None:
    if content is not None:
        (tmp_path / "model.safetensors").write_bytes(content)
    with pytest.raises(AdapterUnavailable, match="the base's weights cannot be read"):
        BaseWeights(tmp_path).rows(Q.key, 0, 1)


def test_output_without_weights_has_no_gain(tmp_path: Path) -> None:
    base = tensors(torch.float32)
    base[f"{Q.key}.weight"][5] = 0
    save_file(base, tmp_path / "model.safetensors")
    A, B = np.ones((1, 24), np.float32), np.zeros((40, 1), np.float32)
    with pytest.raises(AdapterRejected, match="weights that are all zero") as refused:
        dora_affine(Q, A, B, 1.0, np.ones(40, np.float32), BaseWeights(tmp_path))
    assert refused.value.param == Q.magnitude_name


def test_packed_file_records_the_base_that_its_gains_belong_to(
    target: PackTarget, adapter_maker: Any, tmp_path: Path
) -> None:
    base = {
        f"model.layers.{layer}.{shape.name}.weight": torch.randn(shape.out_features, shape.in_features)
        for layer in range(2)
        for shape in target.modules
    }
    save_file(base, tmp_path / "model.safetensors")
    weights = BaseWeights(tmp_path)
    for features, expected in (({"use_dora": True}, weights.fingerprint), ({"lora_bias": True}, None), ({}, None)):
        files = adapter_maker(target)(**features)
        report = validate_files(files.config_bytes, files.tensor_bytes, target)
        assert report.features == tuple(features)
        write_canonical(files.tensor_bytes, report.scales, tmp_path / "canonical")
        assert needs_base(tmp_path / "canonical") == (expected is not None)
        packed = pack(tmp_path / "canonical", target, weights)
        assert packed.base == expected
        assert packed.layout.has_affines == bool(features)
        assert packed.num_pages == report.num_pages
        write_packed(tmp_path / "packed", packed, target)
        found = read_packed(tmp_path / "packed", target)
        assert (found.base, found.layout.has_affines) == (expected, bool(features))
        np.testing.assert_array_equal(found.layout.offsets, packed.layout.offsets)
        np.testing.assert_array_equal(found.payload, packed.payload)
        damaged = bytearray((tmp_path / "packed").read_bytes())
        # The last module's shift is the last row that is not padding.
        payload = packed.payload.view(target.storage_dtype)[:, 1].reshape(-1)
        last = int(np.flatnonzero(payload)[-1])
        page, element = divmod(last, target.geometry.adapter_elements)
        place = (page * 2 + 1) * target.geometry.page_bytes + element * target.storage_dtype.itemsize
        damaged[4096 + place] ^= 1
        (tmp_path / "packed").write_bytes(damaged)
        with pytest.raises(AdapterCorrupt, match="pages of the packed file are damaged"):
            read_packed(tmp_path / "packed", target)
