"""A server pulls the model that its URL names, and starts again without the hub."""

from __future__ import annotations

import io
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from loramux.adapter_store.errors import PullRefused
from loramux.adapter_store.pulling.model_cache import ModelCache
from loramux.adapter_store.pulling.model_name import ModelName
from loramux.admin.errors import StartRefused
from loramux.admin.server.pulled_model import local_model
from loramux.admin.server.settings import Settings, SettingsError, load_settings
from tests.adapter_store.hub.local_hub import LocalHub, running_hub
from tests.admin.serving.test_serve import Server, serve
from tests.demo_base import DEMO_BASE

NAME = "hf://acme/demo"
KEY = "a-platform-administrators-key-of-32-characters"
FILES = {path.name: path.read_bytes() for path in DEMO_BASE.iterdir() if path.is_file()}


def started(process: subprocess.Popen[str]) -> tuple[list[str], Server]:
    """Return the lines before the server's summary, and the server."""
    before: list[str] = []
    assert process.stdout is not None
    for line in process.stdout:
        before.append(line.rstrip())
        if line.startswith(f"the model {NAME}"):
            return before, Server(process)
    raise AssertionError(process.stderr.read() if process.stderr else "")


def stopped(process: subprocess.Popen[str]) -> None:
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=40)


@pytest.mark.campaign
def test_server_pulls_its_model_and_starts_again_without_the_hub(tmp_path: Path) -> None:
    arguments = ("--model", NAME, "--data-dir", tmp_path / "data", "--port", 0, "--admin-port", 0)
    models = ModelCache(tmp_path / "data" / "models")
    with running_hub() as hub:
        commit = hub.push("acme/demo", FILES)
        process = serve(*arguments, HF_ENDPOINT=hub.url, LORAMUX_ADMIN_KEY=KEY)
        try:
            before, server = started(process)
            assert before[0].startswith(f"{NAME}@main (commit {commit}): {len(FILES)} files, 5.05 MB, to ")
            assert len([line for line in before if line.endswith(tuple(FILES))]) == len(FILES)
            assert server.lines[0].startswith("loramux serves demo (cpu, ")
            with httpx.Client(trust_env=False, timeout=30) as http:
                assert http.get(f"{server.url}/health/ready").status_code == 200
                shown = http.get(
                    f"{server.admin_url}/admin/v1/server", headers={"authorization": f"Bearer {KEY}"}
                ).json()
                assert (shown["base_model"], shown["model_source"]) == ("demo", f"{NAME}@{commit}")
            with pytest.raises(PullRefused) as error:
                models.remove(ModelName.parse(NAME))
            assert error.value.code == "model_in_use"
        finally:
            stopped(process)
        # The revision moves while no server runs. What was pulled is served until it is pulled again.
        hub.push("acme/demo", {**FILES, "config.json": b"{}"})
        url = hub.url
    process = serve(*arguments, HF_ENDPOINT=url)
    try:
        before, server = started(process)
        assert before == [f"the model {NAME}@main is {tmp_path}/data/models/hf/acme/demo/{commit}"]
        assert server.lines[0].startswith("loramux serves demo (cpu, ")
    finally:
        stopped(process)
    assert models.remove(ModelName.parse(NAME)) == sum(map(len, FILES.values()))


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[LocalHub]:
    with running_hub() as hub:
        hub.push("acme/demo", FILES)
        monkeypatch.setenv("HF_ENDPOINT", hub.url)
        monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
        yield hub


def settings_of(data_dir: Path, model: str = NAME, **overrides: object) -> Settings:
    return load_settings(Settings, {"model": model, "data_dir": data_dir, **overrides})


def test_model_is_pulled_once_and_takes_the_place_of_its_url(
    hub: LocalHub, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = settings_of(tmp_path / "data")
    assert settings.resolved_served_name == "demo"
    with local_model(settings) as local:
        assert {path.name: path.read_bytes() for path in local.model_dir.iterdir()} == FILES
        assert local.resolved_served_name == "demo"
        assert local.model_copy(update={"port": 1}).model_source == f"{NAME}@{local.model_dir.name}"
        with pytest.raises(PullRefused):
            ModelCache(tmp_path / "data" / "models").remove(ModelName.parse(NAME))
    told = capsys.readouterr().out.splitlines()
    assert f"6 files, 5.05 MB, to {local.model_dir}" in told[0]
    assert told[-1] == f"the model {NAME}@main is {local.model_dir}"
    hub.requests.clear()
    hub.push("acme/demo", {**FILES, "config.json": b"{}"})
    with local_model(settings_of(tmp_path / "data", served_name="base")) as again:
        assert (again.model_dir, again.resolved_served_name) == (local.model_dir, "base")
    assert not hub.requests, "a pulled model is served without asking whether its revision has moved"
    assert capsys.readouterr().out.splitlines() == told[-1:]


def test_server_says_that_an_earlier_release_pulled_its_model(
    hub: LocalHub, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with local_model(settings_of(tmp_path)) as local:
        commit = local.model_dir.name
    assert "earlier release" not in capsys.readouterr().out
    record = tmp_path / "models" / "hf" / "acme" / "demo" / "pulled.json"
    record.write_text(record.read_text().replace(',"selection":2', ""))
    with local_model(settings_of(tmp_path)):
        assert f"run 'loramux pull {NAME}@{commit}'" in capsys.readouterr().out


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_progress_is_shown_on_a_terminal(hub: LocalHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "120")
    with local_model(settings_of(tmp_path)):
        shown = terminal.getvalue()
    assert "model.safetensors" in shown
    assert "5.0/5.0 MB" in shown


def test_servers_can_share_the_directory_of_models(hub: LocalHub, tmp_path: Path) -> None:
    for name in ("one", "two"):
        with local_model(settings_of(tmp_path / name, models_dir=tmp_path / "shared")) as local:
            assert local.model_dir.is_relative_to(tmp_path / "shared")
    assert len([path for path, _ in hub.requests if path.startswith("/store/")]) == 1


def test_server_names_a_model_that_it_cannot_pull(
    hub: LocalHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(SettingsError, match="does not have the form"):
        settings_of(tmp_path, "hf://demo")
    with pytest.raises(StartRefused, match="no such repository"), local_model(settings_of(tmp_path, "hf://acme/other")):
        pass
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(StartRefused, match="has not been pulled"), local_model(settings_of(tmp_path)):
        pass
    (tmp_path / "file").write_text("")
    monkeypatch.delenv("HF_HUB_OFFLINE")
    with pytest.raises(StartRefused, match="cannot be used"), local_model(settings_of(tmp_path / "file")):
        pass
