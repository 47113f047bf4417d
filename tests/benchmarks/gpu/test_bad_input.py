"""What a run says about a card, a package, a driver, a graph or a peer that fails: one sentence, and it goes on."""

from __future__ import annotations

import importlib
import math
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from benchmarks.gpu import __main__ as gpu
from benchmarks.gpu import peer as gpu_peer
from benchmarks.gpu.bench import Bench, Row
from benchmarks.gpu.cards import CARDS, PlannedCard
from benchmarks.gpu.dry_run import Limits, dry_run
from benchmarks.gpu.needs import Need
from benchmarks.gpu.parts import Part

OUT_OF_MEMORY = "CUDA out of memory. Tried to allocate 2.00 GiB.\nSee the documentation of memory management."


def bench_of(peers: Path = Path(), planned: PlannedCard | None = None) -> Bench:
    return Bench(
        device=torch.device("cpu"), is_tiny=True, is_quick=False, is_full=False, is_timed=True, is_warming=False,
        peers=peers, planned=planned,
    )  # fmt: skip


def import_absent() -> None:
    importlib.import_module("a_package_that_is_absent")


def allocate_too_much() -> None:
    raise torch.OutOfMemoryError(OUT_OF_MEMORY)


@pytest.mark.parametrize(
    ("fail", "sentence"),
    [
        pytest.param(
            allocate_too_much, "OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB.", id="small-card"
        ),
        pytest.param(
            import_absent,
            "the package a_package_that_is_absent is missing, which the other parts do without",
            id="missing-package",
        ),
    ],
)
def test_a_part_that_fails_says_why_in_one_sentence(fail: Callable[[], None], sentence: str) -> None:
    def run(bench: Bench) -> Iterator[Row]:
        yield Row("first", "ours")
        fail()

    result = gpu.run_part(Part("part", 1.0, run, lambda bench: iter(())), bench_of(), math.inf)
    assert (result["error"], result["is_failed"]) == (sentence, True)
    assert [row["case"] for row in result["rows"]] == ["first"], "earlier rows are kept"


def part_of(name: str, num_bytes: float) -> Part:
    return Part(name, 10.0, lambda bench: iter(()), lambda bench: iter([Need("case", {}, 1, {"pool": num_bytes}, 1.0)]))


def test_a_card_that_is_too_small_fails_the_dry_run_of_the_parts_that_do_not_fit(
    capsys: pytest.CaptureFixture[str],
) -> None:
    bench = bench_of(planned=PlannedCard(CARDS["l4"], 24 * 10**9, 120e12))
    large, small = (part_of("large", 30e9), part_of("small", 3e9))
    assert dry_run(bench, [large, small], Limits(total_s=100, warm_s=10), None) == 1
    said = capsys.readouterr().out
    assert "**Does not fit: large: case: 31.0 GB of 24 GB**" in said
    assert [line.endswith("| yes |") for line in said.splitlines() if line.startswith("| small")] == [True]
    assert dry_run(bench, [small], Limits(total_s=100, warm_s=10), None) == 0


def test_a_driver_without_programmatic_launches_is_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def run(bench: Bench) -> Iterator[Row]:
        yield Row("case", "ours")

    monkeypatch.setattr(gpu, "PARTS", (Part("ceilings", 1.0, run, lambda bench: iter(())),))
    monkeypatch.setattr(gpu, "why_not", lambda arguments: "")
    monkeypatch.setattr(sys, "argv", ["gpu", "--tiny", "--check-only"])
    assert gpu.main() == 0
    said = capsys.readouterr().out
    assert said.splitlines().count(gpu.NO_PDL) == 1
    assert "| case | ours |" in said


def test_a_graph_that_does_not_fit_is_one_row_and_the_other_cases_run() -> None:
    def case(name: str) -> Iterator[Row]:
        if name == "large":
            allocate_too_much()
        yield Row(name, "ours")

    rows = list(bench_of().each(["large", "small"], "ours", case))
    assert [(row.case, row.problem, row.is_failure) for row in rows] == [
        ("large", "OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB.", True),
        ("small", "", False),
    ]


FAILING = "raise RuntimeError('no kernel image is available for execution on the device')\n"


@pytest.mark.parametrize(
    ("source", "problem"),
    [
        pytest.param(None, "has no vLLM: see benchmarks/gpu/vllm_parts.py", id="absent"),
        pytest.param(FAILING, "ended with 1: RuntimeError: no kernel image is available", id="failing"),
        pytest.param("import time; time.sleep(60)\n", "was stopped after 3 s", id="silent", marks=pytest.mark.campaign),
    ],
)
def test_a_peer_that_does_not_start_has_one_row(
    source: str | None, problem: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpu_peer, "VLLM_PROCESSES", {"with LoRA": 3.0 if "sleep" in str(source) else 60.0})
    if source is not None:
        (tmp_path / "vllm").mkdir()
        (tmp_path / "vllm" / "__init__.py").write_text(source)
    bench = bench_of(tmp_path)
    (row,) = gpu_peer.compared(bench, gpu_peer.plan_of(bench), tmp_path, {}, {})
    assert problem in row.problem
    assert "\n" not in row.problem
    assert not row.is_failure, "only the peer failed"
