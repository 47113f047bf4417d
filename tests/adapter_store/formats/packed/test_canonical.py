from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors import safe_open
from safetensors.numpy import save

from loramux.adapter_store.errors import AdapterCorrupt
from loramux.adapter_store.formats.packed.canonical import CanonicalAdapter, write_canonical
from loramux.adapter_store.formats.packed.pack_target import PackTarget
from loramux.adapter_store.validation.validation import validate_files


def canonical(files: Any, target: PackTarget, path: Path) -> str:
    report = validate_files(files.config_bytes, files.tensor_bytes, target)
    return write_canonical(files.tensor_bytes, report.scales, path, invocation_tokens=report.invocation_tokens)


def test_digest_is_the_hash_of_the_bytes(make_adapter: Any, target: PackTarget, tmp_path: Path) -> None:
    digest = canonical(make_adapter(), target, tmp_path / "c")
    assert digest == hashlib.sha256((tmp_path / "c").read_bytes()).hexdigest()
    assert digest == canonical(make_adapter(), target, tmp_path / "again")


def test_spelling_does_not_change_the_digest(make_adapter: Any, target: PackTarget, tmp_path: Path) -> None:
    digest = canonical(make_adapter(), target, tmp_path / "a")
    other = make_adapter(base_model_name_or_path="elsewhere", lora_dropout=0.5, layers_to_transform=[1, 0])
    other.config = dict(reversed(other.config.items()))
    other.config.update(r=2, rank_pattern={"q_proj": 4, "v_proj": 4}, lora_alpha=8)
    report = validate_files(other.config_bytes, other.tensor_bytes, target)
    shuffled = save(dict(reversed(other.tensors.items())), metadata={"format": "pt", "note": "x"})
    assert write_canonical(shuffled, report.scales, tmp_path / "b") == digest


@pytest.mark.parametrize(
    "other",
    [
        pytest.param({"lora_alpha": 9}, id="alpha"),
        pytest.param({"use_rslora": True}, id="rsLoRA"),
        pytest.param({"seed": 1}, id="weights"),
        pytest.param({"dtype": np.float16}, id="dtype"),
        pytest.param({"alora_invocation_tokens": [1, 2]}, id="invocation tokens"),
        pytest.param({"modules": ("self_attn.q_proj", "mlp.up_proj")}, id="modules"),
    ],
)
def test_settings_that_change_the_result_change_the_digest(
    make_adapter: Any, target: PackTarget, tmp_path: Path, other: dict[str, Any]
) -> None:
    assert canonical(make_adapter(), target, tmp_path / "a") != canonical(make_adapter(**other), target, tmp_path / "b")


def test_each_list_of_invocation_tokens_has_its_own_digest(
    make_adapter: Any, target: PackTarget, tmp_path: Path
) -> None:
    lists: list[list[int] | None] = [None, [1], [1, 2], [2, 1], [12]]
    digests = {canonical(make_adapter(alora_invocation_tokens=tokens), target, tmp_path / "c") for tokens in lists}
    assert len(digests) == len(lists)


def test_canonical_file_is_valid_safetensors(make_adapter: Any, target: PackTarget, tmp_path: Path) -> None:
    files = make_adapter(dtype=np.float16)
    canonical(files, target, tmp_path / "c")
    with safe_open(tmp_path / "c", framework="numpy") as file:
        assert sorted(file.keys()) == sorted(files.tensors)
        for name, tensor in files.tensors.items():
            found = file.get_tensor(name)
            assert found.dtype == np.float16
            np.testing.assert_array_equal(found, tensor)
        assert json.loads(file.metadata()["config"])["scales"]["model.layers.0.self_attn.q_proj"] == 2.0


@pytest.mark.parametrize("change", ["cut", "no config", "not safetensors"])
def test_damaged_file_raises_adapter_corrupt(
    make_adapter: Any, target: PackTarget, tmp_path: Path, change: str
) -> None:
    files = make_adapter()
    canonical(files, target, tmp_path / "c")
    data = {
        "cut": (tmp_path / "c").read_bytes()[:-1],
        "no config": files.tensor_bytes,
        "not safetensors": b"x" * 100,
    }[change]
    with pytest.raises(AdapterCorrupt):
        CanonicalAdapter(data)
