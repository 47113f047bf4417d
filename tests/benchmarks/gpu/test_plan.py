from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks.gpu.cards import PLANNED
from benchmarks.gpu.parts import PARTS
from benchmarks.gpu.plan import DONE, KERNELS, MAX_MINUTES, RUNS, Run, lines_of, required, state_of
from tests.gpu.hidden_packages import hide_packages

ROOT = Path(__file__).parents[3]
COMMIT = "0123456789ab"
RUN = Run(
    name="prefill", minutes=3, shows="little", command="measure {card}", rehearsals=("rehearse {card}",),
    result="gpu-{card}.json", part="prefill", paths=("kernels",),
)  # fmt: skip


def repository(
    root: Path, document: dict[str, Any] | None, *, is_tracked: bool = True, changes: str | None = ""
) -> str:
    """The state of RUN in a repository with this result. `changes` is what git reports, or None for an error."""
    if document is not None:
        (root / "benchmarks" / "results").mkdir(parents=True)
        (root / "benchmarks" / "results" / "gpu-h100.json").write_text(json.dumps(document))

    def git(*arguments: str) -> str | None:
        if arguments[0] == "ls-files":
            return arguments[-1] if is_tracked else ""
        assert arguments == ("diff", "--stat", "--relative", COMMIT, "HEAD", "--", "kernels")
        return changes

    return state_of(RUN, "h100", git, root)


def result(commit: str = COMMIT, part: str = "prefill", is_failed: bool = False) -> dict[str, Any]:
    return {"machine": {"commit": commit}, "parts": {part: {"is_failed": is_failed}}}


def test_a_committed_result_of_unchanged_code_is_done(tmp_path: Path) -> None:
    assert repository(tmp_path, result()) == DONE


@pytest.mark.parametrize(
    ("document", "options", "reason"),
    [
        pytest.param(None, {}, "no result", id="absent"),
        pytest.param(result(), {"is_tracked": False}, "is not committed", id="untracked"),
        pytest.param(result(part="step"), {}, "no part prefill", id="another-part"),
        pytest.param(result(is_failed=True), {}, "a failed run", id="failed"),
        pytest.param(result(commit="unknown"), {}, "does not name the commit", id="no-commit"),
        pytest.param(
            result(), {"changes": " a | 1 +\n 1 file changed"}, "since 01234567 (1 file changed)", id="changed"
        ),
        pytest.param(result(), {"changes": None}, "is not in this repository", id="foreign-commit"),
    ],
)
def test_an_open_run_says_why(
    document: dict[str, Any] | None, options: dict[str, Any], reason: str, tmp_path: Path
) -> None:
    state = repository(tmp_path, document, **options)
    assert state != DONE
    assert reason in state


def test_open_runs_list_their_commands_and_done_runs_only_a_tick() -> None:
    done = lines_of("h100", [RUN], [DONE], None)
    assert "[x] prefill, 3 min: little" in done
    assert not any("measure" in line for line in done)
    opened = lines_of("h200", [RUN], ["open: no result"], dict.fromkeys(required(RUN.packages), 2.0))
    assert "      run:      measure h200" in opened
    assert "      rehearse: rehearse h200" in opened
    assert any(line.startswith("      wheels:   10 MiB (5 packages)") for line in opened)


def test_open_runs_list_what_comes_first_and_the_size_of_their_parts() -> None:
    run = dataclasses.replace(RUN, before=("cut the peer",), parts_mib=196.0)
    lines = lines_of("h100", [run], ["open: no result"], dict.fromkeys(required(run.packages), 2.0))
    assert lines.index("      before:   cut the peer") < lines.index("      run:      measure h100")
    assert any(line.endswith("(5 packages), and 196 MiB of parts") for line in lines)


def test_runs_are_ordered_by_what_a_card_returns() -> None:
    order = ["trace", "prefill", "step", "attention", "lora", "s_lora", "s_lora_fp8", "context", "fused", "serving"]
    assert [run.name for run in RUNS] == ["tests", "workers", *order, "cold", "mixture", "codes", "hybrid", "peer"]
    assert RUNS[-1].before, "the peer's parts must be brought first"


@pytest.mark.parametrize("run", RUNS, ids=lambda run: run.name)
def test_every_run_is_short_and_its_paths_exist(run: Run) -> None:
    assert 0 < run.minutes <= MAX_MINUTES
    assert run.rehearsals
    for path in run.paths:
        assert (ROOT / path).exists(), path
    assert run.part in {"", *(part.name for part in PARTS)}


def test_every_part_of_the_benchmark_is_planned() -> None:
    # The ceilings are measured by each run.
    assert {run.part for run in RUNS} - {""} == {part.name for part in PARTS} - {"ceilings"}


def test_what_a_card_brings_is_not_counted() -> None:
    names = required(["loramux"])
    assert "pyzmq" in names
    assert not {"torch", "triton", "loramux"} & set(names)


def test_benchmarks_and_traces_import_only_packages_of_the_plan(tmp_path: Path) -> None:
    hide_packages(tmp_path, KERNELS)
    paths = os.pathsep.join(map(str, (tmp_path, ROOT / ".src", ROOT)))
    command = [sys.executable, "-c", "import benchmarks.gpu.__main__, benchmarks.gpu.kernel_times"]
    done = subprocess.run(command, env=os.environ | {"PYTHONPATH": paths}, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_commands_without_loramux_installed_find_the_checkout() -> None:
    for run in RUNS:
        assert ("PYTHONPATH=.src " in run.command) == ("loramux" not in run.packages), run.name


@pytest.mark.parametrize("card", PLANNED)
def test_the_plan_is_printed(card: str) -> None:
    command = [sys.executable, "-m", "benchmarks.gpu.plan", "--card", card]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    if not (ROOT / ".git").exists():
        assert done.returncode == 2
        return
    assert done.returncode == 0, done.stderr
    assert [line.split()[0] for line in done.stdout.splitlines() if line[:1] == "["].count("[x]") <= len(RUNS)
    assert all(f"] {run.name}, " in done.stdout for run in RUNS)
