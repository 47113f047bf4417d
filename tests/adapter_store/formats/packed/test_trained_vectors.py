"""Biases and norms that replace the base's become gains and shifts."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from loramux.adapter_store.errors import AdapterRejected
from loramux.adapter_store.formats.packed.canonical import write_canonical
from loramux.adapter_store.formats.packed.pack_target import PackTarget
from loramux.adapter_store.formats.packed.packed_file import write_packed
from loramux.adapter_store.formats.packed.packing import PackedAdapter, needs_base, pack
from loramux.adapter_store.formats.quantization.base_weights import BaseWeights
from loramux.adapter_store.validation.report import Report
from loramux.adapter_store.validation.validation import validate_files
from loramux.kernels.layout import AFFINE, NormShape, part_layout
from tests.adapter_store.adapter_files import AdapterFiles, AdapterMaker
from tests.adapter_store.packed_files import read_packed
from tests.adapter_store.small_base import HEAD_DIM, HEADS, HIDDEN, MODULES, OUTER_MODULES, VOCAB_SIZE, make_target

PREFIX = "base_model.model."
INPUT, QUERY, FINAL = "input_layernorm", "self_attn.q_norm", "model.norm"
NORMS = (
    NormShape(INPUT, HIDDEN, offset=1.0, has_bias=True),
    NormShape(QUERY, HEAD_DIM, repeats=HEADS, layers=(1,)),
    NormShape(FINAL, HIDDEN, layers=(1,)),
)
BIASED = ("self_attn.q_proj", "self_attn.o_proj")


def target() -> PackTarget:
    """A base whose q, o and head have biases, and whose first norm has a bias and an offset."""
    modules = tuple(replace(module, has_bias=module.name in BIASED) for module in MODULES)
    embedding, head = OUTER_MODULES
    return replace(make_target(modules=modules, outer_modules=(embedding, replace(head, has_bias=True))), norms=NORMS)


TARGET = target()


def base(directory: Path, without: str = "", **changes: torch.Tensor) -> tuple[BaseWeights, dict[str, np.ndarray]]:
    generator = torch.Generator().manual_seed(1)
    shapes = {"lm_head.bias": (VOCAB_SIZE,), f"{FINAL}.weight": (HIDDEN,), "lm_head.weight": (VOCAB_SIZE, HIDDEN)}
    for layer in range(2):
        above = f"model.layers.{layer}."
        shapes |= {f"{above}{name}.bias": (HIDDEN,) for name in (*BIASED, INPUT)}
        shapes |= {f"{above}{module.name}.weight": (module.out_features, module.in_features) for module in MODULES}
        shapes |= {f"{above}{INPUT}.weight": (HIDDEN,), f"{above}{QUERY}.weight": (HEAD_DIM,)}
    tensors = {name: torch.randn(shape, generator=generator) for name, shape in shapes.items() if name != without}
    tensors |= changes
    save_file(tensors, directory / "model.safetensors")
    return BaseWeights(directory), {name: tensor.numpy() for name, tensor in tensors.items()}


def vector(name: str, size: int = HIDDEN) -> dict[str, np.ndarray]:
    seed = sum(name.encode())
    return {PREFIX + name: np.random.default_rng(seed).standard_normal(size).astype(np.float32)}


def made(tensors: dict[str, np.ndarray], **config: Any) -> AdapterFiles:
    files = AdapterMaker(TARGET)(modules=("self_attn.q_proj", "mlp.up_proj"), **config)
    files.tensors |= tensors
    return files


def validated(files: AdapterFiles, into: PackTarget = TARGET) -> Report:
    return validate_files(files.config_bytes, files.tensor_bytes, into)


def packed(files: AdapterFiles, directory: Path, weights: BaseWeights) -> PackedAdapter:
    report = validated(files)
    write_canonical(files.tensor_bytes, report.scales, directory / "canonical", report.names, (), report.trained)
    found = pack(directory / "canonical", TARGET, weights)
    # The pages of trained rows are an upper bound.
    assert found.num_pages == report.num_pages or (report.trained and found.num_pages < report.num_pages)
    write_packed(directory / "packed", found, TARGET)
    assert np.array_equal(read_packed(directory / "packed", TARGET).payload, found.payload)
    return found


def affine(found: PackedAdapter, name: str, layer: int | None) -> np.ndarray:
    """The gain and shift of a module, float32 `[2, out_features]`."""
    modules, geometry = TARGET.all_modules, TARGET.geometry
    pages = found.payload.view(np.float32)
    if layer is None:
        modules, geometry = TARGET.outer_modules, TARGET.geometry.flat
        stream = pages[: found.layout.num_outer_pages].reshape(-1)
    else:
        stream = pages[:, layer].reshape(-1)
    index = [module.name for module in modules].index(name)
    rank, offsets = found.layout.rank_and_offsets(layer, index)
    assert rank
    part = part_layout(modules[index], AFFINE, rank, geometry.adapter_elements)
    begin = offsets[AFFINE]
    return stream[begin : begin + part.num_elements].reshape(2, -1)[:, : modules[index].out_features]


def test_trained_biases_shift_the_outputs(tmp_path: Path) -> None:
    weights, stored = base(tmp_path)
    tensors = {
        **vector("model.layers.0.self_attn.q_proj.base_layer.bias"),
        **vector("model.layers.1.self_attn.o_proj.bias"),
        **vector("lm_head.bias", VOCAB_SIZE),
    }
    found = packed(made(tensors, bias="all", lora_bias=True), tmp_path, weights)
    for name, layer in (("self_attn.q_proj", 0), ("self_attn.o_proj", 1), ("lm_head", None)):
        key = name if layer is None else f"model.layers.{layer}.{name}"
        new = next(values for tensor, values in tensors.items() if tensor.startswith(f"{PREFIX}{key}."))
        expected = new - stored[f"{key}.bias"]
        if name == "self_attn.q_proj":
            expected += 2 * made({}, lora_bias=True).tensors[f"{PREFIX}{key}.lora_B.bias"]
        gain, shift = affine(found, name, layer)
        assert not gain.any()
        np.testing.assert_allclose(shift, expected, rtol=1e-5, atol=1e-6)
    # Nothing else changes but the modules with a LoRA.
    assert np.count_nonzero(found.layout.ranks) == 2 * 2 + 1
    assert np.count_nonzero(found.layout.outer_ranks) == 1


def test_a_trained_bias_beside_dora_is_not_scaled(tmp_path: Path) -> None:
    weights, stored = base(tmp_path)
    key = "model.layers.0.self_attn.q_proj"
    tensors = vector(f"{key}.base_layer.bias")
    gain, shift = affine(
        packed(made(tensors, bias="lora_only", use_dora=True), tmp_path, weights), "self_attn.q_proj", 0
    )
    (new,) = tensors.values()
    # (1 + gain) b + shift is the new bias.
    np.testing.assert_allclose((1 + gain) * stored[f"{key}.bias"] + shift, new, rtol=1e-5, atol=1e-5)


def test_trained_norms_scale_and_shift_the_outputs(tmp_path: Path) -> None:
    weights, stored = base(tmp_path)
    names = {f"model.layers.{layer}.{INPUT}.{part}": HIDDEN for layer in range(2) for part in ("weight", "bias")}
    names |= {f"model.layers.1.{QUERY}.weight": HEAD_DIM, f"{FINAL}.weight": HIDDEN}
    tensors = {name: values for one, size in names.items() for name, values in vector(one, size).items()}
    # In PEFT, a name stands for all modules whose names end with it.
    found = packed(made(tensors, modules_to_save=["norm"]), tmp_path, weights)
    for name, layer, offset, repeats in (
        (INPUT, 0, 1.0, 1),
        (INPUT, 1, 1.0, 1),
        (QUERY, 1, 0.0, HEADS),
        (FINAL, 1, 0.0, 1),
    ):
        key = FINAL if name == FINAL else f"model.layers.{layer}.{name}"
        old_bias, new_bias = stored.get(f"{key}.bias", 0.0), tensors.get(f"{PREFIX}{key}.bias", 0.0)
        normed = np.random.default_rng(2).standard_normal(HIDDEN)
        parts = normed.reshape(repeats, -1)
        before = (parts * (stored[f"{key}.weight"] + offset) + old_bias).reshape(-1)
        after = (parts * (tensors[f"{PREFIX}{key}.weight"] + offset) + new_bias).reshape(-1)
        gain, shift = affine(found, name, layer)
        np.testing.assert_allclose(before + gain * before + shift, after, rtol=1e-4, atol=1e-4)


def test_a_trained_bias_of_a_norm_keeps_its_weight(tmp_path: Path) -> None:
    weights, stored = base(tmp_path)
    key = f"model.layers.1.{INPUT}.bias"
    tensors = vector(key)
    gain, shift = affine(packed(made(tensors, bias="all"), tmp_path, weights), INPUT, 1)
    assert not gain.any()
    np.testing.assert_allclose(shift, tensors[PREFIX + key] - stored[key], rtol=1e-5, atol=1e-6)


def test_such_an_adapter_is_packed_for_its_base(tmp_path: Path) -> None:
    weights, _ = base(tmp_path)
    plain, biased = made({}), made(vector("lm_head.bias", VOCAB_SIZE), bias="all")
    for files, needs in ((plain, False), (biased, True)):
        found = packed(files, tmp_path, weights)
        assert needs_base(tmp_path / "canonical") == needs
        assert found.base == (weights.fingerprint if needs else None)
        assert found.layout.has_affines == needs
    assert validated(plain).features == ()
    assert validated(biased).features == ("bias",)
    assert validated(biased).num_pages > validated(plain).num_pages
    assert validated(made(vector(f"{FINAL}.weight"), modules_to_save=[FINAL])).features == ("modules_to_save",)


def test_an_adapter_without_vectors_has_the_same_pages_as_before_the_base_listed_norms(tmp_path: Path) -> None:
    weights, _ = base(tmp_path)
    before = replace(make_target(), outer_modules=OUTER_MODULES)
    files = made({})
    found = packed(files, tmp_path, weights)
    expected = pack(tmp_path / "canonical", before)
    assert np.array_equal(found.payload, expected.payload)
    assert np.array_equal(found.layout.offsets[:, : len(MODULES)], expected.layout.offsets)


def test_documents_list_norms_and_biases_only_if_there_are_any() -> None:
    assert PackTarget.from_document(TARGET.document()) == TARGET
    plain = make_target()
    assert "norms" not in plain.document()
    assert all("has_bias" not in module for module in plain.document()["modules"])
    assert TARGET.pack_key != plain.pack_key


def test_the_largest_adapter_has_all_norms_and_biases() -> None:
    plain = replace(make_target(), outer_modules=OUTER_MODULES)
    biases = 2 * HIDDEN * 2 + VOCAB_SIZE
    norms = 2 * (2 * HIDDEN + HEAD_DIM + HIDDEN)
    assert TARGET.max_tensors_bytes - plain.max_tensors_bytes == 4 * (biases + norms)
    assert TARGET.max_pages >= plain.max_pages


@pytest.mark.parametrize(
    ("without", "changes", "param"),
    [
        pytest.param("lm_head.bias", {}, PREFIX + "lm_head.bias", id="no bias"),
        pytest.param(f"{FINAL}.weight", {}, FINAL, id="no norm"),
        pytest.param("", {f"{FINAL}.weight": torch.zeros(HIDDEN)}, f"{PREFIX}{FINAL}.weight", id="a norm of zeros"),
        pytest.param("", {f"{FINAL}.weight": torch.ones(HIDDEN + 1)}, FINAL, id="a wider norm"),
    ],
)
def test_a_base_without_the_vector_is_refused(
    without: str, changes: dict[str, torch.Tensor], param: str, tmp_path: Path
) -> None:
    weights, _ = base(tmp_path, without, **changes)
    tensors = {**vector("lm_head.bias", VOCAB_SIZE), **vector(f"{FINAL}.weight")}
    with pytest.raises(AdapterRejected) as refused:
        packed(made(tensors, bias="all", modules_to_save=[FINAL]), tmp_path, weights)
    assert (refused.value.code, refused.value.param) == ("base_mismatch", param)


def test_a_channel_that_is_off_in_both_norms_stays_off(tmp_path: Path) -> None:
    weight = torch.ones(HIDDEN)
    weight[3] = 0
    weights, _ = base(tmp_path, **{f"{FINAL}.weight": weight})
    tensors = {f"{PREFIX}{FINAL}.weight": 3 * weight.numpy()}
    gain, _ = affine(packed(made(tensors, modules_to_save=[FINAL]), tmp_path, weights), FINAL, 1)
    assert (gain == np.where(weight == 0, 0, 2)).all()


BIAS = PREFIX + "model.layers.0.self_attn.q_proj.base_layer.bias"


@pytest.mark.parametrize(
    ("tensors", "config", "code", "param"),
    [
        pytest.param(vector(BIAS.removeprefix(PREFIX)), {}, "unexpected_tensor", BIAS, id="a bias in mode none"),
        pytest.param(
            vector("model.layers.0.self_attn.q_proj.bias"), {"bias": "all"}, "unexpected_tensor",
            PREFIX + "model.layers.0.self_attn.q_proj.bias", id="a name without the LoRA",
        ),
        pytest.param(
            vector("model.layers.0.mlp.up_proj.base_layer.bias", 48), {"bias": "all"}, "unexpected_tensor",
            PREFIX + "model.layers.0.mlp.up_proj.base_layer.bias", id="a bias that the base lacks",
        ),
        pytest.param(vector(BIAS.removeprefix(PREFIX), 31), {"bias": "all"}, "base_mismatch", BIAS, id="a short bias"),
        pytest.param({BIAS: np.ones((HIDDEN, 1), np.float32)}, {"bias": "all"}, "base_mismatch", BIAS, id="matrix"),
        pytest.param({BIAS: np.full(HIDDEN, np.nan, np.float32)}, {"bias": "all"}, "not_finite", BIAS, id="NaN"),
        pytest.param({BIAS: np.full(HIDDEN, 1e6, np.float32)}, {"bias": "all"}, "norm_too_large", BIAS, id="huge"),
        pytest.param({}, {"modules_to_save": [FINAL]}, "missing_tensor", f"{PREFIX}{FINAL}.weight", id="no saved norm"),
        pytest.param(
            vector(f"model.layers.0.{INPUT}.weight"), {"modules_to_save": [f"layers.0.{INPUT}"]}, "missing_tensor",
            f"{PREFIX}model.layers.0.{INPUT}.bias", id="a saved norm without its bias",
        ),
        pytest.param(vector(f"{FINAL}.weight"), {}, "unexpected_tensor", f"{PREFIX}{FINAL}.weight", id="not saved"),
        pytest.param({}, {"modules_to_save": ["ln_f"]}, "unsupported_config", "modules_to_save[0]", id="no such norm"),
        pytest.param({}, {"modules_to_save": [""]}, "unsupported_config", "modules_to_save[0]", id="every module"),
        pytest.param({}, {"modules_to_save": ["norm", "j"]}, "unsupported_config", "modules_to_save[1]", id="linears"),
        pytest.param(
            {}, {"trainable_token_indices": {"lm_head": [1]}}, "unsupported_config", "trainable_token_indices",
            id="tokens of a head with a bias",
        ),
        pytest.param(
            {f"{PREFIX}{name}.weight": np.ones((VOCAB_SIZE + 1, HIDDEN), np.float32)
             for name in ("lm_head", "model.embed_tokens")},
            {}, "unsupported_config", PREFIX + "model.embed_tokens.weight", id="a resized head with a bias",
        ),
        pytest.param(
            vector(f"{FINAL}.weight"), {"modules_to_save": [FINAL], "alora_invocation_tokens": [1]},
            "unsupported_config", "alora_invocation_tokens", id="activated",
        ),
    ],
)  # fmt: skip
def test_vectors_that_peft_would_not_load_are_refused(
    tensors: dict[str, np.ndarray], config: dict[str, Any], code: str, param: str
) -> None:
    with pytest.raises(AdapterRejected) as refused:
        validated(made(tensors, **config))
    assert (refused.value.code, refused.value.param) == (code, param)


def test_a_saved_head_beside_a_bias_keeps_the_bias(tmp_path: Path) -> None:
    weights, stored = base(tmp_path)
    head = stored["lm_head.weight"].copy()
    head[[3, 60]] += 1
    tensors = {PREFIX + "lm_head.weight": head, PREFIX + "lm_head.bias": stored["lm_head.bias"]}
    found = packed(made(tensors, modules_to_save=["lm_head"]), tmp_path, weights)
    assert found.layout.rows.counts == (0, 2)
    gain, shift = affine(found, "lm_head", None)
    assert not gain.any()
    # The products with the two rows lack the bias, and those with all other rows include it.
    expected = np.zeros(VOCAB_SIZE, np.float32)
    expected[[3, 60]] = stored["lm_head.bias"][[3, 60]]
    assert np.array_equal(shift, expected)


def test_a_file_without_biases_keeps_the_bases() -> None:
    report = validated(made({}, bias="all"))
    assert (report.features, report.num_pages) == ((), validated(made({})).num_pages)


def test_other_spellings_of_the_names_are_translated() -> None:
    tensors = {**vector(BIAS.removeprefix(PREFIX)), **vector(f"{FINAL}.weight"), **vector("lm_head.bias", VOCAB_SIZE)}
    files = made(tensors, bias="all", modules_to_save=[FINAL])
    files.tensors = {
        name.replace("model.layers.", "model.language_model.layers.").replace(
            FINAL, "model.language_model.norm"
        ): values
        for name, values in files.tensors.items()
    }
    report = validated(files)
    assert {BIAS, f"{PREFIX}{FINAL}.weight", f"{PREFIX}lm_head.bias"} <= report.names.keys()
