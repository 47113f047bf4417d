"""`loramux adapters push` and `loramux check` join an adapter's shards."""

from __future__ import annotations

import json
import shutil
import tempfile
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from tests.admin.command_line import Run, printed_json
from tests.admin.peft_directory import MakeAdapter
from tests.demo_base import DEMO_BASE

TENSORS, INDEX = "adapter_model.safetensors", "adapter_model.safetensors.index.json"
PIRATE = DEMO_BASE.parent / "adapters" / "pirate"


def divided(directory: Path, place: Path, count: int = 3) -> Path:
    """Copy an adapter's directory to `place`, with its tensors in `count` shards."""
    shutil.copytree(directory, place)
    tensors = load_file(place / TENSORS)
    (place / TENSORS).unlink()
    weight_map = {}
    for number in range(count):
        name = f"adapter_model-{number + 1:05}-of-{count:05}.safetensors"
        shard = dict(list(tensors.items())[number::count])
        save_file(shard, place / name)
        weight_map |= dict.fromkeys(shard, name)
    (place / INDEX).write_text(json.dumps({"metadata": {"total_size": 1}, "weight_map": weight_map}))
    return place


@pytest.fixture
def scratch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The directory for temporary files, which must be empty after every command."""
    directory = tmp_path / "scratch"
    directory.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(directory))
    return directory


def test_a_divided_adapter_is_the_adapter_that_it_was_made_from(
    loramux: Run, make_adapter: MakeAdapter, scratch: Path, tmp_path: Path
) -> None:
    loramux("tenants", "create", "acme")
    directory = make_adapter()
    push = ("--tenant", "acme", "--name", "support", "--json")
    pushed = printed_json(loramux("adapters", "push", divided(directory, tmp_path / "shards"), *push))
    assert list(scratch.iterdir()) == []
    whole = printed_json(loramux("adapters", "push", directory, *push))
    assert whole["digest"] == pushed["digest"]


@pytest.mark.parametrize(
    ("name", "code", "param"),
    [
        ("../adapter_model-00001-of-00003.safetensors", "invalid_index", "weight_map."),
        ("adapter_model-00002-of-00003.safetensors", "missing_shard", "adapter_model-00003-of-00003.safetensors"),
    ],
    ids=["a file outside the directory", "a shard that is missing"],
)
def test_a_refused_index_leaves_nothing(
    loramux: Run, make_adapter: MakeAdapter, scratch: Path, tmp_path: Path, name: str, code: str, param: str
) -> None:
    loramux("tenants", "create", "acme")
    directory = divided(make_adapter(), tmp_path / "shards")
    index = json.loads((directory / INDEX).read_text())
    third = "adapter_model-00003-of-00003.safetensors"
    index["weight_map"] = {tensor: name if one == third else one for tensor, one in index["weight_map"].items()}
    (directory / INDEX).write_text(json.dumps(index))
    refused = loramux("adapters", "push", directory, "--tenant", "acme", "--name", "support", "--json")
    assert refused.exit_code != 0
    error = json.loads(refused.stdout)["error"]
    assert (error["code"], error["param"][: len(param)]) == (code, param)
    assert list(scratch.iterdir()) == []
    assert printed_json(loramux("adapters", "list", "--json"))["data"] == []


def test_a_divided_adapter_is_checked(loramux: Run, scratch: Path, tmp_path: Path) -> None:
    directory = divided(PIRATE, tmp_path / "shards", 2)
    whole = printed_json(loramux("check", PIRATE, "--model", DEMO_BASE, "--json"))
    document = printed_json(loramux("check", directory, "--model", DEMO_BASE, "--json"))
    assert (document["served"], document["path"], document["facts"]["digest"]) == (
        True,
        str(directory),
        whole["facts"]["digest"],
    )
    (directory / "adapter_model-00002-of-00002.safetensors").unlink()
    refused = loramux("check", directory, "--model", DEMO_BASE, "--json")
    (problem,) = json.loads(refused.stdout)["problems"]
    assert problem["code"] == "missing_shard"
    assert list(scratch.iterdir()) == []
