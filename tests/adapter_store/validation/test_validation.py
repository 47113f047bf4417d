from __future__ import annotations

import io
import json
import math
import pickle  # noqa: TID251 - to show that it is refused
import struct
import tarfile
import zipfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save

from loramux.adapter_store.errors import AdapterRejected
from loramux.adapter_store.formats.files.float_formats import to_float32
from loramux.adapter_store.formats.packed.canonical import write_canonical
from loramux.adapter_store.formats.packed.pack_target import PackTarget
from loramux.adapter_store.formats.packed.packing import pack
from loramux.adapter_store.ingest.originals import KeptHeader
from loramux.adapter_store.validation.validation import validate_files
from loramux.kernels.layout import LinearShape
from tests.adapter_store.adapter_files import AdapterMaker, tensor_name
from tests.adapter_store.small_base import make_target

Q_A = "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"
MAGNITUDE = Q_A.replace("lora_A.weight", "lora_magnitude_vector")
Q_B = "base_model.model.model.layers.0.self_attn.q_proj.lora_B.weight"


def assert_refused(config: bytes, tensors: Path | bytes, target: PackTarget, code: str, param: str | None) -> None:
    with pytest.raises(AdapterRejected) as refused:
        validate_files(config, tensors, target)
    assert (refused.value.code, refused.value.param) == (code, param)
    assert len(refused.value.message) > 10


def test_valid_adapter_passes_and_is_described(make_adapter: Any, target: PackTarget) -> None:
    files = make_adapter(rank=4, ranks=lambda layer, module: 7 if layer == 1 else 4)
    report = validate_files(files.config_bytes, files.tensor_bytes, target)
    assert report.max_rank == 7
    assert report.dtypes == ("F32",)
    assert report.num_parameters == sum(tensor.size for tensor in files.tensors.values())
    assert report.scales["model.layers.0.self_attn.q_proj"] == 2.0
    assert report.scales["model.layers.1.self_attn.v_proj"] == 8 / 7
    assert report.largest_effect > 0
    assert report.recorded["base_model_name_or_path"] == "some/base"
    assert json.loads(json.dumps(report.document()))["max_rank"] == 7


def test_report_lists_each_modules_rank_scale_and_effect(make_adapter: Any, target: PackTarget) -> None:
    files = make_adapter(rank=4, ranks=lambda layer, module: 7 if layer == 1 else 4)
    files.tensors[Q_B][:] = 0
    document = validate_files(files.config_bytes, files.tensor_bytes, target).document()
    kind = document["modules"]["self_attn.q_proj"]
    assert (kind["layers"], kind["ranks"], kind["scales"]) == ([0, 1], [4, 7], [2.0, 1.143])
    assert kind["effects"][0] == 0 < kind["effects"][1] == kind["largest_effect"]
    assert document["warnings"] == [
        {
            "code": "module_without_effect",
            "message": "the product B A of these modules is zero",
            "count": 1,
            "params": ["model.layers.0.self_attn.q_proj"],
        }
    ]
    assert [(check["check"], check["outcome"]) for check in document["checks"]][-2:] == [
        ("effect", "passed"),
        ("packing", "not_made"),
    ]


def test_refusal_names_the_failed_check(make_adapter: Any, target: PackTarget) -> None:
    files = make_adapter()
    with_tensor(Q_B, None)(files)
    with pytest.raises(AdapterRejected) as refused:
        validate_files(files.config_bytes, files.tensor_bytes, target)
    outcomes = {check["check"]: check["outcome"] for check in refused.value.report["checks"]}
    assert outcomes == {
        "configuration": "passed",
        "container": "passed",
        "modules": "passed",
        "names": "failed",
        "shapes": "not_made",
        "weights": "not_made",
        "effect": "not_made",
        "packing": "not_made",
    }


def test_rslora_and_alpha_patterns_set_the_scales(make_adapter: Any, target: PackTarget) -> None:
    files = make_adapter(rank=4, use_rslora=True, alpha_pattern={"layers.1.self_attn.q_proj": 3, "q_proj": 5})
    report = validate_files(files.config_bytes, files.tensor_bytes, target)
    assert report.scales["model.layers.0.self_attn.q_proj"] == 5 / 2
    assert report.scales["model.layers.1.self_attn.q_proj"] == 3 / 2
    assert report.scales["model.layers.1.self_attn.v_proj"] == 8 / math.sqrt(4)


@pytest.mark.parametrize(
    "config",
    [
        pytest.param({"layers_to_transform": [1]}, id="list of layers"),
        pytest.param({"layers_to_transform": 1, "layers_pattern": "layers"}, id="one layer"),
        pytest.param({"target_modules": ["layers.1.self_attn.q_proj", "model.layers.1.self_attn.v_proj"]}, id="paths"),
        pytest.param({"exclude_modules": ["layers.0.self_attn.q_proj", "layers.0.self_attn.v_proj"]}, id="excluded"),
        pytest.param({"target_modules": r".*layers\.1\..*(q|v)_proj"}, id="regex"),
        pytest.param({"target_modules": "(a+)+$"}, id="slow regex"),
        pytest.param({"exclude_modules": r".*layers\.0.*"}, id="excluded by a regex"),
        pytest.param({"layers_to_transform": [1], "layers_pattern": "blocks"}, id="layers under another name"),
    ],
)
def test_layer_selection_matches_peft(make_adapter: Any, target: PackTarget, config: dict[str, Any]) -> None:
    files = make_adapter(layers=(1,), **config)
    report = validate_files(files.config_bytes, files.tensor_bytes, target)
    assert list(report.scales) == ["model.layers.1.self_attn.q_proj", "model.layers.1.self_attn.v_proj"]


def test_ranks_and_alphas_selected_by_expressions(make_adapter: Any, target: PackTarget) -> None:
    files = make_adapter(
        rank=4,
        ranks=lambda layer, module: 9 if "v" in module else 4,
        rank_pattern={r".*v_proj$": 9},
        alpha_pattern={r".*\.layers\.1\..*(q_proj|v_proj)$": 3, ".*q_proj": 5, "q_proj": 7},
    )
    files.config["rank_pattern"] = {r".*v_proj$": 9}
    report = validate_files(files.config_bytes, files.tensor_bytes, target)
    assert dict(report.scales) == {
        "model.layers.0.self_attn.q_proj": 5 / 4,
        "model.layers.0.self_attn.v_proj": 8 / 9,
        "model.layers.1.self_attn.q_proj": 3 / 4,
        "model.layers.1.self_attn.v_proj": 3 / 9,
    }
    assert not report.warnings


def test_expressions_see_the_names_of_the_trained_model(make_adapter: Any, target: PackTarget) -> None:
    files = make_adapter(rank=4, alpha_pattern={r"^model\.language_model\.layers\.1\..*": 3, "^model.layers.0": 5})
    tensors = {name.replace(".layers.", ".language_model.layers."): one for name, one in files.tensors.items()}
    report = validate_files(files.config_bytes, save(tensors), target)
    assert [report.scales[f"model.layers.{layer}.self_attn.q_proj"] for layer in (0, 1)] == [8 / 4, 3 / 4]
    assert ("unmatched_names", ("alpha_pattern.^model.layers.0",)) in [
        (one.code, one.params) for one in report.warnings
    ]


@pytest.mark.parametrize(
    ("config", "params"),
    [
        pytest.param({"rank_pattern": {"kilroy": 2}}, ["rank_pattern.kilroy"], id="rank"),
        pytest.param(
            {"alpha_pattern": {"kilroy": 2, "q_proj": 5, r"q\d": 3}},
            ["alpha_pattern.kilroy", r"alpha_pattern.q\d"],
            id="alphas",
        ),
        pytest.param(
            {"rank_pattern": {"mlp.up_proj": 2}}, ["rank_pattern.mlp.up_proj"], id="module that is not adapted"
        ),
        pytest.param({"target_modules": ["q_proj", "c_attn", "v_proj"]}, ["target_modules[1]"], id="target"),
        pytest.param({"target_parameters": ["experts.w1"]}, ["target_parameters[0]"], id="parameter"),
    ],
)
def test_names_that_match_nothing_are_reported(
    make_adapter: Any, target: PackTarget, config: dict[str, Any], params: list[str]
) -> None:
    files = make_adapter(**config)
    (warning,) = validate_files(files.config_bytes, files.tensor_bytes, target).document()["warnings"]
    assert (warning["code"], warning["count"], warning["params"]) == ("unmatched_names", len(params), params)


def test_a_warning_shows_a_tenants_text_safely(make_adapter: Any, target: PackTarget) -> None:
    files = make_adapter(alpha_pattern={"kilroy" * 100: 2})
    (warning,) = validate_files(files.config_bytes, files.tensor_bytes, target).warnings
    assert warning.params == (("alpha_pattern." + "kilroy" * 100)[:197] + "...",)


def test_trained_biases_matter_only_if_the_file_has_some(make_adapter: Any, target: PackTarget) -> None:
    files = make_adapter(bias="all")
    assert not validate_files(files.config_bytes, files.tensor_bytes, target).warnings


VISION = "base_model.model.model.visual.blocks.0.attn.qkv.lora_A.weight"
OTHER_PARTS: dict[str, tuple[int, ...]] = {
    VISION: (4, 8),
    "base_model.model.model.visual.patch_embed.proj.lora_A.weight": (4, 3, 2, 14, 14),
    "base_model.model.vision_tower.vision_model.encoder.layers.0.self_attn.q_proj.lora_A.default.weight": (4, 8),
    "base_model.model.base_model.model.model.multi_modal_projector.linear_1.bias": (8,),
    "model.audio_tower.layers.0.fc1.lora_B.weight": (8, 4),
    "module.base_model.model.model.vision_tower._orig_mod.layers.0.fc1.lora_magnitude_vector": (8,),
    "base_model.model.mtp.layers.0.mlp.up_proj.lora_A.weight": (4, 8),
    "base_model.model.model.mtp_layers.0.self_attn.q_proj.lora_B.weight": (8, 4),
    "base_model.model.model.image_newline": (8,),
}


def test_tensors_of_other_parts_are_ignored(make_adapter: Any, target: PackTarget, tmp_path: Path) -> None:
    files = make_adapter(
        modules_to_save=["multi_modal_projector", "model.visual.merger"],
        target_modules=["q_proj", "v_proj", "qkv", "fc1"],
    )
    plain = validate_files(files.config_bytes, files.tensor_bytes, target)
    for name, shape in OTHER_PARTS.items():
        # Their values do not matter either.
        files.tensors[name] = np.full(shape, np.nan, np.float32)
    report = validate_files(files.config_bytes, files.tensor_bytes, target)
    warnings = {warning.code: warning for warning in report.warnings}
    assert warnings.keys() == {"unmatched_names", "other_parts_ignored"}
    assert warnings["other_parts_ignored"].count == len(OTHER_PARTS)
    assert warnings["other_parts_ignored"].params == tuple(sorted(OTHER_PARTS))
    assert (report.scales, report.num_parameters, report.num_pages) == (
        plain.scales,
        plain.num_parameters,
        plain.num_pages,
    )
    for path, tensors, names in (
        ("with", files.tensor_bytes, report.names),
        ("without", save({n: t for n, t in files.tensors.items() if n not in OTHER_PARTS}), plain.names),
    ):
        write_canonical(tensors, report.scales, tmp_path / path, names)
    packed = [pack(tmp_path / path, target) for path in ("with", "without")]
    np.testing.assert_array_equal(packed[0].payload, packed[1].payload)
    # The file as it was uploaded can still be rebuilt.
    (tmp_path / "uploaded").write_bytes(files.tensor_bytes)
    kept = KeptHeader.of(tmp_path / "uploaded", tmp_path / "with")
    with (tmp_path / "with").open("rb") as canonical:
        assert b"".join(kept.rebuild(canonical)) == files.tensor_bytes


def test_an_adapter_of_other_parts_alone_is_refused(make_adapter: Any, target: PackTarget) -> None:
    files = make_adapter(target_modules=".*")
    tensors = save({VISION: np.ones((4, 8), np.float32)})
    assert_refused(files.config_bytes, tensors, target, "unsupported_config", "target_modules")


@pytest.mark.parametrize(
    "name",
    [
        "base_model.model.model.layers.0.visual.q_proj.lora_A.weight",
        "base_model.model.model.layers.0.self_attn.connector.lora_A.weight",
        "base_model.model.model.visuals.q_proj.lora_A.weight",
        "base_model.model.lm_head.visual.weight",
        "base_model.model.model.language_model.visual.q_proj.lora_A.weight",
    ],
)
def test_tensors_inside_the_text_decoder_are_not_ignored(make_adapter: Any, target: PackTarget, name: str) -> None:
    files = make_adapter(target_modules=".*")
    files.tensors[name] = ONES
    assert_refused(files.config_bytes, files.tensor_bytes, target, "unexpected_tensor", name)


def test_the_state_of_a_training_method_is_ignored(make_adapter: Any, target: PackTarget) -> None:
    files = make_adapter(monteclora_config={"num_samples": 8}, velora_config={"num_groups": 8})
    module = Q_A.removesuffix("lora_A.weight")
    files.tensors[module + "lora_velora_embed"] = np.ones(8, np.float32)
    files.tensors[module + "lora_monteclora_sampler.gaussian_var_prior"] = np.ones((4, 4), np.float32)
    (warning,) = validate_files(files.config_bytes, files.tensor_bytes, target).warnings
    assert (warning.code, warning.count) == ("training_state_ignored", 2)


@pytest.mark.parametrize("dtype", ["F8_E4M3", "F8_E5M2", "F64"])
def test_other_floats_are_converted_exactly(
    make_adapter: Any, any_target: PackTarget, tmp_path: Path, dtype: str
) -> None:
    import torch
    from safetensors.torch import save as save_torch

    stored = {"F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2, "F64": torch.float64}[dtype]
    files = make_adapter()
    rounded = {name: torch.from_numpy(one).to(torch.float8_e5m2).to(stored) for name, one in files.tensors.items()}
    packed = []
    for name, tensors in (("exact", rounded), ("wide", {name: one.float() for name, one in rounded.items()})):
        data = save_torch(tensors)
        report = validate_files(files.config_bytes, data, any_target)
        assert not report.warnings
        write_canonical(data, report.scales, tmp_path / name, report.names)
        packed.append(pack(tmp_path / name, any_target))
    assert report.dtypes == ("F32",)
    np.testing.assert_array_equal(packed[0].payload, packed[1].payload)


def test_every_8_bit_float_has_its_value() -> None:
    import torch

    codes = np.arange(256, dtype=np.uint8)
    for dtype, of_torch in (("F8_E4M3", torch.float8_e4m3fn), ("F8_E5M2", torch.float8_e5m2)):
        wanted = torch.from_numpy(codes).view(of_torch).float().numpy()
        np.testing.assert_array_equal(to_float32(codes, dtype), wanted)


def test_rounding_of_float64_is_reported(make_adapter: Any, target: PackTarget) -> None:
    files = make_adapter()
    files.tensors[Q_A] = files.tensors[Q_A].astype(np.float64) + 1e-12
    (warning,) = validate_files(files.config_bytes, files.tensor_bytes, target).warnings
    assert (warning.code, warning.params) == ("values_rounded", (Q_A,))


@pytest.mark.parametrize("value", [1e300, np.nan, -np.inf], ids=str)
def test_float64_that_float32_cannot_hold_is_refused(make_adapter: Any, target: PackTarget, value: float) -> None:
    files = make_adapter()
    files.tensors[Q_A] = files.tensors[Q_A].astype(np.float64)
    files.tensors[Q_A][1, 2] = value
    assert_refused(files.config_bytes, files.tensor_bytes, target, "not_finite", Q_A)


def test_a_regex_does_not_admit_tensors_of_other_modules(make_adapter: Any, target: PackTarget) -> None:
    files = make_adapter(target_modules=".*")
    files.tensors["base_model.model.model.vision.q_proj.lora_A.weight"] = np.ones((4, 8), np.float32)
    with pytest.raises(AdapterRejected) as refused:
        validate_files(files.config_bytes, files.tensor_bytes, target)
    assert refused.value.code == "unexpected_tensor"


def test_header_length_that_looks_like_a_pickle_is_accepted(make_adapter: Any, target: PackTarget) -> None:
    files = make_adapter(modules=("self_attn.q_proj",))
    tensors = files.tensor_bytes
    (length,) = struct.unpack_from("<Q", tensors)
    wanted = next(n for n in range(length, length + 4096) if n % 256 == 0x80)
    padded = struct.pack("<Q", wanted) + tensors[8 : 8 + length].ljust(wanted) + tensors[8 + length :]
    assert padded[:1] == b"\x80"
    validate_files(files.config_bytes, padded, target)


def with_tensor(name: str, tensor: np.ndarray | None) -> Callable[[Any], None]:
    def change(files: Any) -> None:
        if tensor is None:
            del files.tensors[name]
        else:
            files.tensors[name] = tensor

    return change


def with_value(name: str, value: float) -> Callable[[Any], None]:
    def change(files: Any) -> None:
        files.tensors[name][1, 2] = value

    return change


def with_config(**changes: Any) -> Callable[[Any], None]:
    return lambda files: files.config.update(changes)


def zeroed(half: str) -> Callable[[Any], None]:
    def change(files: Any) -> None:
        for name, tensor in files.tensors.items():
            if f"lora_{half}" in name:
                tensor[:] = 0

    return change


def scaled(factor: float) -> Callable[[Any], None]:
    def change(files: Any) -> None:
        for tensor in files.tensors.values():
            tensor *= factor

    return change


def of_layer(old: int, new: int) -> Callable[[Any], None]:
    def change(files: Any) -> None:
        for name in [name for name in files.tensors if f"layers.{old}." in name]:
            files.tensors[name.replace(f"layers.{old}.", f"layers.{new}.")] = files.tensors.pop(name)

    return change


HEAD, EMBEDDING = "base_model.model.lm_head.", "base_model.model.model.embed_tokens."


def test_outer_modules_are_validated_like_others(adapter_maker: Any, outer_target: PackTarget) -> None:
    files = adapter_maker(outer_target)(
        rank=4, modules=("model.embed_tokens", "lm_head", "self_attn.q_proj"), alpha_pattern={"embed_tokens": 2}
    )
    report = validate_files(files.config_bytes, files.tensor_bytes, outer_target)
    assert dict(report.scales) == {
        "model.embed_tokens": 0.5,
        "lm_head": 2.0,
        "model.layers.0.self_attn.q_proj": 2.0,
        "model.layers.1.self_attn.q_proj": 2.0,
    }
    assert report.num_parameters == 4 * (2 * (70 + 32) + 4 * 32)


def test_invocation_tokens_are_described(adapter_maker: Any, outer_target: PackTarget) -> None:
    files = adapter_maker(outer_target)(modules=("lm_head", "self_attn.q_proj"), alora_invocation_tokens=[69, 0])
    report = validate_files(files.config_bytes, files.tensor_bytes, outer_target)
    assert report.invocation_tokens == (69, 0)
    assert report.document()["invocation_tokens"] == [69, 0]


@pytest.mark.parametrize(
    ("modules", "tokens", "code", "param"),
    [
        (("self_attn.q_proj",), [3, 70], "base_mismatch", "alora_invocation_tokens[1]"),
        (("model.embed_tokens",), [3], "unsupported_config", "alora_invocation_tokens"),
        (("lm_head", "model.embed_tokens"), [3], "unsupported_config", "alora_invocation_tokens"),
    ],
    ids=["beyond the vocabulary", "embedding", "embedding among others"],
)
def test_an_activation_that_the_base_cannot_have_is_refused(
    adapter_maker: Any, outer_target: PackTarget, modules: tuple[str, ...], tokens: list[int], code: str, param: str
) -> None:
    files = adapter_maker(outer_target)(modules=modules, alora_invocation_tokens=tokens)
    assert_refused(files.config_bytes, files.tensor_bytes, outer_target, code, param)


@pytest.mark.parametrize(
    ("config", "modules", "expected"),
    [
        pytest.param({"target_modules": "all-linear"}, ("self_attn.q_proj",), None, id="all-linear has no head"),
        pytest.param(
            {"target_modules": ["lm_head", "embed_tokens"], "layers_to_transform": [0]},
            ("lm_head",),
            ["lm_head"],
            id="a short name is looked for in the listed layers",
        ),
        pytest.param(
            {"target_modules": ["model.embed_tokens"], "layers_to_transform": [0]},
            ("model.embed_tokens",),
            ["model.embed_tokens"],
            id="a full name is taken anywhere",
        ),
        pytest.param(
            {"target_modules": ["lm_head", "embed_tokens"], "exclude_modules": ["lm_head"]},
            ("model.embed_tokens",),
            ["model.embed_tokens"],
            id="excluded",
        ),
    ],
)
def test_outer_module_selection_matches_peft(
    adapter_maker: Any,
    outer_target: PackTarget,
    config: dict[str, Any],
    modules: tuple[str, ...],
    expected: list[str] | None,
) -> None:
    every = tuple(shape.name for shape in outer_target.modules)
    files = adapter_maker(outer_target)(modules=every if expected is None else modules, **config)
    report = validate_files(files.config_bytes, files.tensor_bytes, outer_target)
    assert list(report.scales) == (expected or [f"model.layers.{layer}.{name}" for layer in (0, 1) for name in every])


@pytest.mark.parametrize(
    ("name", "tensor", "code"),
    [
        pytest.param(HEAD + "lora_B.weight", np.ones((71, 4), np.float32), "base_mismatch", id="larger vocabulary"),
        pytest.param(EMBEDDING + "lora_embedding_A", np.ones((4, 64), np.float32), "base_mismatch", id="smaller one"),
        pytest.param(EMBEDDING + "lora_embedding_B", np.ones((32, 5), np.float32), "rank_mismatch", id="rank"),
        pytest.param(HEAD + "lora_A.weight", None, "missing_tensor", id="missing"),
        pytest.param(HEAD + "lora_embedding_A", np.ones((4, 32), np.float32), "unexpected_tensor", id="wrong kind"),
        pytest.param(EMBEDDING + "lora_embedding_B", np.full((32, 4), np.nan, np.float32), "not_finite", id="NaN"),
    ],
)
def test_invalid_outer_module_is_refused(
    adapter_maker: Any, outer_target: PackTarget, name: str, tensor: np.ndarray | None, code: str
) -> None:
    files = adapter_maker(outer_target)(rank=4, modules=("model.embed_tokens", "lm_head"))
    with_tensor(name, tensor)(files)
    assert_refused(files.config_bytes, files.tensor_bytes, outer_target, code, name)


@pytest.mark.parametrize("name", [HEAD + "base_layer.weight", EMBEDDING + "base_layer.weight"])
def test_copies_of_the_bases_weights_are_reported_with_a_remedy(
    adapter_maker: Any, outer_target: PackTarget, name: str
) -> None:
    files = adapter_maker(outer_target)(modules=("model.embed_tokens", "lm_head"))
    files.tensors[name] = np.ones((70, 32), np.float32)
    report = validate_files(files.config_bytes, files.tensor_bytes, outer_target)
    (warning,) = report.warnings
    assert (warning.code, warning.params) == ("base_weights_included", (name,))
    assert "save_embedding_layers=False" in warning.message
    assert list(report.num_trained_rows.values()) == [70]


def test_base_weights_where_peft_does_not_load_them_are_refused(adapter_maker: Any, outer_target: PackTarget) -> None:
    files = adapter_maker(outer_target)(modules=("model.embed_tokens", "lm_head"))
    # This is how older versions of PEFT named it.
    name = EMBEDDING + "weight"
    files.tensors[name] = np.ones((70, 32), np.float32)
    assert_refused(files.config_bytes, files.tensor_bytes, outer_target, "unexpected_tensor", name)
    with pytest.raises(AdapterRejected, match="save_embedding_layers=False"):
        validate_files(files.config_bytes, files.tensor_bytes, outer_target)


ONES = np.ones((4, 32), np.float32)
LAYER_1_Q_A = Q_A.replace("layers.0", "layers.1")


@pytest.mark.parametrize(
    ("change", "code", "param"),
    [
        pytest.param(with_tensor(Q_A, np.ones((4, 64), np.float32)), "base_mismatch", Q_A, id="wider base"),
        pytest.param(with_tensor(Q_B, np.ones((16, 4), np.float32)), "base_mismatch", Q_B, id="fewer heads"),
        pytest.param(of_layer(1, 2), "base_mismatch", Q_A.replace("layers.0", "layers.2"), id="deeper base"),
        pytest.param(
            lambda files: [files.tensors.pop(name) for name in list(files.tensors) if "layers.1." in name],
            "base_mismatch",
            LAYER_1_Q_A,
            id="shallower base",
        ),
        pytest.param(with_tensor(Q_A, np.ones((5, 32), np.float32)), "rank_mismatch", Q_A, id="rank of A"),
        pytest.param(with_tensor(Q_B, np.ones((32, 3), np.float32)), "rank_mismatch", Q_B, id="rank of B"),
        pytest.param(with_config(r=8), "rank_mismatch", Q_A, id="rank in the configuration"),
        pytest.param(with_tensor(Q_A, np.ones((0, 32), np.float32)), "empty_tensor", Q_A, id="empty tensor"),
        pytest.param(with_tensor(Q_A, np.ones(0, np.float32)), "empty_tensor", Q_A, id="tensor left by ZeRO-3"),
        pytest.param(with_tensor(Q_B, None), "missing_tensor", Q_B, id="missing B"),
        pytest.param(
            with_config(target_modules=["q_proj"]), "unexpected_tensor", Q_A.replace("q_p", "v_p"), id="extra"
        ),
        pytest.param(with_tensor("lm_head.weight", ONES), "unexpected_tensor", "lm_head.weight", id="foreign tensor"),
        pytest.param(with_tensor(MAGNITUDE, ONES), "unexpected_tensor", MAGNITUDE, id="DoRA magnitudes"),
        pytest.param(with_tensor(Q_A, np.ones(32, np.float32)), "tensor_not_2d", Q_A, id="one dimension"),
        pytest.param(with_tensor(Q_A, ONES.astype(np.int8)), "unsupported_dtype", Q_A, id="integers"),
        pytest.param(with_value(Q_A, np.nan), "not_finite", Q_A, id="NaN"),
        pytest.param(with_value(Q_B, -np.inf), "not_finite", Q_B, id="infinity"),
        pytest.param(with_value(Q_A, 1e38), "norm_too_large", Q_A, id="one huge weight"),
        pytest.param(scaled(1000), "norm_too_large", "model.layers.0.self_attn.q_proj", id="diverged"),
        pytest.param(zeroed("B"), "zero_effect", None, id="B never trained"),
        pytest.param(zeroed("A"), "zero_effect", None, id="A is zero"),
        pytest.param(
            with_config(target_modules=["c_attn", "c_proj"]), "unknown_module", "target_modules[0]", id="unknown"
        ),
        pytest.param(
            with_config(layers_to_transform=[0, 2]),
            "base_mismatch",
            "layers_to_transform",
            id="layer that is not there",
        ),
        pytest.param(with_config(use_dora=True), "missing_tensor", MAGNITUDE, id="DoRA without magnitudes"),
        pytest.param(with_config(r=0), "rank_out_of_range", "r", id="rank 0"),
    ],
)
def test_invalid_adapter_is_refused(
    make_adapter: Any, target: PackTarget, change: Callable[[Any], object], code: str, param: str | None
) -> None:
    files = make_adapter()
    change(files)
    assert_refused(files.config_bytes, files.tensor_bytes, target, code, param)


@pytest.mark.parametrize(
    ("change", "code", "says"),
    [
        pytest.param(with_tensor(MAGNITUDE, ONES[0]), "unexpected_tensor", "set use_dora to true", id="no use_dora"),
        pytest.param(with_config(use_dora=True), "missing_tensor", "lacks this module's magnitudes", id="none"),
        pytest.param(
            lambda files: (with_config(use_dora=True, target_modules=["v_proj"])(files), files.tensors.pop(Q_A)),
            "unexpected_tensor",
            "does not target this tensor",
            id="another module",
        ),
    ],
)
def test_magnitudes_and_configuration_must_agree(
    make_adapter: Any, target: PackTarget, change: Callable[[Any], object], code: str, says: str
) -> None:
    files = make_adapter()
    change(files)
    with pytest.raises(AdapterRejected, match=says) as refused:
        validate_files(files.config_bytes, files.tensor_bytes, target)
    assert refused.value.code == code


@pytest.mark.parametrize("by_full_names", [False, True])
def test_projections_that_layers_do_not_use_are_ignored(by_full_names: bool, tmp_path: Path) -> None:
    """The second layer reads the first layer's K and V. Earlier releases of transformers gave it projections too."""
    names, layers = ("q_proj", "k_proj", "v_proj"), {"q_proj": None, "k_proj": (0,), "v_proj": (0,)}
    target = make_target(modules=tuple(LinearShape(f"self_attn.{name}", 32, 32, layers=layers[name]) for name in names))
    every = make_target(modules=tuple(LinearShape(f"self_attn.{name}", 32, 32) for name in names))
    files = AdapterMaker(every)(modules=tuple(f"self_attn.{name}" for name in names))
    if by_full_names:
        modules = [f"model.layers.{layer}.self_attn.{name}" for layer in range(2) for name in names]
        files.config["target_modules"] = modules
    report = validate_files(files.config_bytes, files.tensor_bytes, target)
    [ignored] = [warning for warning in report.warnings if warning.code == "shared_layers_ignored"]
    assert ignored.count == 4
    assert all(".layers.1.self_attn." in name for name in ignored.params)
    path = tmp_path / "canonical"
    write_canonical(files.tensor_bytes, report.scales, path, report.names)
    assert pack(path, target).num_pages == report.num_pages
    files.config["target_modules"] = ["q_proj"]
    name = tensor_name(0, "self_attn.k_proj", "A")
    assert_refused(files.config_bytes, files.tensor_bytes, target, "unexpected_tensor", name)


def header_file(header: object, data: bytes = b"") -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + data


def entry(begin: int, end: int, shape: Any = (4, 32), dtype: Any = "F32") -> dict[str, Any]:
    return {"dtype": dtype, "shape": list(shape), "data_offsets": [begin, end]}


def archive(kind: str) -> bytes:
    out = io.BytesIO()
    if kind == "zip":
        with zipfile.ZipFile(out, "w") as file:
            file.writestr("adapter_model.safetensors", b"x")
    elif kind == "torch":
        with zipfile.ZipFile(out, "w") as file:
            file.writestr("archive/data.pkl", pickle.dumps({"a": 1}))
    else:
        with tarfile.open(fileobj=out, mode="w:gz") as file:
            file.addfile(tarfile.TarInfo("a"))
    return out.getvalue()


FILE = "adapter_model.safetensors"


@pytest.mark.parametrize(
    ("tensors", "code", "param"),
    [
        pytest.param(b"", "truncated_file", FILE, id="empty"),
        pytest.param(b"\x10\0\0", "truncated_file", FILE, id="three bytes"),
        pytest.param(pickle.dumps({"weight": [1.0] * 100}), "pickle_not_allowed", FILE, id="pickle"),
        pytest.param(archive("torch"), "pickle_not_allowed", FILE, id="torch file"),
        pytest.param(archive("zip"), "archive_not_allowed", FILE, id="zip"),
        pytest.param(archive("tar.gz"), "archive_not_allowed", FILE, id="tar.gz"),
        pytest.param(b"<!DOCTYPE html><html></html>", "not_safetensors", FILE, id="web page"),
        pytest.param(b"version https://git-lfs.github.com/spec/v1\n", "not_safetensors", FILE, id="LFS pointer"),
        pytest.param(struct.pack("<Q", 2**20 + 1) + b"{" + b" " * 2**20, "header_too_large", FILE, id="large header"),
        pytest.param(struct.pack("<Q", 2**63) + b"{}", "header_too_large", FILE, id="absurd header"),
        pytest.param(struct.pack("<Q", 100) + b"{}", "truncated_file", FILE, id="header cut off"),
        pytest.param(header_file(b"{not json"), "invalid_header", FILE, id="header is not JSON"),
        pytest.param(header_file(b'{"a": NaN}'), "invalid_header", FILE, id="NaN in the header"),
        pytest.param(header_file(b'{"a": ' + b"[" * 90_000), "invalid_header", FILE, id="deep header"),
        pytest.param(header_file({"__metadata__": {"format": 1}}), "invalid_header", FILE, id="metadata not text"),
        pytest.param(
            header_file(b'{"a":{"dtype":"F32","shape":[1,1],"data_offsets":[0,4]},"a":{}}', bytes(4)),
            "duplicate_key",
            FILE,
            id="duplicate tensor",
        ),
        pytest.param(header_file({"a": [1]}), "invalid_header", "a", id="entry is a list"),
        pytest.param(header_file({"a": {**entry(0, 512), "x": 1}}), "invalid_header", "a", id="unknown field"),
        pytest.param(header_file({"a": entry(0, 512, shape=(4.0, 32))}), "invalid_header", "a", id="float shape"),
        pytest.param(header_file({"a": entry(0, 512, shape=(-4, -32))}), "invalid_header", "a", id="negative shape"),
        pytest.param(header_file({"a": entry(0, 512, shape=(True, 32))}), "invalid_header", "a", id="bool shape"),
        pytest.param(header_file({"a": entry(0, 512, dtype=7)}), "invalid_header", "a", id="dtype is a number"),
        pytest.param(header_file({"a": entry(0, 2**65, shape=(2**62, 2**62))}), "invalid_header", "a", id="overflow"),
        pytest.param(header_file({"a": entry(0, 512, shape=(4, 4, 8))}), "tensor_not_2d", "a", id="three dimensions"),
        pytest.param(header_file({"a": entry(0, 256, dtype="I64")}), "unsupported_dtype", "a", id="integers"),
        pytest.param(header_file({"a": entry(0, 500)}, bytes(500)), "invalid_offsets", "a", id="wrong length"),
        pytest.param(header_file({"a": entry(8, 520)}, bytes(520)), "invalid_offsets", "a", id="hole in front"),
        pytest.param(
            header_file({"a": entry(0, 512), "b": entry(0, 512)}, bytes(1024)), "invalid_offsets", "b", id="overlap"
        ),
        pytest.param(header_file({"a": entry(0, 512)}, bytes(511)), "truncated_file", FILE, id="data cut off"),
        pytest.param(header_file({"a": entry(0, 512)}, bytes(513)), "invalid_offsets", FILE, id="data left over"),
        pytest.param(header_file({}), "missing_tensor", Q_A, id="no tensors"),
    ],
)
def test_invalid_file_is_refused(make_adapter: Any, target: PackTarget, tensors: bytes, code: str, param: str) -> None:
    assert_refused(make_adapter().config_bytes, tensors, target, code, param)


@pytest.mark.parametrize(
    ("tensors", "said"),
    [
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:00\n", "Git LFS pointer"),
        (b"GGUF\x03\x00\x00\x00" + bytes(64), "use it as a .gguf file, not inside"),
        (b"<!DOCTYPE html><html></html>", "is a web page"),
        (b"\x93NUMPY\x01\x00v\x00" + bytes(64), "is a numpy array"),
        (header_file({"a": entry(0, 128, dtype="U8")}, bytes(128)), "not U8"),
        (
            header_file({"a": entry(0, 0, shape=(0,))}),
            "the shape [0] and no values: if the adapter was trained with De",
        ),
        (header_file({"a": entry(0, 512, shape=(128,))}, bytes(512)), "the shape [128], but it must have two"),
    ],
    ids=["LFS", "GGUF", "web page", "numpy", "integers", "ZeRO-3", "vector"],
)
def test_refusal_of_a_file_says_what_was_found(
    make_adapter: Any, target: PackTarget, tensors: bytes, said: str
) -> None:
    with pytest.raises(AdapterRejected) as caught:
        validate_files(make_adapter().config_bytes, tensors, target)
    assert said in caught.value.message


@pytest.mark.parametrize("kind", ["missing", "link", "directory", "pipe"])
def test_only_a_regular_file_is_read(make_adapter: Any, target: PackTarget, tmp_path: Path, kind: str) -> None:
    import os

    files = make_adapter()
    path = tmp_path / FILE
    if kind == "link":
        (tmp_path / "real").write_bytes(files.tensor_bytes)
        path.symlink_to(tmp_path / "real")
    elif kind == "directory":
        path.mkdir()
    elif kind == "pipe":
        os.mkfifo(path)
    assert_refused(files.config_bytes, path, target, "not_a_file", FILE)


def test_file_truncated_anywhere_is_refused(make_adapter: Any, target: PackTarget) -> None:
    files = make_adapter()
    tensors = files.tensor_bytes
    for length in [*range(64), *range(64, len(tensors), 37), len(tensors) - 1]:
        with pytest.raises(AdapterRejected):
            validate_files(files.config_bytes, tensors[:length], target)


def test_changed_byte_never_raises_an_unexpected_error(make_adapter: Any, target: PackTarget) -> None:
    """After any change to one byte of the header, the file is refused with a code or still valid."""
    files = make_adapter(modules=("self_attn.q_proj",))
    tensors = bytearray(files.tensor_bytes)
    (length,) = struct.unpack_from("<Q", tensors)
    num_refused = 0
    for position in range(8 + length):
        for value in (0, 0x22, 0x39, 0xFF):
            changed = bytes(tensors[:position]) + bytes([value]) + bytes(tensors[position + 1 :])
            try:
                validate_files(files.config_bytes, changed, target)
            except AdapterRejected:
                num_refused += 1
    assert num_refused > length


def test_float16_and_bfloat16_files_pass(make_adapter: Any, target: PackTarget) -> None:
    import torch
    from safetensors.torch import save as save_torch

    files = make_adapter(dtype=np.float16)
    assert validate_files(files.config_bytes, save(files.tensors), target).dtypes == ("F16",)
    bfloat16 = {name: torch.from_numpy(tensor).to(torch.bfloat16) for name, tensor in files.tensors.items()}
    report = validate_files(files.config_bytes, save_torch(bfloat16), target)
    assert report.dtypes == ("BF16",)
    assert 0 < report.largest_effect < 100


def test_a_module_of_few_layers_is_expected_only_in_these(
    target: PackTarget, adapter_maker: Callable[[PackTarget], Any]
) -> None:
    """In a base with experts, only dense layers have the linear layers of a feed-forward."""
    modules = tuple(replace(one, layers=(1,)) if one.name == "mlp.down_proj" else one for one in target.modules)
    partial = replace(target, modules=modules)
    files = adapter_maker(target)(modules=("self_attn.q_proj", "mlp.down_proj"))
    down = "base_model.model.model.layers.0.mlp.down_proj.lora_A.weight"
    assert_refused(files.config_bytes, files.tensor_bytes, partial, "unexpected_tensor", down)
    for half in "AB":
        del files.tensors[down.replace("lora_A", f"lora_{half}")]
    report = validate_files(files.config_bytes, save(files.tensors), partial)
    assert len(report.scales) == 3
    files.config["target_modules"] = ["layers.0.mlp.down_proj"]
    assert_refused(files.config_bytes, save(files.tensors), partial, "unknown_module", "target_modules[0]")


@pytest.mark.parametrize("name", ["q_proj", "self_attn.v_proj", "layers.0.mlp.gate_proj", "up_proj"])
def test_a_part_of_a_fused_linear_without_tensors_is_reported(
    fused_target: PackTarget, adapter_maker: Callable[[PackTarget], Any], name: str
) -> None:
    files = adapter_maker(fused_target)(modules=("self_attn.qkv_proj",))
    files.config["target_modules"] = ["qkv_proj", name]
    (warning,) = validate_files(files.config_bytes, files.tensor_bytes, fused_target).warnings
    assert (warning.code, warning.params) == ("unmatched_names", ("target_modules[1]",))


@pytest.mark.parametrize(
    ("is_gemma", "strange", "message"),
    [
        (True, [], "may not change modality_router: train the adapter with exclude_modules"),
        (True, ["c_attn"], "no module of this name; adapters may change qkv_proj"),
        (False, [], "no module of this name; adapters may change qkv_proj"),
    ],
    ids=["all linears of Gemma", "another strange name", "another base"],
)
def test_linear_layers_of_the_base_that_adapters_cannot_change_are_named(
    fused_target: PackTarget,
    adapter_maker: Callable[[PackTarget], Any],
    is_gemma: bool,
    strange: list[str],
    message: str,
) -> None:
    """PEFT's `all-linear` includes them on Gemma 3n."""
    base = fused_target
    if is_gemma:
        base = replace(base, modules=(*base.modules, LinearShape("per_layer_input_gate", 64, 24)))
    unknown = [*strange, "modality_router"]
    files = adapter_maker(base)(modules=("self_attn.o_proj",), target_modules=["o_proj", *unknown])
    lora = {name: tensor for name, tensor in files.tensors.items() if ".layers.0." in name}
    others = {
        name.replace("layers.0.self_attn.o_proj", other): tensor for name, tensor in lora.items() for other in unknown
    }
    tensors = save(files.tensors | others)
    with pytest.raises(AdapterRejected, match=message):
        validate_files(files.config_bytes, tensors, base)
    assert_refused(files.config_bytes, tensors, base, "unknown_module", "target_modules[1]")


@pytest.mark.parametrize(
    ("settings", "is_targeted"),
    [
        ({"target_modules": "all-linear"}, True),
        ({"target_modules": ["o_proj", "per_layer_model_projection"]}, True),
        ({"target_modules": ["o_proj", "per_layer_model_projection"], "layers_to_transform": [0]}, False),
        ({"target_modules": ["o_proj", "model.per_layer_model_projection"], "layers_to_transform": [0]}, True),
    ],
    ids=["all linears", "named", "layers", "named in full with layers"],
)
def test_a_linear_layer_outside_the_decoder_layers_is_targeted_as_in_peft(
    fused_target: PackTarget,
    adapter_maker: Callable[[PackTarget], Any],
    settings: dict[str, Any],
    is_targeted: bool,
) -> None:
    outside = LinearShape("model.per_layer_model_projection", 64, 48, layers=(0,))
    base = replace(fused_target, modules=(*fused_target.modules, outside))
    modules = (
        tuple(module.name for module in fused_target.modules) if settings["target_modules"] == "all-linear" else ()
    )
    files = adapter_maker(base)(modules=modules or ("self_attn.o_proj",), layers=settings.get("layers_to_transform"))
    files.config |= settings
    a, b = np.ones((4, 64), np.float32), np.ones((48, 4), np.float32)
    prefix = "base_model.model.model.per_layer_model_projection"
    files.tensors |= {f"{prefix}.lora_A.weight": a, f"{prefix}.lora_B.weight": b}
    if is_targeted:
        assert validate_files(files.config_bytes, files.tensor_bytes, base).scales[outside.name] == 2
    else:
        assert_refused(files.config_bytes, files.tensor_bytes, base, "unexpected_tensor", f"{prefix}.lora_A.weight")


def test_an_adapter_of_another_architecture_names_the_bases_modules(
    fused_target: PackTarget, adapter_maker: Callable[[PackTarget], Any]
) -> None:
    files = adapter_maker(fused_target)(modules=("self_attn.qkv_proj",), target_modules=["c_attn"])
    tensors = save({name.replace("qkv_proj", "c_attn"): tensor for name, tensor in files.tensors.items()})
    with pytest.raises(AdapterRejected, match="adapters may change qkv_proj, o_proj, gate_up_proj, down_proj"):
        validate_files(files.config_bytes, tensors, fused_target)
    assert_refused(files.config_bytes, tensors, fused_target, "unknown_module", "target_modules[0]")


def test_an_adapter_of_a_shallower_base_names_the_layer_after_its_last(make_adapter: Any, target: PackTarget) -> None:
    files, deeper = make_adapter(), replace(target, geometry=replace(target.geometry, num_layers=12))
    with pytest.raises(AdapterRejected, match="the adapter has 2 layers, but the base has 12"):
        validate_files(files.config_bytes, files.tensor_bytes, deeper)
    name = Q_A.replace("layers.0.", "layers.2.")
    assert_refused(files.config_bytes, files.tensor_bytes, deeper, "base_mismatch", name)


def test_a_rank_out_of_range_is_shown(make_adapter: Any, target: PackTarget) -> None:
    files = make_adapter()
    files.config["r"] = 512
    with pytest.raises(AdapterRejected, match="must be between 1 and 256, not 512"):
        validate_files(files.config_bytes, files.tensor_bytes, target)
