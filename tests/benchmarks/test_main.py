"""`python -m benchmarks` lists all benchmarks and runs one by its name."""

from __future__ import annotations

import os
import runpy
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from benchmarks import __main__ as table

ROOT = Path(__file__).parents[2]


def listed(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "benchmarks", *arguments]
    return subprocess.run(command, cwd=ROOT, env=os.environ, capture_output=True, text=True, check=False)


def test_without_a_name_every_benchmark_is_listed() -> None:
    done = listed()
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert [line.split()[0] for line in lines] == list(table.BENCHMARKS)
    assert next(line for line in lines if line.startswith("routing ")).endswith("(7 minutes)")


def test_unknown_name_lists_the_benchmarks_and_fails() -> None:
    done = listed("s_lora")
    assert done.returncode == 2
    assert "there is no benchmark s_lora" in done.stderr
    assert "s-lora " in done.stdout


@pytest.mark.parametrize("name", table.BENCHMARKS)
def test_benchmark_is_a_module_that_can_be_run(name: str) -> None:
    module = f"benchmarks.{table.BENCHMARKS[name].module}"
    spec = find_spec(module)
    assert spec is not None
    if spec.submodule_search_locations is not None:
        spec = find_spec(f"{module}.__main__")
    assert spec is not None
    assert spec.origin is not None
    source = Path(spec.origin).read_text()
    # The parts of the GPU benchmarks fail one by one.
    assert name.startswith("gpu") or "@reports_failure\ndef main(" in source
    assert source.endswith(("    raise SystemExit(main())\n", "    sys.exit(main())\n"))


def test_arguments_follow_those_of_the_table(monkeypatch: pytest.MonkeyPatch) -> None:
    run: list[Any] = []
    monkeypatch.setattr(runpy, "run_module", lambda module, **options: run.append((module, sys.argv[1:])))
    monkeypatch.setattr(sys, "argv", ["benchmarks"])
    assert table.main(["gpu-dry", "--card", "h100"]) == 0
    assert table.main(["memory"]) == 0
    assert run == [("benchmarks.gpu", ["--dry-run", "--card", "h100"]), ("benchmarks.memory", [])]


def test_named_benchmark_runs_with_its_arguments() -> None:
    done = listed("routing", "--help")
    assert done.returncode == 0
    assert "usage: python -m benchmarks.routing" in done.stdout
