"""Two versions take turns, and ratios compare their medians."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from benchmarks.answers import CheckError
from benchmarks.versions import KINDS, OWN_CODE, compare, main


class FakeVersion:
    def __init__(self, name: str, seconds: float, token: int, log: list[str]) -> None:
        self._name, self._seconds, self._token, self._log = name, seconds, token, log

    def decode(self, kind: str, seed: int, num_steps: int) -> tuple[float, list[list[int]]]:
        self._log.append(f"{self._name} {seed}")
        return self._seconds, [[self._token] * num_steps]


def test_versions_alternate_and_are_compared() -> None:
    log: list[str] = []
    cases = compare(FakeVersion("old", 0.1, 7, log), FakeVersion("new", 0.11, 7, log), 2, 4)
    assert [case["kind"] for case in cases] == list(KINDS)
    assert [(case["after_over_before"], case["after_over_before_by_round"]) for case in cases] == [(1.1, 1.1)] * 2
    assert log[2:6] == ["old 0", "new 0", "new 1", "old 1"]


def test_different_tokens_end_the_comparison() -> None:
    with pytest.raises(CheckError, match="base only"):
        compare(FakeVersion("old", 0.1, 7, []), FakeVersion("new", 0.1, 8, []), 2, 4)


def test_a_folder_without_a_checkout_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(tmp_path), "--allow-busy"]) == 1
    assert "is not a checkout of loramux" in capsys.readouterr().out.replace("\n", " ")


def test_a_version_does_not_see_the_modules_of_another(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own, other = (tmp_path / name / ".src" for name in ("own", "other"))
    for source in (own, other):
        (source / "loramux").mkdir(parents=True)
    (tmp_path / "packages").mkdir()
    monkeypatch.setattr(sys, "path", [str(own), str(tmp_path / "packages"), str(other)])
    monkeypatch.chdir(tmp_path / "own")
    exec(OWN_CODE, {})
    assert sys.path == [str(own), str(tmp_path / "packages")]
