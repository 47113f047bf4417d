"""`loramux adapters push FILE.gguf` and `loramux check FILE.gguf` convert an adapter of llama.cpp."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from typer.testing import CliRunner

from loramux.admin.cli import app
from loramux.admin.client.gguf_source import converted_gguf
from tests.adapter_store.gguf.llama_cpp import write_gguf
from tests.admin.command_line import Run, printed_json
from tests.admin.peft_directory import MakeAdapter
from tests.demo_base import DEMO_BASE

TENSORS = "adapter_model.safetensors"
PIRATE = DEMO_BASE.parent / "adapters" / "pirate"


@pytest.fixture
def base(tmp_path: Path) -> Path:
    """A directory with only a config.json for the admin side's target, which has heads of 16 channels."""
    config = json.loads((DEMO_BASE / "config.json").read_text())
    sizes = {"hidden_size": 32, "num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 16}
    directory = tmp_path / "base"
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps({**config, **sizes, "num_hidden_layers": 2}))
    return directory


@pytest.fixture
def scratch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The directory for temporary files, which must be empty after every command."""
    directory = tmp_path / "scratch"
    directory.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(directory))
    return directory


def as_gguf(directory: Path, path: Path, num_heads: int, num_kv_heads: int, **settings: Any) -> Path:
    config = json.loads((directory / "adapter_config.json").read_text())
    tensors = load_file(directory / TENSORS)
    write_gguf(path, tensors, alpha=config["lora_alpha"], num_heads=num_heads, num_kv_heads=num_kv_heads, **settings)
    return path


def test_pushed_file_is_the_adapter_that_it_was_made_from(
    loramux: Run, make_adapter: MakeAdapter, base: Path, scratch: Path, tmp_path: Path
) -> None:
    loramux("tenants", "create", "acme")
    directory = make_adapter(rank=3)
    path = as_gguf(directory, tmp_path / "adapter.gguf", 2, 2)
    push = ("--tenant", "acme", "--name", "support", "--json")
    pushed = printed_json(loramux("adapters", "push", path, "--model", base, *push))
    assert list(scratch.iterdir()) == []
    place = tmp_path / "pulled"
    assert loramux("adapters", "pull", pushed["model"], place).exit_code == 0
    ours, theirs = load_file(place / TENSORS), load_file(directory / TENSORS)
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)
    again = printed_json(loramux("adapters", "push", directory, *push))
    assert again["digest"] == pushed["digest"], "the weights and the scales are the same"


def test_refused_files_leave_nothing(
    loramux: Run, make_adapter: MakeAdapter, base: Path, scratch: Path, tmp_path: Path
) -> None:
    loramux("tenants", "create", "acme")
    directory = make_adapter()
    path = as_gguf(directory, tmp_path / "adapter.gguf", 2, 2)
    forged = tmp_path / "forged.gguf"
    forged.write_bytes(path.read_bytes()[:-50])
    gemma = as_gguf(directory, tmp_path / "gemma.gguf", 2, 2, architecture="gemma2")
    push = ("--tenant", "acme", "--name", "support", "--json")
    for arguments, code in (
        ((path,), "base_needed"),
        ((forged, "--model", base), "truncated_file"),
        ((gemma, "--model", base), "base_mismatch"),
        ((path, "--model", scratch), "base_mismatch"),
        ((base / "config.json",), "not_gguf"),
    ):
        result = loramux("adapters", "push", *arguments, *push)
        assert (result.exit_code, json.loads(result.stdout)["error"]["code"]) == (1, code), result.output
        assert list(scratch.iterdir()) == []
    assert printed_json(loramux("adapters", "list", "--json"))["data"] == []
    assert loramux("adapters", "push", tmp_path / "absent.gguf", *push).exit_code == 2


def test_file_fits_a_base_that_was_saved_without_a_head(make_adapter: MakeAdapter, base: Path, tmp_path: Path) -> None:
    path = as_gguf(make_adapter(), tmp_path / "adapter.gguf", 2, 2)
    config = json.loads((base / "config.json").read_text())
    (base / "config.json").write_text(json.dumps({**config, "architectures": ["LlamaModel"]}))
    with converted_gguf(path, base) as directory:
        assert (directory / TENSORS).exists()


def test_check_converts_the_file(tmp_path: Path) -> None:
    path = as_gguf(PIRATE, tmp_path / "pirate.gguf", 8, 2, dtype="BF16")

    def facts(source: Path) -> Any:
        result = CliRunner().invoke(app, ["check", str(source), "--model", str(DEMO_BASE), "--json"])
        document = json.loads(result.stdout)
        assert (result.exit_code, document["path"]) == (0, str(source)), result.stdout
        return document["facts"]

    ours, theirs = facts(path), facts(PIRATE)
    assert ours["num_pages"] == theirs["num_pages"]
    for kind, found in theirs["modules"].items():
        np.testing.assert_allclose(ours["modules"][kind]["effects"], found["effects"], rtol=1e-3)
    path.write_bytes(path.read_bytes()[:100])
    refused = CliRunner().invoke(app, ["check", str(path), "--model", str(DEMO_BASE), "--json"])
    assert (refused.exit_code, json.loads(refused.stdout)["problems"][0]["code"]) == (1, "truncated_file")
