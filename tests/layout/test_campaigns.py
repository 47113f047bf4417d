from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import pytest
from _pytest.mark.expression import Expression

from tests import campaigns
from tests.campaigns import CAMPAIGNS, main
from tests.layout.test_layout import ROOT
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


BY_HAND = {
    "test-browser": "needs root to install Chromium",
    "test-container": "needs root for a chroot",
    "test-gpu": "needs a GPU",
    "test-harnesses": "installs vLLM and other programs of several gigabytes",
    "test-prometheus": "needs root to install Prometheus",
    "test-strangers": "depends on the versions of other servers that their indexes keep",
}
"""Targets that nothing runs by itself, each with the reason."""
ELSEWHERE = {
    "test-changed": "make test",
    "test-fast": "make test",
    "test-cluster": "cluster",
    "test-docs": "docs",
    "test-s3": "s3",
    "test-package": "release.yml",
}
"""Targets whose tests run in another target, campaign or workflow. Only radosgw is left out of `test-s3`."""


def test_each_target_of_tests_runs_by_itself_or_has_a_reason() -> None:
    targets = set(re.findall(r"^(test-[\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    nightly = (ROOT / ".github" / "workflows" / "nightly.yml").read_text()
    (matrix,) = re.findall(r"name: \[(.*)\]", nightly)
    assert sorted([*BY_HAND, *ELSEWHERE, *matrix.split(", ")]) == sorted(targets)
    nightly_campaigns = {name for name, campaign in CAMPAIGNS.items() if campaign.is_nightly}
    assert set(ELSEWHERE.values()) - nightly_campaigns == {"make test", "release.yml"}
    assert "make test-package" in (ROOT / ".github" / "workflows" / "release.yml").read_text()


def runs_of(arguments: Sequence[str]) -> Iterator[tuple[list[str], Expression]]:
    """The paths and the marks that a pytest command selects. Nothing for a command without marks."""
    if "pytest" in arguments[:1] and "-m" in arguments:
        paths = [word for word in arguments if word.startswith("tests/")]
        yield paths, Expression.compile(arguments[arguments.index("-m") + 1])


def makefile_commands() -> list[list[str]]:
    """The arguments of each `python -m` in the Makefile."""
    makefile = (ROOT / "Makefile").read_text().replace("\\\n", " ")
    variables = dict(re.findall(r"^(\w+) :?= (.*)$", makefile, re.MULTILINE))
    lines = re.sub(r"\$\((S3_TESTS)\)", lambda match: variables[match[1]], makefile)
    return [shlex.split(words) for words in re.findall(r"^\t.*/python -m (.*)$", lines, re.MULTILINE)]


def test_every_test_of_a_campaign_is_run_by_one(campaign_tests: Mapping[str, frozenset[str]]) -> None:
    """Checks the tests that this run collected, which are all of them in `make test`."""
    commands = [command for one in CAMPAIGNS.values() for command in one.commands]
    commands += [command.arguments for row in ROWS.values() for command in row.commands]
    runs = [run for command in (*commands, *makefile_commands()) for run in runs_of(command)]
    assert len(runs) > 40

    def is_run(name: str, marks: frozenset[str]) -> bool:
        return any(
            any(name == path or name.startswith((f"{path}/", f"{path}::", f"{path}[")) for path in paths)
            and expression.evaluate(lambda mark, /, **_: mark in marks)
            for paths, expression in runs
        )

    lost = [name for name, marks in campaign_tests.items() if not is_run(name, marks)]
    assert lost == []
