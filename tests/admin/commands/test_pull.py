"""`loramux pull` and `loramux models`, and the commands that take a pulled model by its URL."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from loramux.admin.server.pulled_model import shown_bytes
from loramux.engine.llm import LLM
from tests.adapter_store.hub.local_hub import TOKEN, LocalHub, running_hub
from tests.admin.command_line import invoke, printed_json
from tests.demo_base import DEMO_BASE

BASE = "acme/demo"
FILES = {path.name: path.read_bytes() for path in DEMO_BASE.iterdir() if path.is_file()}
SIZE = sum(map(len, FILES.values()))


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[LocalHub]:
    """A hub that has the demo base, chosen by the variables of Hugging Face's tools."""
    for name in ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", "HF_HUB_OFFLINE"):
        monkeypatch.delenv(name, raising=False)
    with running_hub() as hub:
        hub.push(BASE, {**FILES, "pytorch_model.bin": b"\x80"})
        monkeypatch.setenv("HF_ENDPOINT", hub.url)
        monkeypatch.setenv("LORAMUX_DATA_DIR", str(tmp_path / "data"))
        yield hub


def refused(*arguments: object) -> tuple[str, str]:
    """The code and message of a refusal, which is a sentence on standard error or JSON."""
    spoken = invoke(*arguments)
    document = json.loads(invoke(*arguments, "--json").stdout)["error"]
    assert spoken.exit_code == 1
    assert document["message"] in spoken.stderr
    return document["code"], document["message"]


def test_model_is_pulled_listed_used_and_removed(hub: LocalHub, tmp_path: Path) -> None:
    commit = hub.revisions[BASE, "main"]
    directory = tmp_path / "data" / "models" / "hf" / "acme" / "demo" / commit
    planned = invoke("pull", BASE, "--dry-run").stdout
    assert f"hf://{BASE}@main (commit {commit}): {len(FILES)} files, {shown_bytes(SIZE)}, to {directory}" in planned
    assert all(name in planned for name in FILES)
    assert "pytorch_model.bin" not in planned
    assert not directory.exists()

    result = invoke("pull", BASE)
    assert result.exit_code == 0, result.output
    assert result.stdout.splitlines()[-1] == f"serve it without a network: loramux serve --model hf://{BASE}@main"
    assert {path.name: path.read_bytes() for path in directory.iterdir()} == FILES
    assert ((tmp_path / "data").stat().st_mode & 0o777) == 0o700
    assert invoke("pull", BASE, "--dry-run").stdout.splitlines()[-1] == "  all of them are here"
    again = printed_json(invoke("pull", f"hf://{BASE}", "--json"))
    assert (again["missing_bytes"], again["path"], len(again["files"])) == (0, str(directory), len(FILES))

    (listed,) = printed_json(invoke("models", "list", "--json"))["data"]
    assert (listed["commit"], listed["revisions"], listed["num_bytes"]) == (commit, ["main"], SIZE)
    assert f"hf://{BASE}@{commit}" in invoke("models", "list").stdout

    hub.requests.clear()
    assert printed_json(invoke("check", f"hf://{BASE}", "--json"))["path"] == str(directory)
    pirate = DEMO_BASE.parent / "adapters" / "pirate"
    assert printed_json(invoke("check", pirate, "--model", f"hf://{BASE}", "--json"))["served"]
    assert printed_json(invoke("doctor", "--plan", f"hf://{BASE}", "--json"))["data"][0]["weights_bytes"] > 0
    assert not hub.requests

    removed = printed_json(invoke("models", "rm", BASE, "--json"))
    assert removed["num_bytes"] == SIZE
    assert not directory.exists()
    assert refused("models", "rm", BASE)[0] == "not_pulled"
    assert printed_json(invoke("models", "list", "--json"))["data"] == []


def test_commands_name_a_model_that_was_not_pulled(hub: LocalHub) -> None:
    for arguments in (("check", f"hf://{BASE}"), ("doctor", "--plan", f"hf://{BASE}")):
        assert refused(*arguments) == (
            "not_pulled",
            f"hf://{BASE}@main has not been pulled: run 'loramux pull hf://{BASE}@main' first",
        )
    findings = printed_findings("--model", f"hf://{BASE}")
    assert [finding["grade"] for finding in findings if finding["check"] == "model"] == ["warning"]
    assert not hub.requests


def printed_findings(*arguments: object) -> list[dict[str, Any]]:
    return list(json.loads(invoke("doctor", *arguments, "--json").stdout)["findings"])


def test_doctor_checks_a_pulled_model(hub: LocalHub) -> None:
    invoke("pull", BASE)
    found = {finding["check"]: finding["grade"] for finding in printed_findings("--model", f"hf://{BASE}")}
    assert (found["model"], found["tokenizer"]) == ("ok", "ok")


def test_refusals_are_explained(hub: LocalHub, monkeypatch: pytest.MonkeyPatch) -> None:
    assert refused("pull", "demo")[0] == "invalid_model"
    assert refused("pull", "acme/unknown")[0] == "source_not_found"
    hub.private.add(BASE)
    code, message = refused("pull", BASE)
    assert (code, "Set HF_TOKEN" in message) == ("source_unauthorized", True)
    monkeypatch.setenv("HF_TOKEN", f"{TOKEN}\n")
    assert invoke("pull", BASE).exit_code == 0
    monkeypatch.setenv("HF_TOKEN", "hf_\x07")
    assert refused("pull", BASE)[0] == "source_not_trusted"
    monkeypatch.delenv("HF_TOKEN")
    monkeypatch.setenv("HF_ENDPOINT", "http://hub.test")
    assert refused("pull", BASE)[0] == "source_not_trusted"


def test_own_settings_win_over_those_of_hugging_face(hub: LocalHub, monkeypatch: pytest.MonkeyPatch) -> None:
    hub.private.add(BASE)
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setenv("HF_TOKEN", "hf_wrong")
    monkeypatch.setenv("LORAMUX_HF_ENDPOINT", hub.url)
    monkeypatch.setenv("LORAMUX_HF_TOKEN", TOKEN)
    assert invoke("pull", BASE, "--dry-run").exit_code == 0


@pytest.mark.parametrize("name", ["HF_HUB_OFFLINE", "LORAMUX_HF_OFFLINE"])
def test_offline_pull_is_refused(hub: LocalHub, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setenv(name, "1")
    code, message = refused("pull", BASE)
    assert (code, "pull it online first" in message) == ("not_pulled", True)
    assert not hub.requests
    monkeypatch.delenv(name)
    path = printed_json(invoke("pull", BASE, "--json"))["path"]
    hub.requests.clear()
    monkeypatch.setenv(name, "1")
    assert printed_json(invoke("pull", BASE, "--json"))["path"] == path
    assert not hub.requests


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"config.json": b'{"architectures": ["TwoTowerForCausalLM"]}'}, "TwoTowerForCausalLM"),
        ({"tokenizer.json": None}, "no tokenizer.json"),
    ],
)
def test_model_that_cannot_be_served_is_refused_before_its_weights(
    hub: LocalHub, change: dict[str, bytes | None], said: str
) -> None:
    files = {**FILES, **change}
    hub.push(BASE, {name: content for name, content in files.items() if content is not None})
    code, message = refused("pull", BASE)
    assert code == "not_a_base"
    assert said in message
    assert not any(path.startswith("/store/") for path, _ in hub.requests)


def test_python_programs_pull_by_name(hub: LocalHub) -> None:
    with LLM(f"hf://{BASE}", pool_bytes=32 << 20, max_sequences=2, max_batch_tokens=64, num_threads=1) as llm:
        (answer,) = llm.generate(["The capital of France is"], max_tokens=2)
    assert answer.text
    hub.requests.clear()
    assert printed_json(invoke("models", "list", "--json"))["data"][0]["model"].startswith(f"hf://{BASE}@")
    assert not hub.requests


@pytest.mark.parametrize(
    ("num_bytes", "shown"),
    [
        (0, "0 B"),
        (999, "999 B"),
        (1000, "1 kB"),
        (4_938_000_000, "4.94 GB"),
        (250_000_000, "250 MB"),
        (10**15, "1000 TB"),
    ],
)
def test_sizes_are_short(num_bytes: int, shown: str) -> None:
    assert shown_bytes(num_bytes) == shown
