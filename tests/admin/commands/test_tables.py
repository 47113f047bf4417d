from __future__ import annotations

import re

import pytest

from loramux.admin.commands.output import print_table

ID = "key_01a200b50a6f707791b8bc9d866db096"
COLUMNS = ("id", "name", "scopes", "created")
ROWS = [
    (ID, "ci", "adapters,base", "2026-01-02 03:04:05Z"),
    (ID, "[bold]web[/bold] " + "x" * 90, None, "2026-01-02 03:04:05Z"),
]


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    for name in ("NO_COLOR", "TTY_COMPATIBLE"):
        monkeypatch.setenv(name, "1")
    monkeypatch.setenv("COLUMNS", "80")
    return monkeypatch


def test_table_that_fits_has_one_line_per_row(terminal: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    print_table(COLUMNS[:3], [row[:3] for row in ROWS[:1]])
    assert len(capsys.readouterr().out.splitlines()) == 2


def test_wide_table_is_shown_as_untruncated_records(
    terminal: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    print_table(COLUMNS, ROWS)
    shown = re.sub(r"\x1b\[\d+m", "", capsys.readouterr().out)
    assert max(len(line.rstrip()) for line in shown.splitlines()) <= 80
    assert "\u2026" not in shown
    assert [line.split()[-1] for line in shown.splitlines() if line.startswith("id ")] == [ID, ID]
    assert "[bold]web[/bold]" in shown
    assert shown.count("x") == 90


def test_output_without_a_terminal_has_one_line_per_row(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    print_table(COLUMNS, ROWS)
    assert len(capsys.readouterr().out.splitlines()) == 3
