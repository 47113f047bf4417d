from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from benchmarks.gpu.plan import TESTS
from loramux.engine.device import cuda_driver
from tests.adapter_store.sandbox.processes import is_running
from tests.gpu import __main__ as program
from tests.gpu import processes
from tests.gpu.hidden_packages import hide_packages
from tests.gpu.processes import run_at_once
from tests.gpu.stages import KERNEL_FILES, STAGES, Plan, Stage

# A fake sanitizer that records its arguments and runs the program.
SANITIZER = """#!/bin/sh
echo "$PYTORCH_NO_CUDA_MEMORY_CACHING $@" >> "$0.calls"
shift 4
exec "$@"
"""


def rehearse(folder: Path, *arguments: str) -> tuple[subprocess.CompletedProcess[str], dict[str, Any]]:
    """Run the stages with only the packages that they require. Return the process and each stage's result."""
    hide_packages(folder, TESTS)
    sanitizer = folder / "compute-sanitizer"
    sanitizer.write_text(SANITIZER)
    sanitizer.chmod(0o755)
    environment = os.environ | {"PATH": f"{folder}{os.pathsep}{os.environ['PATH']}", "PYTHONPATH": str(folder)}
    command = [sys.executable, "-m", "tests.gpu", "--interpret", "--out", str(folder / "out"), *arguments]
    done = subprocess.run(command, cwd=program.ROOT, env=environment, capture_output=True, text=True, check=False)
    files = sorted((folder / "out").iterdir())
    return done, {result["stage"]: result for result in (json.loads(file.read_text()) for file in files)}


@pytest.mark.campaign
def test_gpu_tests_import_only_required_packages(tmp_path: Path) -> None:
    select = "no-rows or test_greedy_rows_and_log_probabilities"
    done, results = rehearse(tmp_path, "--only", "kernels", "engine", "--select", select, "--processes", "1")
    assert done.returncode == 0, done.stdout + done.stderr
    assert results["kernels"]["tests"]["num_passed"] >= 10
    assert results["engine"]["tests"]["num_passed"] >= 1


@pytest.mark.campaign
def test_all_stages_pass_in_the_interpreter(tmp_path: Path) -> None:
    done, results = rehearse(tmp_path, "--seconds", "3000")
    assert done.returncode == 0, done.stdout + done.stderr
    assert list(results) == [stage.name for stage in STAGES]
    calls = (tmp_path / "compute-sanitizer.calls").read_text().splitlines()
    assert [call.split()[:3] for call in calls] == [
        ["1", "--tool", "memcheck"],
        ["--tool", "racecheck", "--error-exitcode"],
    ]
    assert results["kernels"]["tests"]["num_passed"] > 300
    assert results["engine"]["tests"]["num_passed"] > 20
    assert results["benchmark"]["benchmark"]["parts"].keys() >= {"lora", "attention", "step", "s_lora", "prefill"}


def test_every_test_of_kernels_that_can_use_a_gpu_is_listed() -> None:
    kernels = program.ROOT / "tests" / "kernels"
    uses_gpu = [
        str(file.relative_to(kernels))
        for file in kernels.rglob("test_*.py")
        if {"make_kernels", "import_kernels"} & set(re.findall(r"\w+", file.read_text()))
    ]
    assert set(uses_gpu) <= set(KERNEL_FILES)


def test_run_without_a_gpu_reports_the_missing_driver(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setattr(cuda_driver, "DRIVER", "libno-such-driver.so.1")
    monkeypatch.setattr(sys, "argv", ["tests.gpu", "--out", str(tmp_path / "out")])
    assert program.main() == 2
    assert capsys.readouterr().err == (
        "tests.gpu: the device 'cuda' needs an NVIDIA GPU and its driver, but no usable GPU was found: "
        "use --interpret to rehearse on the CPU\n"
    )
    assert not (tmp_path / "out").exists()


def stage(name: str, *scripts: str, limit_s: float = 60, note: str = "") -> Stage:
    return Stage(name, limit_s, lambda setting: Plan([[sys.executable, "-c", one] for one in scripts], note=note))


def run_stages(
    monkeypatch: pytest.MonkeyPatch, folder: Path, stages: list[Stage], *arguments: str
) -> tuple[int, list[dict[str, Any]]]:
    monkeypatch.setattr(program, "STAGES", stages)
    monkeypatch.setattr(sys, "argv", ["tests.gpu", "--interpret", "--out", str(folder), *arguments])
    code = program.main()
    return code, [json.loads(file.read_text()) for file in sorted(folder.iterdir())]


@pytest.fixture
def ignored_interrupts() -> Iterator[None]:
    """New processes ignore SIGINT from the start, however long they take to begin."""
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("ignored_interrupts")
def test_failed_stage_does_not_stop_later_stages(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setattr(processes, "GRACE_S", 0.1)
    stages = [
        stage("fails", "print('fine')", "import sys; print('an illegal access'); sys.exit(3)"),
        stage("hangs", "import time; time.sleep(60)", limit_s=0.1),
        stage("dies", "import os; os.abort()"),
        stage("lacks", "pass", note="a tool is not there"),
        stage("works", "import os; print(os.environ['TRITON_INTERPRET'])"),
    ]
    code, results = run_stages(monkeypatch, tmp_path, stages, "--seconds", "60")
    assert code == 1
    assert [result["outcome"] for result in results] == ["failed", "stopped", "failed", "tool absent", "passed"]
    assert [one["exit_code"] for result in results for one in result["processes"]] == [0, 3, -9, -6, 0, 0]
    assert results[-1]["processes"][0]["output"] == "1\n"
    printed = capsys.readouterr().out
    assert "1| an illegal access" in printed
    assert printed.rstrip().splitlines()[-8].startswith("stage")

    assert run_stages(monkeypatch, tmp_path / "two", stages[3:])[0] == 0
    assert run_stages(monkeypatch, tmp_path / "last", stages, "--only", "works")[0] == 0
    code, results = run_stages(monkeypatch, tmp_path / "late", stages[3:], "--seconds", "0")
    assert (code, [result["outcome"] for result in results]) == (1, ["left out", "left out"])


def test_process_is_stopped_with_its_children(tmp_path: Path) -> None:
    spawn = (
        "import subprocess, sys; print(subprocess.Popen(['sleep', '60']).pid, flush=True); sys.exit(int(sys.argv[1]))"
    )
    done = run_at_once([[sys.executable, "-c", spawn, "4"]], tmp_path, dict(os.environ), tmp_path, 60)
    assert (done[0].exit_code, done[0].was_stopped) == (4, False)
    ends_at = time.monotonic() + 30
    while is_running(int(done[0].output)):
        assert time.monotonic() < ends_at, "the child still runs"
        time.sleep(0.01)
