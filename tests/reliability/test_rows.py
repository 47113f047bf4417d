from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.layout.test_layout import ROOT
from tests.reliability.__main__ import main, run_row
from tests.reliability.record import FILE, read_records, recorded
from tests.reliability.rows import FAILURES, ROWS, SIZES, Command, Figure, Row
from tests.reliability.table import table_of

MACHINE = {"commit": "abc", "cpu": "a CPU", "cores": 2}


def row(tmp_path: Path, source: str) -> Row:
    """A row whose command is a module with this source."""
    (tmp_path / "campaign_of_a_test.py").write_text(source)
    return Row(
        title="Kills",
        commands=(Command(arguments=("campaign_of_a_test",), settings={"NUM": ("40", "2", "1")}),),
        figures=(Figure(name="kills", unit="kills", full=80), Figure(name="lost", unit="lost", at_most=0), FAILURES),
    )


@pytest.fixture(autouse=True)
def importable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), str(ROOT), *sys.path]))


RECORDS = "import os\nfrom tests.reliability.record import recorded\n"
SOUND = RECORDS + "for _ in range(2):\n    with recorded('kills', kills=int(os.environ['NUM']), lost=0): pass\n"


def test_figures_come_from_the_records_of_the_campaign(tmp_path: Path) -> None:
    sound = row(tmp_path, SOUND)
    result = run_row("kills", sound, "full", MACHINE)
    assert result["figures"] == {"kills": 80, "lost": 0, "failures": 0}
    assert result["problems"] == []
    small = run_row("kills", sound, "small", MACHINE)
    assert small["figures"]["kills"] == 4
    assert (result["commands"][0]["settings"], small["commands"][0]["settings"]) == ({"NUM": "40"}, {"NUM": "2"})


@pytest.mark.parametrize(
    ("source", "problem"),
    [
        ("", "kills: not recorded"),
        (RECORDS + "with recorded('kills', kills=1, lost=2): pass", "lost: 2 is more than 0"),
        (RECORDS + "with recorded('kills', kills=0, lost=0): pass", "kills: none"),
        (RECORDS + "with recorded('kills', kills=1, lost=0): raise OSError", "failed runs: 1 is more than 0"),
        (SOUND + "raise SystemExit(3)", "campaign_of_a_test ended with 3"),
        (RECORDS + "with recorded('stops', kills=1, lost=0): pass", "kills: not recorded"),
    ],
    ids=["no records", "too many", "none", "raised", "status", "records of another row"],
)
def test_row_fails_unless_its_figures_show_the_promise(tmp_path: Path, source: str, problem: str) -> None:
    assert problem in run_row("kills", row(tmp_path, source), "tiny", MACHINE)["problems"]


def test_run_goes_on_after_a_failed_row_and_keeps_other_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ran: list[str] = []

    def run(name: str, row: Row, size: str, machine: Any) -> dict[str, Any]:
        ran.append(name)
        return {"size": size, "problems": ["lost: 1 is more than 0"] if name == "kills" else []}

    monkeypatch.setattr("tests.reliability.__main__.run_row", run)
    out = tmp_path / "results.json"
    out.write_text(json.dumps({"api": {"size": "full", "problems": []}}))
    assert main(["--size", "tiny", "--only", "kills", "stops", "--out", str(out)]) == 1
    assert ran == ["kills", "stops"]
    assert {name: one["size"] for name, one in json.loads(out.read_text()).items()} == {
        "kills": "tiny",
        "stops": "tiny",
        "api": "full",
    }
    assert main(["--size", "tiny", "--only", "stops", "--out", str(out)]) == 0


def test_table_names_smaller_sizes_other_commits_and_failures() -> None:
    def result(kills: float, commit: str, problems: list[str]) -> dict[str, Any]:
        figures = {"kills": kills, "lost": 0, "unsettled": 0, "undercounted": 0, "failures": 0}
        machine = MACHINE | {"commit": commit}
        return {
            "size": "small",
            "date": "2026-11-28",
            "machine": machine,
            "busy_share": 0.5,
            "duration_s": 90.0,
            "figures": figures,
            "problems": problems,
        }

    full = table_of({"kills": result(10_000, "abc", [])})
    assert "| 10,000 kills; 0 acknowledged, then lost;" in full
    assert "of full" not in full
    assert "| passed |" in full
    assert full.count("not run") == 6 * (len(ROWS) - 1)
    failed = table_of({"kills": result(500, "abc", ["x"]), "stops": result(1, "def", [])})
    assert "| small, 0.05 of full | abc (rows differ) |" in failed
    assert "| **failed**: x |" in failed


def test_nothing_is_recorded_without_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(FILE, raising=False)
    with recorded("kills", kills=1):
        pass
    monkeypatch.setenv(FILE, str(tmp_path / "records"))
    assert read_records(tmp_path / "records", "kills") == []

    def fail() -> None:
        with recorded("kills") as figures:
            figures["kills"] = 3
            raise ValueError("broken")

    with pytest.raises(ValueError, match="broken"):
        fail()
    assert read_records(tmp_path / "records", "kills") == [{"kills": 3, "failures": 1}]


@pytest.mark.parametrize("name", ROWS)
def test_row_runs_tests_that_exist_with_variables_that_they_read(name: str) -> None:
    for command in ROWS[name].commands:
        assert set(command.sized) <= set(SIZES)
        tests = [ROOT / word.partition("::")[0] for word in command.arguments if word.startswith("tests/")]
        sources = [file.read_text() for path in tests for file in ([path] if path.is_file() else path.rglob("*.py"))]
        if command.arguments[0] == "pytest":
            assert sources
        functions = [word.partition("::")[2] for word in command.arguments if "::" in word]
        assert all(any(f"def {function}(" in source for source in sources) for function in functions)
        assert all(any(variable in source for source in sources) for variable in command.settings)
        module = ROOT / command.arguments[0].replace(".", "/")
        recording = sources or [
            path.read_text() for path in (module.with_suffix(".py"), module / "__main__.py") if path.is_file()
        ]
        assert any(f'"{name}"' in source for source in recording), "it records figures of this row"
