"""What tenants, files and servers choose cannot control the terminal to which a command prints it."""

from __future__ import annotations

import json
import sys
import unicodedata
from collections.abc import Callable

import pytest
import typer

from loramux.admin.commands import output
from loramux.admin.commands.administration.quota_plot import print_plot
from loramux.admin.commands.inference.chat import Terminal
from loramux.admin.commands.local import doctor
from loramux.admin.doctor.findings import Finding, Grade

UNSAFE = "\x1b]52;c;eA==\x1b\\ \x9b2J \x7f \u202e \U000e0041"
LIMIT = {
    "metric": UNSAFE,
    "scope": UNSAFE,
    "mode": UNSAFE,
    "unit": UNSAFE,
    "is_inherited": True,
    "is_exceeded": False,
    "num_exceeded": 0,
    "used": 0,
    "reserved": 0,
    "limit": 1,
    "burst": 1,
    "reset_at": None,
}


def fail_with_it() -> None:
    with pytest.raises(typer.Exit):
        output.fail(UNSAFE, 1)


def wide_table() -> None:
    output.print_table((UNSAFE, "b", "c"), [(UNSAFE, "x" * 200, None)])


@pytest.mark.parametrize(
    "show",
    [
        pytest.param(lambda: output.print_table((UNSAFE, "b"), [(UNSAFE, UNSAFE)]), id="table"),
        pytest.param(wide_table, id="records"),
        pytest.param(lambda: output.print_text(UNSAFE), id="text"),
        pytest.param(lambda: output.tell({}, UNSAFE, False), id="sentence"),
        pytest.param(lambda: output.print_json({UNSAFE: [UNSAFE]}), id="json"),
        pytest.param(lambda: output.print_csv((UNSAFE,), [(UNSAFE,)]), id="csv"),
        pytest.param(lambda: output.print_exact(UNSAFE), id="document"),
        pytest.param(
            lambda: output.print_warnings([{"message": UNSAFE, "count": 1, "params": [UNSAFE]}]), id="warning"
        ),
        pytest.param(fail_with_it, id="error"),
        pytest.param(lambda: print_plot([LIMIT]), id="plot"),
        pytest.param(lambda: Terminal().tell(UNSAFE), id="chat"),
        pytest.param(
            lambda: doctor._show(Finding(check="x", grade=Grade.OK, message=UNSAFE, mend=UNSAFE)), id="finding"
        ),
    ],
)
def test_text_of_others_cannot_control_the_terminal(
    show: Callable[[], None], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("TERM", "dumb")
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    show()
    printed = "".join(capsys.readouterr())
    assert "52;c;eA==" in printed
    assert {unicodedata.category(one) for one in printed.replace("\r\n", "").replace("\n", "")}.isdisjoint({"Cc", "Cf"})


def test_json_and_documents_for_a_program_keep_every_character(capsys: pytest.CaptureFixture[str]) -> None:
    output.print_json([UNSAFE, "ü\u200d\n"])
    assert json.loads(capsys.readouterr().out) == [UNSAFE, "ü\u200d\n"]
    output.print_exact(f"{UNSAFE}\r\n")
    assert capsys.readouterr().out == f"{UNSAFE}\r\n"


def test_titles_of_a_table_are_no_markup(capsys: pytest.CaptureFixture[str]) -> None:
    output.print_table(("[bold]a[/]", "b"), [])
    assert "[bold]a[/]" in capsys.readouterr().out
