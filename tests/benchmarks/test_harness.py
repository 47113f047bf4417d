"""Every benchmark refuses wrong results in the same way, and writes its figures with the same head."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import pytest

from benchmarks import harness
from benchmarks.answers import CheckError, RunFailed
from benchmarks.harness import begin, new_parser, percentiles_ms, reports_failure, require_below, rotated


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        pytest.param(CheckError("[1, 2] is wrong"), "nothing was measured: [1, 2] is wrong\n", id="wrong result"),
        pytest.param(RunFailed("a server ended"), "a server ended\n", id="failed peer"),
    ],
)
def test_failure_is_printed_and_ends_the_run(
    error: RunFailed, expected: str, capsys: pytest.CaptureFixture[str]
) -> None:
    @reports_failure
    def main(argv: Sequence[str]) -> int:
        raise error

    assert main([]) == 1
    assert capsys.readouterr().out == expected


@pytest.mark.parametrize("is_timed", [True, False])
def test_figures_follow_the_machine_and_the_busy_shares(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_timed: bool
) -> None:
    monkeypatch.setattr(harness, "require_idle", lambda is_allowed: 0.125)
    monkeypatch.setattr(harness, "busy_share", lambda: 0.25)
    out = tmp_path / "results" / "figures.json"
    run = begin(new_parser("any", None, is_timed).parse_args(["--out", str(out)]))
    run.write({"cases": [1]})
    document = json.loads(out.read_text())
    assert document["machine"]["commit"]
    assert document["cases"] == [1]
    assert document.get("busy_share") == ({"before": 0.125, "after": 0.25} if is_timed else None)


def test_percentiles_are_named_after_their_unit() -> None:
    assert percentiles_ms([0.001, 0.002, 0.003], 50, 99, digits=1) == {"p50_ms": 2.0, "p99_ms": 3.0}


def test_figure_above_its_limit_is_named() -> None:
    require_below(2.0, {"a list": 2.0})
    with pytest.raises(SystemExit, match=r"slower than 2 ms: a page, 2\.1 ms"):
        require_below(2.0, {"a list": 1.0, "a page": 2.1})


def test_order_rotates_from_round_to_round() -> None:
    assert [rotated("abc", number) for number in range(4)] == [list("abc"), list("bca"), list("cab"), list("abc")]
