"""Adapters with tensors for the base's own head for drafts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save

from loramux.adapter_store.errors import AdapterCorrupt
from loramux.adapter_store.formats.packed.canonical import write_canonical
from loramux.adapter_store.formats.packed.pack_target import PackTarget
from loramux.adapter_store.formats.packed.packed_file import write_packed
from loramux.adapter_store.formats.packed.packing import PackedAdapter, pack
from loramux.adapter_store.validation.report import Report
from loramux.adapter_store.validation.validation import validate_files
from loramux.kernels.layout import LinearShape
from tests.adapter_store.adapter_files import AdapterMaker
from tests.adapter_store.packed_files import read_packed
from tests.adapter_store.small_base import HIDDEN, NUM_LAYERS, OUTER_MODULES, make_target
from tests.adapter_store.validation.test_validation import assert_refused

MIMO, GLM = "model.mtp_layers.0", f"model.layers.{NUM_LAYERS}"
RANK = 4


def with_head(prefix: str, dtype: str = "float32") -> PackTarget:
    modules = (LinearShape("self_attn.q_proj", HIDDEN, HIDDEN, has_bias=True), LinearShape("proj", 2 * HIDDEN, HIDDEN))
    drafts = tuple(replace(module, name=f"{prefix}.{module.name}") for module in modules)
    return replace(make_target(dtype, outer_modules=OUTER_MODULES), draft_modules=drafts)


def tensors_of(prefix: str, module: str = "proj", num_inputs: int = 2 * HIDDEN) -> dict[str, np.ndarray[Any, Any]]:
    key = f"base_model.model.{prefix}.{module}"
    generator = np.random.default_rng(4)
    return {
        f"{key}.lora_A.weight": generator.standard_normal((RANK, num_inputs), np.float32),
        f"{key}.lora_B.weight": generator.standard_normal((HIDDEN, RANK), np.float32),
    }


def packed(files: Any, target: PackTarget, path: Path) -> tuple[Report, PackedAdapter]:
    report = validate_files(files.config_bytes, files.tensor_bytes, target)
    write_canonical(files.tensor_bytes, report.scales, path, report.names)
    return report, pack(path, target)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("prefix", [MIMO, GLM])
def test_a_drafter_is_stored_with_its_adapter(prefix: str, dtype: str, make_adapter: Any, tmp_path: Path) -> None:
    target = with_head(prefix, dtype)
    files = make_adapter(rank=RANK, alpha_pattern={f"{prefix}.proj": 12})
    plain, plain_pages = packed(files, target, tmp_path / "plain")
    files.tensors |= tensors_of(prefix)
    report, pages = packed(files, target, tmp_path / "drafter")
    assert report.scales == plain.scales | {f"{prefix}.proj": 3.0}
    assert (plain.features, report.features) == ((), ("drafter",))
    assert not [warning for warning in report.warnings if warning.code != "unmatched_names"]
    assert report.num_pages == pages.num_pages > plain_pages.num_pages == plain.num_pages
    np.testing.assert_array_equal(pages.layout.outer_ranks, [0, 0, 0, RANK])
    np.testing.assert_array_equal(pages.outer_scales, [0, 0, 0, 3])
    np.testing.assert_array_equal(pages.layout.ranks, plain_pages.layout.ranks)


def test_files_of_adapters_without_a_drafter_do_not_mention_the_head(make_adapter: Any, tmp_path: Path) -> None:
    """Such a file can be written by a release that knows no drafters, and read by one that does."""
    target = with_head(MIMO)
    assert target.pack_key == target.without_drafter.pack_key
    files = make_adapter(rank=RANK)
    _, plain = packed(files, target, tmp_path / "plain")
    written = []
    for one in (target, target.without_drafter):
        write_packed(tmp_path / "packed", packed(files, one, tmp_path / "plain")[1], one)
        written.append((tmp_path / "packed").read_bytes())
        for reading in (target, target.without_drafter):
            found = read_packed(tmp_path / "packed", reading)
            np.testing.assert_array_equal(found.payload, plain.payload)
            assert len(found.outer_scales) == len(found.layout.outer_ranks) == len(reading.all_outer_modules)
    assert written[0] == written[1]
    assert b"mtp_layers" not in written[0]


def test_a_packed_drafter_is_read_for_its_head_only(make_adapter: Any, tmp_path: Path) -> None:
    target = with_head(MIMO)
    files = make_adapter(rank=RANK)
    files.tensors |= tensors_of(MIMO)
    _, made = packed(files, target, tmp_path / "canonical")
    write_packed(tmp_path / "packed", made, target)
    found = read_packed(tmp_path / "packed", target)
    np.testing.assert_array_equal(found.payload, made.payload)
    np.testing.assert_array_equal(found.layout.outer_ranks, made.layout.outer_ranks)
    np.testing.assert_array_equal(found.outer_scales, made.outer_scales)
    with pytest.raises(AdapterCorrupt):
        read_packed(tmp_path / "packed", target.without_drafter)
    assert PackTarget.from_document(target.document()) == target


def test_an_adapter_can_have_a_drafter_alone(make_adapter: Any) -> None:
    files = make_adapter(rank=RANK, target_modules=["mtp_layers.0.proj"])
    files.tensors.clear()
    files.tensors |= tensors_of(MIMO)
    report = validate_files(files.config_bytes, files.tensor_bytes, with_head(MIMO))
    assert list(report.scales) == [f"{MIMO}.proj"]


def test_tensors_for_mimos_head_that_are_as_peft_made_them_are_ignored(make_adapter: Any, tmp_path: Path) -> None:
    files = make_adapter(rank=RANK)
    plain, _ = packed(files, with_head(MIMO), tmp_path / "plain")
    files.tensors |= tensors_of(MIMO)
    files.tensors[f"base_model.model.{MIMO}.proj.lora_B.weight"][:] = 0
    for target in (with_head(MIMO), make_target()):
        report, pages = packed(files, target, tmp_path / "with")
        assert (report.scales, report.features, report.num_pages) == (plain.scales, (), plain.num_pages)
        assert [warning.code for warning in report.warnings] == ["other_parts_ignored"]
        assert pages.num_pages == plain.num_pages


@pytest.mark.parametrize("target", [with_head(MIMO), make_target()], ids=["head", "no head"])
@pytest.mark.parametrize("style", ["", "model.model.", "language_model.", "model.language_model.", "text_model.model."])
def test_untrained_tensors_are_ignored_under_names_of_any_style(
    style: str, target: PackTarget, make_adapter: Any, tmp_path: Path
) -> None:
    files = make_adapter(rank=RANK)
    plain, _ = packed(files, target, tmp_path / "plain")
    key = f"base_model.model.{MIMO}.proj"
    bias = {f"{key}.base_layer.bias": np.ones(3, np.float32)}
    files.tensors |= tensors_of(MIMO) | {f"{key}.lora_B.weight": np.zeros((HIDDEN, RANK), np.float32)} | bias
    current = "base_model.model.model."
    files.tensors = {name.replace(current, f"base_model.model.{style}"): one for name, one in files.tensors.items()}
    report, pages = packed(files, target, tmp_path / "styled")
    assert (report.scales, report.features, pages.num_pages) == (plain.scales, (), plain.num_pages)
    assert [warning.code for warning in report.warnings] == ["other_parts_ignored", "older_names"]
    assert report.warnings[0].count == 3


@pytest.mark.parametrize("bias", [np.ones(3, np.float32), np.full(HIDDEN, np.nan, np.float32)], ids=["shape", "NaN"])
def test_an_ignored_bias_of_mimos_head_does_not_change_the_drafter(
    bias: np.ndarray[Any, Any], make_adapter: Any, tmp_path: Path
) -> None:
    files = make_adapter(rank=RANK, lora_bias=True)
    files.tensors |= tensors_of(MIMO, "self_attn.q_proj", HIDDEN)
    _, expected = packed(files, with_head(MIMO), tmp_path / "plain")
    files.tensors[f"base_model.model.{MIMO}.self_attn.q_proj.base_layer.bias"] = bias
    report, found = packed(files, with_head(MIMO), tmp_path / "with")
    assert [warning.code for warning in report.warnings] == ["other_parts_ignored"]
    np.testing.assert_array_equal(found.payload, expected.payload)


@pytest.mark.parametrize(("kind", "suffix"), [("use_dora", "lora_magnitude_vector"), ("lora_bias", "lora_B.bias")])
@pytest.mark.parametrize("prefix", [MIMO, GLM])
def test_a_drafter_is_a_plain_lora_in_any_adapter(prefix: str, kind: str, suffix: str, make_adapter: Any) -> None:
    """So packing needs no weights of the head, which the files of a base may lack."""
    target, vector = with_head(prefix), f"base_model.model.{prefix}.proj.{suffix}"
    files = make_adapter(rank=RANK, **{kind: True})
    files.tensors |= tensors_of(prefix)
    report = validate_files(files.config_bytes, files.tensor_bytes, target)
    assert "drafter" in report.features
    files.tensors[vector] = np.ones(HIDDEN, np.float32)
    assert_refused(files.config_bytes, files.tensor_bytes, target, "unexpected_tensor", vector)


def test_ensure_weight_tying_does_not_tie_a_drafter() -> None:
    target = replace(with_head(MIMO), tied_embeddings=True)
    files = AdapterMaker(target)(modules=("self_attn.q_proj",), rank=RANK, ensure_weight_tying=True)
    files.tensors |= tensors_of(MIMO) | tensors_of(MIMO, "self_attn.q_proj", HIDDEN)
    report = validate_files(files.config_bytes, files.tensor_bytes, target)
    assert report.features == ("drafter",)


def test_tensors_for_a_head_that_the_base_lacks(make_adapter: Any, target: PackTarget, tmp_path: Path) -> None:
    """Those for MiMo's head, which PEFT makes, are ignored. Those for GLM's are like tensors for one layer too many."""
    files = make_adapter(rank=RANK)
    files.tensors |= tensors_of(MIMO)
    report, _ = packed(files, target, tmp_path / "canonical")
    assert [warning.code for warning in report.warnings] == ["other_parts_ignored"]
    # A release that knew no drafters stored the tensors without scales. Such a version stays without a drafter.
    assert pack(tmp_path / "canonical", with_head(MIMO)).num_pages == report.num_pages
    files = make_adapter(rank=RANK)
    files.tensors |= tensors_of(GLM)
    assert_refused(
        files.config_bytes, files.tensor_bytes, target, "base_mismatch", f"base_model.model.{GLM}.proj.lora_A.weight"
    )


Change = Callable[[dict[str, Any], str], None]


def _wrong_inputs(tensors: dict[str, Any], key: str) -> None:
    tensors[f"{key}.lora_A.weight"] = np.ones((RANK, HIDDEN), np.float32)


def _wrong_outputs(tensors: dict[str, Any], key: str) -> None:
    tensors[f"{key}.lora_B.weight"] = np.ones((HIDDEN + 1, RANK), np.float32)


def _three_dimensions(tensors: dict[str, Any], key: str) -> None:
    tensors[f"{key}.lora_B.weight"] = np.ones((HIDDEN, RANK, 1), np.float32)


def _not_finite(tensors: dict[str, Any], key: str) -> None:
    tensors[f"{key}.lora_B.weight"][3, 1] = np.nan


def _too_large(tensors: dict[str, Any], key: str) -> None:
    tensors[f"{key}.lora_B.weight"][:] = 60000


def _without_a(tensors: dict[str, Any], key: str) -> None:
    del tensors[f"{key}.lora_A.weight"]


def _without_b(tensors: dict[str, Any], key: str) -> None:
    del tensors[f"{key}.lora_B.weight"]


def _other_rank(tensors: dict[str, Any], key: str) -> None:
    tensors[f"{key}.lora_A.weight"] = np.ones((RANK + 1, 2 * HIDDEN), np.float32)


def _magnitude(tensors: dict[str, Any], key: str) -> None:
    tensors[f"{key}.lora_magnitude_vector"] = np.ones(HIDDEN, np.float32)


REFUSED: dict[str, tuple[Change, str, str]] = {
    "inputs": (_wrong_inputs, "base_mismatch", ".lora_A.weight"),
    "outputs": (_wrong_outputs, "base_mismatch", ".lora_B.weight"),
    "dimensions": (_three_dimensions, "wrong_dimensions", ".lora_B.weight"),
    "NaN": (_not_finite, "not_finite", ".lora_B.weight"),
    "norm": (_too_large, "norm_too_large", ""),
    "no A": (_without_a, "unexpected_tensor", ".lora_B.weight"),
    "no B": (_without_b, "missing_tensor", ".lora_B.weight"),
    "rank": (_other_rank, "rank_mismatch", ".lora_A.weight"),
    "magnitude": (_magnitude, "unexpected_tensor", ".lora_magnitude_vector"),
}


@pytest.mark.parametrize("name", REFUSED)
@pytest.mark.parametrize("prefix", [MIMO, GLM])
def test_a_drafter_that_does_not_fit_is_refused(prefix: str, name: str, make_adapter: Any) -> None:
    change, code, part = REFUSED[name]
    key = f"{prefix}.proj"
    files = make_adapter(rank=RANK)
    files.tensors |= tensors_of(prefix)
    change(files.tensors, f"base_model.model.{key}")
    if (prefix, name) == (GLM, "dimensions"):
        # The container refuses it first.
        code = "tensor_not_2d"
    param = f"base_model.model.{key}{part}" if part else key
    assert_refused(files.config_bytes, save(files.tensors), with_head(prefix), code, param)
