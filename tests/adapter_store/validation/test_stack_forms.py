"""Stacked experts of earlier releases of Unsloth and PEFT become the adapter that PEFT writes today."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from loramux.adapter_store.errors import AdapterRejected
from loramux.adapter_store.formats.files.tensor_file import TensorFile
from loramux.adapter_store.formats.packed.canonical import write_canonical
from loramux.adapter_store.formats.packed.module_places import A_SUFFIX, B_SUFFIX
from loramux.adapter_store.formats.packed.pack_target import PackTarget
from loramux.adapter_store.formats.packed.packing import PackedAdapter, pack
from loramux.adapter_store.ingest.originals import KeptHeader
from loramux.adapter_store.validation.report import Report
from loramux.adapter_store.validation.validation import validate_files
from tests.adapter_store.adapter_files import AdapterFiles
from tests.adapter_store.expert_base import expert_target, stacked_files
from tests.adapter_store.small_base import HIDDEN

TARGET = expert_target()
NUM_EXPERTS, RANK = 4, 3
UNSLOTH = {"base_model_class": "Qwen3MoeForCausalLM", "parent_library": "transformers", "unsloth_fixed": True}
GROUPED, RANK_MAJOR = {"lora_B_layout": "grouped_by_expert"}, {"lora_B_layout": "rank_major"}
GATE_UP = "base_model.model.model.layers.1.mlp.experts.lora_{}.weight"


def stored_as(files: AdapterFiles, is_grouped: bool, is_swapped: bool, **config: Any) -> AdapterFiles:
    """Store the adapter as an earlier Unsloth (`is_grouped`) or PEFT (`is_swapped`) did."""
    stored = AdapterFiles({**files.config, **config})
    for name in [name for name in files.tensors if ".lora_A." in name]:
        # a[expert, rank, input] and b[output, rank, expert]
        a = files.tensors[name].reshape(NUM_EXPERTS, RANK, -1)
        b = files.tensors[name.replace("lora_A", "lora_B")].reshape(-1, RANK, NUM_EXPERTS)
        if is_swapped:
            a, b = b.transpose(2, 1, 0), a.transpose(2, 1, 0)
        if is_grouped:
            b = b.transpose(0, 2, 1)
        stored.tensors[name] = np.ascontiguousarray(a.reshape(NUM_EXPERTS * RANK, -1))
        stored.tensors[name.replace("lora_A", "lora_B")] = np.ascontiguousarray(b.reshape(-1, NUM_EXPERTS * RANK))
    return stored


def packed(files: AdapterFiles, directory: Path, target: PackTarget = TARGET) -> tuple[PackedAdapter, Report]:
    report = validate_files(files.config_bytes, files.tensor_bytes, target)
    path = directory / "canonical"
    write_canonical(files.tensor_bytes, report.scales, path, report.names, stack_forms=report.stack_forms)
    return pack(path, target), report


def is_equal(one: PackedAdapter, other: PackedAdapter) -> bool:
    return np.array_equal(one.payload, other.payload) and np.array_equal(one.scales, other.scales)


@pytest.mark.parametrize(
    ("is_grouped", "is_swapped", "config"),
    [
        pytest.param(True, False, GROUPED, id="unsloth"),
        pytest.param(True, False, {**GROUPED, "auto_mapping": UNSLOTH}, id="unsloth-with-mapping"),
        pytest.param(False, True, {}, id="peft"),
        pytest.param(False, True, {**RANK_MAJOR, "auto_mapping": UNSLOTH}, id="later-unsloth-with-earlier-peft"),
        pytest.param(True, True, GROUPED, id="unsloth-with-earlier-peft"),
    ],
)
def test_other_forms_give_the_usual_adapter(
    is_grouped: bool, is_swapped: bool, config: dict[str, Any], tmp_path: Path
) -> None:
    usual, before = packed(stacked_files(RANK), tmp_path)
    files = stored_as(stacked_files(RANK), is_grouped, is_swapped, **config)
    found, report = packed(files, tmp_path)
    assert is_equal(found, usual)
    assert report.largest_effect == pytest.approx(before.largest_effect)
    assert [warning.code for warning in report.warnings] == ["stacks_reordered"]
    assert not before.warnings
    upload = tmp_path / "upload"
    upload.write_bytes(files.tensor_bytes)
    with (tmp_path / "canonical").open("rb") as canonical:
        rebuilt = b"".join(KeptHeader.of(upload, tmp_path / "canonical").rebuild(canonical))
    assert rebuilt == files.tensor_bytes, "an export has the uploaded bytes"


def test_the_order_of_later_unsloth_is_the_usual_one(tmp_path: Path) -> None:
    parameters = {name: {**RANK_MAJOR, "num_experts": 4} for name in ("gate_up_proj", "down_proj")}
    detail = {"lora_A_layout": "grouped_by_expert", "parameters": parameters}
    files = stacked_files(RANK, auto_mapping=UNSLOTH, unsloth_fused_expert_lora=detail, **RANK_MAJOR)
    found, report = packed(files, tmp_path)
    assert is_equal(found, packed(stacked_files(RANK), tmp_path)[0])
    assert not report.warnings


@pytest.mark.parametrize(
    "detail",
    [RANK_MAJOR, {"lora_A_layout": None, "lora_B_layout": "rank_major", "parameters": None}],
    ids=["absent", "null"],
)
def test_the_order_may_be_stated_once_for_all_parameters(detail: dict[str, Any], tmp_path: Path) -> None:
    files = stacked_files(RANK, auto_mapping=UNSLOTH, unsloth_fused_expert_lora=detail)
    assert is_equal(packed(files, tmp_path)[0], packed(stacked_files(RANK), tmp_path)[0])


@pytest.mark.parametrize(
    ("config", "code", "param"),
    [
        pytest.param({"auto_mapping": UNSLOTH}, "unsupported_config", "lora_B_layout", id="unsloth-does-not-say"),
        pytest.param({"lora_B_layout": "mixed"}, "unsupported_config", "lora_B_layout", id="mixed"),
        pytest.param(
            {**GROUPED, "unsloth_fused_expert_lora": {"parameters": {"down_proj": RANK_MAJOR}}},
            "unsupported_config",
            "unsloth_fused_expert_lora.parameters.down_proj",
            id="both",
        ),
        pytest.param(
            {"unsloth_fused_expert_lora": {"lora_A_layout": "rank_major"}},
            "unsupported_config",
            "unsloth_fused_expert_lora.lora_A_layout",
            id="another-A",
        ),
        pytest.param(
            {**GROUPED, "unsloth_fused_expert_lora": {**RANK_MAJOR}},
            "unsupported_config",
            "unsloth_fused_expert_lora.lora_B_layout",
            id="both-without-parameters",
        ),
        pytest.param({"unsloth_fused_expert_lora": [1]}, "invalid_config", "unsloth_fused_expert_lora", id="no-object"),
    ],
)
def test_an_order_that_is_not_known_is_refused(config: dict[str, Any], code: str, param: str) -> None:
    files = stacked_files(RANK, **config)
    with pytest.raises(AdapterRejected) as caught:
        validate_files(files.config_bytes, files.tensor_bytes, TARGET)
    assert (caught.value.code, caught.value.param) == (code, param)


def test_the_order_of_unsloth_matters_only_for_stacks(tmp_path: Path) -> None:
    files = stacked_files(RANK, auto_mapping=UNSLOTH, target_modules=["q_proj"], target_parameters=None)
    sizes = {"A": (RANK, HIDDEN), "B": (HIDDEN, RANK)}
    files.tensors = {
        f"base_model.model.model.layers.{layer}.self_attn.q_proj.lora_{half}.weight": np.ones(size, np.float32)
        for layer in (0, 1)
        for half, size in sizes.items()
    }
    assert not packed(files, tmp_path)[1].stack_forms


def square_target() -> PackTarget:
    """A target whose experts have as many outputs of gate and up as inputs."""
    assert TARGET.experts is not None
    gate_up, *others = TARGET.experts.linears
    return replace(TARGET, experts=replace(TARGET.experts, linears=(replace(gate_up, out_features=HIDDEN), *others)))


def square_files(**config: Any) -> AdapterFiles:
    files = stacked_files(RANK, **{"target_parameters": ["experts.gate_up_proj"], **config})
    generator = np.random.default_rng(1)
    sizes = {"A": (NUM_EXPERTS * RANK, HIDDEN), "B": (HIDDEN, NUM_EXPERTS * RANK)}
    files.tensors = {
        GATE_UP.format(half): generator.standard_normal(size).astype(np.float32) for half, size in sizes.items()
    }
    return files


@pytest.mark.parametrize(("version", "is_swapped"), [("0.18.1", True), ("0.19.0", True), ("0.19.1", False)])
def test_the_release_of_peft_decides_for_a_square_stack(version: str, is_swapped: bool, tmp_path: Path) -> None:
    target = square_target()
    usual, _ = packed(square_files(peft_version="0.21.2"), tmp_path, target)
    stored = stored_as(square_files(), is_grouped=False, is_swapped=is_swapped, peft_version=version)
    assert is_equal(packed(stored, tmp_path, target)[0], usual)


@pytest.mark.parametrize("config", [{}, {"peft_version": "main"}], ids=["missing", "no-number"])
def test_a_square_stack_without_the_release_of_peft_is_refused(config: dict[str, Any], tmp_path: Path) -> None:
    files = square_files(**config)
    with pytest.raises(AdapterRejected, match=r'missing or not a release number.*to "0\.17\.0"') as caught:
        validate_files(files.config_bytes, files.tensor_bytes, square_target())
    assert caught.value.param == "peft_version"
    stored = stored_as(square_files(), is_grouped=False, is_swapped=True, peft_version="0.17.0")
    usual, _ = packed(square_files(peft_version="0.21.2"), tmp_path, square_target())
    assert is_equal(packed(stored, tmp_path, square_target())[0], usual)


def alternating(target: PackTarget) -> PackTarget:
    """The target with the experts of gpt-oss."""
    assert target.experts is not None
    gate_up, *others = target.experts.linears
    return replace(target, experts=replace(target.experts, linears=(replace(gate_up, alternates=True), *others)))


@pytest.mark.parametrize(
    ("version", "is_swapped"),
    [(None, False), ("0.17.1", False), ("0.18.1", False), ("0.19.0", True), ("0.19.1", False)],
)
def test_one_release_of_peft_swapped_the_experts_of_gpt_oss(
    version: str | None, is_swapped: bool, tmp_path: Path
) -> None:
    target = alternating(square_target())
    config = {} if version is None else {"peft_version": version}
    usual, _ = packed(square_files(peft_version="0.21.2"), tmp_path, target)
    stored = stored_as(square_files(), is_grouped=False, is_swapped=is_swapped, **config)
    found, report = packed(stored, tmp_path, target)
    assert is_equal(found, usual)
    assert bool(report.stack_forms) == is_swapped


def test_the_shapes_of_gpt_oss_decide_whatever_release_of_peft_is_stated(tmp_path: Path) -> None:
    target = alternating(TARGET)
    usual, _ = packed(stacked_files(RANK), tmp_path, target)
    for is_swapped in (False, True):
        stored = stored_as(stacked_files(RANK), is_grouped=False, is_swapped=is_swapped, peft_version="0.19.0")
        assert is_equal(packed(stored, tmp_path, target)[0], usual)


def test_a_release_that_does_not_know_forms_finds_no_tensor(tmp_path: Path) -> None:
    """Such a release would pack another order as it is, and store the result for all servers."""
    packed(stored_as(stacked_files(RANK), is_grouped=True, is_swapped=False, **GROUPED), tmp_path)
    with TensorFile(tmp_path / "canonical") as file:
        assert not [name for name in file.header.tensors if name.endswith((A_SUFFIX, B_SUFFIX))]
