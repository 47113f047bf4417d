"""`loramux adapters merge` merges a tenant's own adapters into a new version."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

from tests.admin.command_line import Run, printed_json

Push = Callable[..., Path]
TENSORS = "adapter_model.safetensors"


@pytest.fixture
def push(loramux: Run, make_adapter: Callable[..., Path]) -> Push:
    """A function that pushes a new adapter under a full name and returns its directory."""

    def push(model: str, rank: int = 2, files: dict[str, str] | None = None, **config: object) -> Path:
        tenant, name = model.split("/")
        loramux("tenants", "create", tenant)
        directory = make_adapter(rank, config)
        for file_name, text in (files or {}).items():
            (directory / file_name).write_text(text)
        printed_json(loramux("adapters", "push", directory, "--tenant", tenant, "--name", name, "--json"))
        return directory

    return push


@pytest.fixture
def scratch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The directory for temporary files, which must be empty after every command."""
    directory = tmp_path / "scratch"
    directory.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(directory))
    return directory


@pytest.fixture
def as_developer(loramux: Run, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """A function that makes a tenant's developer key the one that later commands use."""

    def use(tenant: str) -> None:
        key = printed_json(loramux("keys", "create", "--tenant", tenant, "--scope", "tenant:develop", "--json"))
        monkeypatch.setenv("LORAMUX_ADMIN_KEY", key["secret"])

    return use


def refusal(result: Any, exit_code: int = 1) -> tuple[str, str]:
    assert result.exit_code == exit_code, result.output
    error = json.loads(result.stdout)["error"]
    return error["code"], error["param"]


def effect(directory: Path, name: str, scale: float) -> Any:
    tensors = load_file(directory / TENSORS)
    prefix = "base_model.model.model.layers.1.mlp.down_proj"
    return scale * (tensors[f"{prefix}.lora_B.weight"] @ tensors[f"{prefix}.lora_A.weight"])


def test_developer_merges_own_adapters(
    loramux: Run, push: Push, as_developer: Callable[[str], None], scratch: Path, tmp_path: Path
) -> None:
    one = push("acme/one", 2, {"chat_template.jinja": "{{ messages[0].content }}"})
    two = push("acme/two", 3)
    push("acme/one", 4)
    as_developer("acme")
    merge = ("adapters", "merge", "acme/one=0.5", "acme/two@1=-2", "--into", "acme/both", "--method", "cat")
    merged = printed_json(loramux(*merge, "--json"))
    assert (merged["model"], merged["version"], merged["method"]) == ("acme/both", 1, "cat")
    assert merged["sources"] == [{"model": "acme/one@1", "weight": 0.5}, {"model": "acme/two@1", "weight": -2.0}]
    assert list(scratch.iterdir()) == []
    place = tmp_path / "pulled"
    assert loramux("adapters", "pull", "acme/both", place).exit_code == 0
    wanted = 0.5 * effect(one, "one", 2.0) - 2 * effect(two, "two", 2.0)
    np.testing.assert_allclose(effect(place, "both", 1.0), wanted, rtol=1e-4, atol=1e-6)
    assert (place / "chat_template.jinja").read_text() == "{{ messages[0].content }}"
    spoken = loramux(*merge)
    assert spoken.stdout == "acme/both version 1 is 0.5 acme/one@1 + -2 acme/two@1 (cat, rank 5)\n", spoken.output


def test_random_merge_with_the_same_seed_is_the_same_version(loramux: Run, push: Push) -> None:
    for name in ("acme/one", "acme/two"):
        push(name)
    merge = ("adapters", "merge", "acme/one", "acme/two", "--into", "acme/both", "--json")
    dare = (*merge, "--method", "dare_ties", "--density", "0.5", "--sign-rule", "frequency")
    first = printed_json(loramux(*dare, "--seed", 1))
    assert printed_json(loramux(*dare, "--seed", 1)) == first
    assert printed_json(loramux(*dare, "--seed", 2))["version"] == 2
    assert printed_json(loramux(*merge, "--method", "ties", "--density", "0.5"))["version"] == 3


def test_adapters_of_another_tenant_are_not_merged(
    loramux: Run, push: Push, as_developer: Callable[[str], None], scratch: Path
) -> None:
    for name in ("acme/one", "acme/two", "rival/one"):
        push(name)
    merge = ("adapters", "merge", "acme/one", "rival/one", "--json", "--into")
    for into in ("acme/both", "rival/both"):
        code, param = refusal(loramux(*merge, into))
        assert (code, param) == ("merge_across_tenants", "rival/one" if into.startswith("acme") else "acme/one")
    as_developer("acme")
    assert refusal(loramux(*merge, "acme/both"))[0] == "tenant_not_found"
    # Naming the other tenant as the destination reveals and creates nothing.
    stolen = ("adapters", "merge", "acme/one", "acme/two", "--json", "--into", "rival/both")
    assert refusal(loramux(*stolen))[0] == "merge_across_tenants"
    assert [adapter["name"] for adapter in printed_json(loramux("adapters", "list", "--json"))["data"]] == [
        "two",
        "one",
    ]
    assert list(scratch.iterdir()) == []


WRONG = [
    (("acme/one", "--into", "acme/both"), "invalid_sources"),
    (("acme/one", "acme/two=0", "--into", "acme/both"), "invalid_weight"),
    (("acme/one", "acme/two=nan", "--into", "acme/both"), "invalid_weight"),
    (("acme/one", "acme/two=1e999", "--into", "acme/both"), "invalid_weight"),
    (("acme/one", "acme/two=heavy", "--into", "acme/both"), "invalid_sources"),
    (("acme/one", "acme/two=1=2", "--into", "acme/both"), "invalid_sources"),
    (("acme/one", "acme/two", "--into", "both"), "invalid_model_name"),
    (("acme/one", "acme/two", "--into", "acme/both@2"), "invalid_model_name"),
    (("acme/one", "acme/one", "--into", "acme/both", "--density", "0.5"), "invalid_density"),
    (("acme/one", "acme/one", "--into", "acme/both", "--method", "ties", "--density", "2"), "invalid_density"),
    (("acme/one",) * 17 + ("--into", "acme/both"), "invalid_sources"),
]

UNUSABLE = [
    (("acme/one", "acme/two@9", "--into", "acme/both"), "version_not_found"),
    (("acme/one", "acme/three", "--into", "acme/both"), "adapter_not_found"),
    (("acme/one", "acme/two", "--into", "acme/both"), "rank_mismatch"),
    (("acme/one", "acme/one=-1", "--into", "acme/both"), "zero_effect"),
]


def test_wrong_options_are_refused_before_anything_is_sent(loramux: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LORAMUX_ADMIN_URL", "http://127.0.0.1:1")
    for arguments, code in WRONG:
        assert refusal(loramux("adapters", "merge", *arguments, "--json"), exit_code=2)[0] == code, arguments


def test_unusable_merges_are_refused(loramux: Run, push: Push, scratch: Path) -> None:
    push("acme/one", 2)
    push("acme/two", 3)
    for arguments, code in UNUSABLE:
        assert refusal(loramux("adapters", "merge", *arguments, "--json"))[0] == code, arguments
        assert list(scratch.iterdir()) == []
    unnamed = loramux("adapters", "merge", "acme/one", "two", "--into", "acme/both", "--json")
    assert refusal(unnamed, exit_code=2) == ("invalid_model_name", "model")
    adapters = printed_json(loramux("adapters", "list", "--json"))["data"]
    # The server refused only the merge without an effect, and keeps its report.
    assert {adapter["name"]: adapter["aliases"] for adapter in adapters}["both"] == {}


@pytest.mark.parametrize("method", ["svd", "ties_svd", "magnitude_prune", "LINEAR", ""])
def test_method_that_is_not_offered_is_refused_by_name(loramux: Run, method: str) -> None:
    result = loramux("adapters", "merge", "acme/one", "acme/two", "--into", "acme/both", "--method", method)
    assert (result.exit_code, repr(method) in result.stderr) == (2, True)
