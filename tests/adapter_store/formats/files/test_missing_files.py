"""A directory that is not an adapter is explained by what it contains."""

from __future__ import annotations

from pathlib import Path

import pytest

from loramux.adapter_store.formats.files.missing_files import missing_file

CONFIG, TENSORS = "adapter_config.json", "adapter_model.safetensors"


@pytest.mark.parametrize(
    ("names", "missing", "code", "says", "param"),
    [
        pytest.param([], CONFIG, "file_missing", "has no adapter_config.json: choose", CONFIG, id="nothing"),
        pytest.param([CONFIG], TENSORS, "file_missing", f"has no {TENSORS}: choose", TENSORS, id="no weights"),
        pytest.param(
            [f"checkpoint-9/{CONFIG}"],
            CONFIG,
            "file_missing",
            "but its folder checkpoint-9 has one: choose that folder",
            "checkpoint-9",
            id="one checkpoint",
        ),
        pytest.param(
            [f"checkpoint-100/{CONFIG}", f"checkpoint-60/{CONFIG}", "model.safetensors"],
            CONFIG,
            "file_missing",
            "its folders checkpoint-60 and checkpoint-100 have one",
            "checkpoint-60",
            id="checkpoints",
        ),
        pytest.param(
            [f"v0/checkpoint-{step}/{CONFIG}" for step in range(6)],
            CONFIG,
            "file_missing",
            "v0/checkpoint-0, v0/checkpoint-1, v0/checkpoint-2, v0/checkpoint-3 and 2 more have one",
            "v0/checkpoint-0",
            id="many checkpoints",
        ),
        pytest.param(
            ["config.json", "model.safetensors.index.json", "model-00001-of-00002.safetensors"],
            CONFIG,
            "file_missing",
            "contains a whole model, not an adapter",
            "model.safetensors.index.json",
            id="whole model",
        ),
        pytest.param(
            ["weights/__0_0.distcp", "context/model.yaml"],
            CONFIG,
            "file_missing",
            "is a distributed checkpoint: convert",
            "weights/__0_0.distcp",
            id="distributed checkpoint",
        ),
        pytest.param(["a.gguf"], CONFIG, "file_missing", "in GGUF format, choose the file itself", "a.gguf", id="GGUF"),
        pytest.param(
            [CONFIG, "adapter_0.pt", "adapter_model.bin", "optimizer.pt"],
            TENSORS,
            "pickle_refused",
            "adapter_model.bin is a pickle, which loramux never reads: save the adapter again with safe_serial",
            "adapter_model.bin",
            id="pickles",
        ),
        pytest.param(
            ["adapter_model.pt"],
            CONFIG,
            "pickle_refused",
            "has no adapter_config.json, and adapter_model.pt is a pickle, which loramux never reads: save the",
            "adapter_model.pt",
            id="pickle without a configuration",
        ),
        pytest.param(
            ["adapters.safetensors", "0000100_adapters.safetensors"],
            CONFIG,
            "file_missing",
            "has no adapter_config.json, which mlx-lm writes beside adapters.safetensors",
            "adapters.safetensors",
            id="MLX",
        ),
        pytest.param(
            [CONFIG, "training_args.bin"], TENSORS, "file_missing", "choose a directory saved", TENSORS, id="arguments"
        ),
    ],
)
def test_directory_is_explained(
    names: list[str], missing: str, code: str, says: str, param: str, tmp_path: Path
) -> None:
    for name in names:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(b"{}")
    found = missing_file(tmp_path, missing)
    assert (found[0], found[2]) == (code, param)
    assert says in found[1]
    assert str(tmp_path) in found[1] or "which loramux never reads" in found[1]
