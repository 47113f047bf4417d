"""Adapters on experts are merged expert by expert, or refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

from loramux.adapter_store.errors import MergeRefused
from loramux.adapter_store.formats.files.file_names import CONFIG_FILE, TENSORS_FILE
from loramux.adapter_store.merging.merge import merge_adapters
from loramux.adapter_store.merging.methods import MergeMethod, MergeSettings
from loramux.adapter_store.merging.plain_lora import PlainLora
from loramux.adapter_store.validation.validation import validate_files
from tests.adapter_store.adapter_files import AdapterFiles, AdapterMaker, tensor_name
from tests.adapter_store.expert_base import expert_target, experts_named, stacked_files

TARGET = expert_target()
CAT = MergeSettings(MergeMethod.CAT)


def written(files: AdapterFiles, directory: Path) -> Path:
    directory.mkdir()
    (directory / CONFIG_FILE).write_bytes(files.config_bytes)
    (directory / TENSORS_FILE).write_bytes(files.tensor_bytes)
    return directory


def merge(first: AdapterFiles, second: AdapterFiles, directory: Path) -> Path:
    merged = directory / "merged"
    merged.mkdir()
    with (
        PlainLora(written(first, directory / "first"), "first") as one,
        PlainLora(written(second, directory / "second"), "second") as other,
    ):
        merge_adapters([one, other], [0.5, 2.0], CAT, merged)
    return merged


def made(rank: int, *experts: int, **adapter: Any) -> AdapterFiles:
    return AdapterMaker(TARGET)(rank=rank, modules=experts_named("down_proj", experts=experts), **adapter)


def test_experts_are_merged_one_by_one(tmp_path: Path) -> None:
    named = ["experts.1.down_proj", "experts.3.down_proj"]
    first, second = made(3, 0, 1, 2, 3, seed=1), made(70, 1, 3, seed=2, target_modules=named)
    merged = merge(first, second, tmp_path)
    tensors = load_file(merged / TENSORS_FILE)
    report = validate_files((merged / CONFIG_FILE).read_bytes(), (merged / TENSORS_FILE).read_bytes(), TARGET)
    assert report.max_rank == 73
    for expert in range(4):
        a, b = (tensor_name(1, f"mlp.experts.{expert}.down_proj", half) for half in "AB")
        # Each adapter has alpha = 2 r.
        expected = 0.5 * 2 * (first.tensors[b] @ first.tensors[a])
        if expert in (1, 3):
            expected += 2.0 * 2 * (second.tensors[b] @ second.tensors[a])
        np.testing.assert_allclose(tensors[b] @ tensors[a], expected, rtol=1e-4, atol=1e-6)


def test_ranks_that_experts_cannot_have_are_refused(tmp_path: Path) -> None:
    with pytest.raises(MergeRefused, match="is 258; at most 256") as refused:
        merge(made(129, 0, 1, 2, 3), made(129, 0, 1, 2, 3, seed=1), tmp_path)
    assert refused.value.code == "rank_out_of_range"


def test_stacked_experts_are_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(MergeRefused, match="target_parameters is set"):
        merge(stacked_files(), made(3, 0, 1, 2, 3), tmp_path)


def test_more_modules_than_a_configuration_names_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("loramux.adapter_store.merging.merge.MAX_NAMES", 3)
    with pytest.raises(MergeRefused, match="change 4 modules, but a configuration can name only 3"):
        merge(made(3, 0, 1, 2, 3), made(3, 0, 1, 2, 3, seed=1), tmp_path)
