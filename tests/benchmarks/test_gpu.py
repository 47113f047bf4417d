"""The GPU benchmark without a GPU: its checks pass in Triton's interpreter, and they fail where an answer is wrong."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import triton

from benchmarks.gpu_bench import CheckError, Goal, require_close

ROOT = Path(__file__).parent.parent.parent

# The second run adds every change twice.
TWO_RUNS = """
import sys
from benchmarks import gpu, gpu_lora, gpu_ways

arguments = ["gpu", "--check-only", "--tiny", "--peers", sys.argv[1] + "/none"]
sys.argv = [*arguments, "--out", sys.argv[1] + "/right.json"]
right, folder = gpu.main(), sys.argv[-1].removesuffix("right.json")

expand, cases = gpu_ways.lora_expand, gpu_lora.cases


def twice(*positional, **named):
    expand(*positional, **named)
    expand(*positional, **named)


gpu_ways.lora_expand = twice
gpu_lora.cases = lambda bench: cases(bench)[:1]
sys.argv = [*arguments, "--only", "lora", "--out", folder + "wrong.json"]
wrong = gpu.main()
sys.exit(0 if (right, wrong) == (0, 1) else 1)
"""


def run_python(arguments: list[str], is_interpreted: bool) -> subprocess.CompletedProcess[str]:
    """A process of its own: Triton decides when it is imported whether it interprets."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment |= {"PYTHONPATH": f"{ROOT / '.src'}{os.pathsep}{ROOT}", "CUDA_VISIBLE_DEVICES": ""}
    if is_interpreted:
        environment["TRITON_INTERPRET"] = "1"
    command = [sys.executable, *arguments]
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)


def rows_of(path: Path, part: str) -> list[dict[str, Any]]:
    result = json.loads(path.read_text())["parts"][part]
    assert not result["error"]
    return [row for row in result["rows"] if row["case"] != "every case"]


@pytest.mark.skipif(
    [int(part) for part in triton.__version__.split(".")[:2]] < [3, 7]
    and np.lib.NumpyVersion(np.__version__) >= "2.4.0",
    reason="the interpreter of this triton cannot loop up to a tensor with this numpy",
)
def test_checks_pass_and_find_what_is_wrong(tmp_path: Path) -> None:
    done = run_python(["-c", TWO_RUNS, str(tmp_path)], is_interpreted=True)
    assert done.returncode == 0, done.stdout + done.stderr
    lora = rows_of(tmp_path / "right.json", "lora")
    assert {row["way"] for row in lora} == {"loramux", "gather + bmm"}
    assert len(lora) == 6
    attention = rows_of(tmp_path / "right.json", "attention")
    assert len(attention) == 4
    assert all(0 < row["figures"]["error"] < 1e-2 for row in lora + attention)
    assert len(rows_of(tmp_path / "right.json", "ceilings")) == 3

    wrong = {row["way"]: row for row in rows_of(tmp_path / "wrong.json", "lora")}
    assert wrong["loramux"]["is_failure"]
    assert wrong["loramux"]["problem"].startswith("wrong: the relative error is")
    assert not wrong["loramux"]["figures"]
    assert not wrong["gather + bmm"]["is_failure"]


def test_refuses_to_measure_without_a_gpu() -> None:
    done = run_python(["-m", "benchmarks.gpu"], is_interpreted=False)
    assert done.returncode == 2
    assert done.stderr == "benchmarks.gpu: there is no CUDA device here; --check-only --tiny needs none\n"


@pytest.mark.parametrize("spoil", [float("nan"), float("inf"), 5.0], ids=str)
def test_one_wrong_element_is_found(spoil: float) -> None:
    expected = torch.randn(16, 16, generator=torch.Generator().manual_seed(0))
    out = expected.clone()
    assert require_close(out, expected) == 0
    out[3, 7] = spoil
    with pytest.raises(CheckError):
        require_close(out, expected)


def test_goals_bound_from_above_or_below() -> None:
    figures = {"over_floor": 1.2, "faster_than_peers": 1.2}
    assert Goal("over_floor", 1.35).is_met(figures)
    assert not Goal("faster_than_peers", 1.5, is_upper=False).is_met(figures)
    assert str(Goal("faster_than_peers", 1.5, is_upper=False)) == "faster_than_peers >= 1.5"
