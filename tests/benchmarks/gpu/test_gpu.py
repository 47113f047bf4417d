from __future__ import annotations

import json
import math
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import triton

from benchmarks.answers import Answer, CheckError, compare
from benchmarks.gpu import __main__ as gpu
from benchmarks.gpu import report as gpu_report
from benchmarks.gpu.bench import Bench, Goal, Row, require_close
from benchmarks.gpu.parts import PARTS, Part
from loramux.engine.protocol.messages import TokenLogprobs

ROOT = Path(__file__).parents[3]

# The second run adds every LoRA delta twice.
TWO_RUNS = """
import sys
from benchmarks.gpu import __main__ as gpu
from benchmarks.gpu import lora as gpu_lora
from benchmarks.gpu import ways as gpu_ways

arguments = ["gpu", "--check-only", "--tiny", "--peers", sys.argv[1] + "/none"]
sys.argv = [*arguments, "--out", sys.argv[1] + "/right.json"]
right, folder = gpu.main(), sys.argv[-1].removesuffix("right.json")

expand, cases = gpu_ways.lora_expand, gpu_lora.cases


def twice(*positional, **named):
    expand(*positional, **named)
    expand(*positional, **named)


gpu_ways.lora_expand = twice
gpu_lora.cases = lambda bench: cases(bench)[2:]
sys.argv = [*arguments, "--only", "lora", "--out", folder + "wrong.json"]
wrong = gpu.main()
sys.exit(0 if (right, wrong) == (0, 1) else 1)
"""

# Time every part with the host's clock and with reference kernels. Then rerun two parts on an engine that adds every
# LoRA delta twice.
REHEARSAL = """
import dataclasses
import sys
from collections.abc import Iterator
from pathlib import Path

import torch

from benchmarks.gpu import __main__ as gpu

from benchmarks.gpu import attention as gpu_attention

from benchmarks.gpu import bench as gpu_bench

from benchmarks.gpu import lora as gpu_lora

from benchmarks.gpu import machine as gpu_machine

from benchmarks.gpu import model as gpu_model

from benchmarks.gpu import report as gpu_report
from loramux.kernels.gpu import kernels
from loramux.kernels.gpu import sampling
from loramux.kernels.reference.kernels import ReferenceKernels
from loramux.kernels.reference.sampling import reference_sample_tokens


def sample_tokens(*positional, all_greedy):
    reference_sample_tokens(*positional)


kernels.GpuKernels, sampling.sample_tokens = ReferenceKernels, sample_tokens
gpu_model.TINY = dataclasses.replace(gpu_model.TINY, num_layers=1)
lora_cases, attention_cases = gpu_lora.cases, gpu_attention.cases
gpu_lora.cases = lambda bench: lora_cases(bench)[2:]
gpu_attention.cases = lambda bench: attention_cases(bench)[:1]
path = Path(sys.argv[1]) / "timed.json"
machine = gpu_machine.describe()


def bench(is_timed):
    return gpu_bench.Bench(
        device=torch.device("cpu"), is_tiny=True, is_quick=False, is_full=False, is_timed=is_timed,
        is_warming=not is_timed, peers=path.parent,
    )


class TwiceKernels(ReferenceKernels):
    def lora_expand(self, *positional):
        super().lora_expand(*positional)
        super().lora_expand(*positional)


timed = bench(is_timed=True)
with torch.inference_mode():
    for part in gpu.PARTS:
        results = gpu_report.stored(path, machine) | {part.name: gpu.run_part(part, timed, float("inf"))}
        print(gpu_report.table(part.name, results[part.name]))
        gpu_report.store(path, machine, results)
engine_parts = [part for part in gpu.PARTS if part.name in ("step", "s_lora", "prefill")]
warmed = [gpu.run_warmer(bench(is_timed=False), engine_parts, f"{shard}/2") for shard in range(2)]

kernels.GpuKernels = TwiceKernels
wrong = bench(is_timed=True)
wrong.ceilings = timed.ceilings
results |= {part.name: gpu.run_part(part, wrong, float("inf")) for part in engine_parts[:2]}
gpu_report.store(path.with_name("wrong.json"), machine, results)
sys.exit(max(warmed))
"""


def run_interpreted(script: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """Run the benchmark in a separate process, because Triton enables its interpreter at import."""
    paths = {"PYTHONPATH": f"{ROOT / '.src'}{os.pathsep}{ROOT}", "CUDA_VISIBLE_DEVICES": ""}
    environment = os.environ | paths | {"TRITON_INTERPRET": "1"}
    command = [sys.executable, "-c", script, str(folder)]
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)


def rows_of(path: Path, part: str) -> list[dict[str, Any]]:
    result = json.loads(path.read_text())["parts"][part]
    assert not result["error"]
    return [row for row in result["rows"] if row["case"] != "every case"]


needs_loops = pytest.mark.skipif(
    [int(part) for part in triton.__version__.split(".")[:2]] < [3, 7]
    and np.lib.NumpyVersion(np.__version__) >= "2.4.0",
    reason="this triton's interpreter cannot loop up to a tensor with this numpy",
)


@pytest.mark.campaign
@needs_loops
def test_checks_accept_correct_answers_and_reject_doubled_deltas(tmp_path: Path) -> None:
    done = run_interpreted(TWO_RUNS, tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    lora = rows_of(tmp_path / "right.json", "lora")
    assert {row["way"] for row in lora} == {"loramux", "gather + bmm"}
    assert len(lora) == 6
    attention = rows_of(tmp_path / "right.json", "attention")
    assert len(attention) == 4
    assert all(0 < row["figures"]["error"] < 1e-2 for row in lora + attention)
    assert len(rows_of(tmp_path / "right.json", "ceilings")) == 3
    for part in ("step", "s_lora", "prefill"):
        (check,) = rows_of(tmp_path / "right.json", part)
        assert 0 < check["figures"]["error"] < 1e-4
        assert check["figures"]["compared_tokens"] >= 3
        assert check["figures"]["base_change"] == 0

    wrong = {row["way"]: row for row in rows_of(tmp_path / "wrong.json", "lora")}
    assert wrong["loramux"]["is_failure"]
    assert wrong["loramux"]["problem"].startswith("wrong: the relative error is")
    assert not wrong["loramux"]["figures"]
    assert not wrong["gather + bmm"]["is_failure"]


@pytest.mark.campaign
@needs_loops
def test_every_part_is_timed_unless_the_engine_is_wrong(tmp_path: Path) -> None:
    (tmp_path / "vllm").mkdir()
    shutil.copy(Path(__file__).parent / "stand_in_vllm.py", tmp_path / "vllm" / "__init__.py")
    done = run_interpreted(REHEARSAL, tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    path = tmp_path / "timed.json"
    parts = json.loads(path.read_text())["parts"]
    assert list(parts) == [part.name for part in PARTS]
    timed = {name: rows_of(path, name) for name in parts}
    assert not any(row["is_failure"] for rows in timed.values() for row in rows)
    step = {row["way"]: row["figures"] for row in timed["step"] if row["case"].startswith("decode")}
    assert step.keys() == {"base only", "2 adapters, rank 16"}
    assert all(0 <= figures["idle"] < 1 and figures["step_ms"] > 0 for figures in step.values())
    assert step["2 adapters, rank 16"]["over_base"] > 0
    prefill = [row for row in timed["prefill"] if row["case"].startswith("prefill")]
    assert [row["figures"]["tflop_s"] > 0 for row in prefill] == [True, True]
    throughput = [row for row in timed["s_lora"] if row["case"].startswith("S1")]
    assert [row["figures"]["loads"] for row in throughput] == [1, 2, 2]
    assert all(row["figures"]["tokens_s"] > 0 for row in throughput)

    check_peer(timed["peer"])
    check_cold(timed["cold"])

    refused = json.loads((tmp_path / "wrong.json").read_text())["parts"]
    for name in ("step", "s_lora"):
        assert refused[name]["is_failed"]
        assert refused[name]["error"].startswith("CheckError: the log-probability of token 0 of r3-18 is")
        assert not refused[name]["rows"]
    assert rows_of(tmp_path / "wrong.json", "prefill")


def check_peer(rows: list[dict[str, Any]]) -> None:
    """transformers and peft, which stand in for vLLM, give the same answers, and each time has its row."""
    assert not any(row["problem"] for row in rows)
    checks = [row["figures"] for row in rows if "compared_tokens" in row["figures"]][1:]
    assert len(checks) == 3, "base and adapters with LoRA, base without"
    # Two prompts with four tokens each.
    assert all(one["compared_tokens"] >= 6 and one["error"] < 1e-3 for one in checks)
    times = {(row["case"], row["way"]): row["figures"] for row in rows if "wall_ms" in row["figures"]}
    systems = ["loramux", "vLLM stand-in with LoRA"]
    ways = [f"{system}, {kind}" for system in systems for kind in ("base only", "2 adapters, rank 16")]
    cases = {"decode b=2 ctx=20", "prefill 2 x 3"}
    assert times.keys() == {(case, way) for case in cases for way in [*ways, "vLLM stand-in without LoRA, base only"]}
    assert all(one["over_loramux"] > 0 for one in times.values())
    assert all(("over_base" in figures) == ("adapters" in way) for (_, way), figures in times.items())


def check_cold(rows: list[dict[str, Any]]) -> None:
    """Each tier has its row for each rank, and the storm compares loads with their absence."""
    tiers = {(row["case"].partition(",")[0], row["way"]): row["figures"] for row in rows if "rank" in row["case"]}
    assert tiers.keys() >= {
        (f"rank {rank}", tier) for rank in (4, 20) for tier in ("object store", "host memory", "disk")
    }
    storm = {row["way"]: row["figures"] for row in rows if "streams" in row["case"]}
    assert storm.keys() == {"quiet", "loads", "warm", "storm"}
    assert storm["loads"]["p99_over_quiet"] > 0
    assert storm["loads"]["load_p50_ms"] > 0
    assert storm["storm"]["ttft_p50_ms"] > 0


def test_failed_case_keeps_the_other_cases_rows(tmp_path: Path) -> None:
    bench = Bench(
        device=torch.device("cpu"), is_tiny=True, is_quick=False, is_full=False, is_timed=True, is_warming=False,
        peers=tmp_path,
    )  # fmt: skip

    def second() -> Iterator[Row]:
        yield Row("second", "one way")
        raise RuntimeError("operation not permitted when stream is capturing")

    def run(bench: Bench) -> Iterator[Row]:
        yield Row("first", "ours")
        yield from bench.guarded("second", "ours", second())
        yield Row("third", "ours")

    kept: list[list[str]] = []
    result = gpu.run_part(
        Part("part", 1.0, run, lambda bench: iter(())),
        bench,
        math.inf,
        lambda now: kept.append([row["case"] for row in now["rows"]]),
    )
    assert [(row["case"], row["is_failure"]) for row in result["rows"]] == [
        ("first", False),
        ("second", False),
        ("second", True),
        ("third", False),
    ]
    assert result["rows"][2]["problem"] == "RuntimeError: operation not permitted when stream is capturing"
    assert (result["is_failed"], result["error"]) == (True, "")
    assert [len(cases) for cases in kept] == [1, 2, 3, 4], "each row is saved when it is measured"


def test_file_from_another_commit_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "results" / "file.json"
    machine = {"gpu": "a card", "commit": "abc"}
    assert gpu_report.stored(path, machine) == {}
    gpu_report.store(path, machine, {"lora": {"rows": []}, "step": {"rows": []}})
    assert gpu_report.stored(path, machine) == {"lora": {"rows": []}, "step": {"rows": []}}
    with pytest.raises(ValueError, match="commit abc, not def: name another file"):
        gpu_report.stored(path, machine | {"commit": "def"})


def test_restart_runs_the_remaining_parts_in_a_new_process(monkeypatch: pytest.MonkeyPatch) -> None:
    replaced: list[list[str]] = []
    monkeypatch.setattr(os, "closerange", lambda first, end: None)
    monkeypatch.setattr(os, "execv", lambda _, command: replaced.append(command))
    arguments = gpu.parse(["--quick", "--out", "results.json"])
    gpu.restart_process(list(PARTS[-2:]), arguments, 99.6)
    assert replaced[0][:3] == [sys.executable, "-m", "benchmarks.gpu"]
    later = gpu.parse(replaced[0][3:])
    assert later.only == [part.name for part in PARTS[-2:]]
    assert (later.quick, later.full, later.no_warm, later.has_failed) == (True, False, True, True)
    assert (later.out, later.peers, later.seconds) == (arguments.out, arguments.peers, 100)


def test_refuses_to_measure_without_a_gpu(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    monkeypatch.setattr(sys, "argv", ["gpu"])
    assert gpu.main() == 2
    assert capsys.readouterr().err == "benchmarks.gpu: there is no CUDA device here; --check-only --tiny needs none\n"


def answers(*logprobs: tuple[int, float, float]) -> dict[str, Answer]:
    """The answer to one request. Each item is (token, its log-probability, log-probability of the runner-up)."""
    listed = [TokenLogprobs(token, best, ((token, best), (99, second))) for token, best, second in logprobs]
    return {"one": Answer([token for token, _, _ in logprobs], listed)}


def test_answers_may_differ_only_at_nearly_tied_tokens() -> None:
    expected = answers((5, -1.0, -2.0), (6, -1.0, -2.0), (7, -1.0, -1.0005), (8, -1.0, -2.0))
    worst, num_compared = compare(answers((5, -1.0, -2.0), (6, -1.0002, -2.0), (9, -1.0, -1.0), (3, 0, -9)), expected)
    assert worst == pytest.approx(2e-4)
    assert num_compared == 2
    for wrong, message in [
        (
            answers((5, -1.0, -2.0), (7, -1.0, -2.0), (7, -1.0, -2.0), (8, -1.0, -2.0)),
            "token 1 of one is 7 instead of 6",
        ),
        (answers((5, -1.1, -2.0), (6, -1.0, -2.0), (7, -1.0, -2.0), (8, -1.0, -2.0)), "log-probability of token 0"),
        (answers((5, -1.0, -2.0)), "one has 1 tokens instead of 4"),
    ]:
        with pytest.raises(CheckError, match=message):
            compare(wrong, expected)
    close = answers((1, -1.0, -1.0), (2, -1.0, -2.0))
    with pytest.raises(CheckError, match="only 0 of 2 tokens could be compared"):
        compare(answers((2, -1.0, -1.0), (2, -1.0, -2.0)), close)


@pytest.mark.parametrize("spoil", [float("nan"), float("inf"), 5.0], ids=str)
def test_one_wrong_element_is_found(spoil: float) -> None:
    expected = torch.randn(16, 16, generator=torch.Generator().manual_seed(0))
    out = expected.clone()
    assert require_close(out, expected) == 0
    out[3, 7] = spoil
    with pytest.raises(CheckError):
        require_close(out, expected)


def test_goal_is_an_upper_or_lower_bound() -> None:
    figures = {"over_floor": 1.2, "faster_than_peers": 1.2}
    assert Goal("over_floor", 1.35).is_met(figures)
    assert not Goal("faster_than_peers", 1.5, is_upper=False).is_met(figures)
    assert str(Goal("faster_than_peers", 1.5, is_upper=False)) == "faster_than_peers >= 1.5"
