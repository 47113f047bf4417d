from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from tests import campaigns
from tests.campaigns import CAMPAIGNS, main
from tests.reliability.rows import ROWS

Call = tuple[list[str], Mapping[str, str]]


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[Call]:
    """The commands that would run, without the interpreter, each with its environment. All exit with status 0."""
    made: list[Call] = []

    def run(command: Sequence[str], *, env: Mapping[str, str], **_: Any) -> subprocess.CompletedProcess[str]:
        made.append(([*command[1:]], env))
        return subprocess.CompletedProcess(command, 0)

    monkeypatch.setattr(campaigns.subprocess, "run", run)
    return made


def test_without_a_name_all_campaigns_are_listed(capsys: pytest.CaptureFixture[str], calls: list[Call]) -> None:
    assert main([]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == list(CAMPAIGNS)
    assert all(campaign.line in line for line, campaign in zip(lines, CAMPAIGNS.values(), strict=True))
    assert calls == []


def test_unknown_name_is_refused_with_the_known_ones(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exited:
        main(["fleets"])
    assert exited.value.code == 2
    assert "fleets" in (said := capsys.readouterr().err)
    assert "'fleet'" in said


def test_the_users_arguments_follow_the_campaigns(calls: list[Call]) -> None:
    assert main(["quotas", "-k", "two words", "--timeout", "10"]) == 0
    ((command, _),) = calls
    assert command == [
        *("-m", "pytest", "tests/platform/quotas/test_quota_machine.py", "-m", "campaign", "--timeout", "3600"),
        *("-k", "two words", "--timeout", "10"),
    ]


def test_the_users_settings_win(calls: list[Call], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LORAMUX_GATEWAY_CUTS", "7")
    monkeypatch.setenv("LORAMUX_GATEWAY_STOPS", "")
    monkeypatch.delenv("LORAMUX_GATEWAY_KILLS", raising=False)
    assert main(["fleet"]) == 0
    ((_, environment),) = calls
    assert [environment[f"LORAMUX_GATEWAY_{name}"] for name in ("CUTS", "STOPS", "KILLS")] == ["7", "100", "40"]
    assert environment["PATH"] == os.environ["PATH"]


def test_arguments_go_to_the_last_of_two_commands(calls: list[Call]) -> None:
    assert main(["templates", "--out", "FILE"]) == 0
    assert [command[1] for command, _ in calls] == ["pytest", "tests.conformance.chat_templates"]
    assert "--out" not in calls[0][0]
    assert calls[1][0][2:] == ["--out", "FILE"]


def test_only_the_last_command_runs_in_the_campaigns_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    ran: list[str] = []

    def run(command: Sequence[str], **_: Any) -> subprocess.CompletedProcess[str]:
        ran.append(command[0])
        return subprocess.CompletedProcess(command, 0)

    monkeypatch.setattr(campaigns.subprocess, "run", run)
    assert main(["cluster"]) == 0
    assert ran == [sys.executable, ".venv-cluster/bin/python"]


def test_failed_command_ends_the_campaign(monkeypatch: pytest.MonkeyPatch) -> None:
    ran = []

    def run(command: Sequence[str], **_: Any) -> subprocess.CompletedProcess[str]:
        ran.append(command)
        return subprocess.CompletedProcess(command, 3)

    monkeypatch.setattr(campaigns.subprocess, "run", run)
    assert main(["templates"]) == 3
    assert len(ran) == 1


def test_nightly_names_need_only_the_standard_library() -> None:
    """CI asks for them before it installs anything."""
    command = [sys.executable, "-I", "-S", campaigns.__file__, "--nightly"]
    named = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    assert set(named) == CAMPAIGNS.keys() - {"full-disk"}


def test_every_test_of_a_campaign_is_run_by_one() -> None:
    root = Path(__file__).parents[2]
    commands = [argument for one in CAMPAIGNS.values() for command in one.commands for argument in command]
    commands += [word for row in ROWS.values() for command in row.commands for word in command.arguments]
    named = {*commands, *re.findall(r"tests/[\w/.]+", (root / "Makefile").read_text())}
    mark = re.compile(r"\bmark\.(campaign|fleet|cluster)\b|\bFOR_GPUS\b")
    marked = [path for path in (root / "tests").rglob("test_*.py") if mark.search(path.read_text())]
    assert len(marked) > 50
    lost = [
        path for path in marked if named.isdisjoint(map(str, (path.relative_to(root), *path.relative_to(root).parents)))
    ]
    assert lost == []
