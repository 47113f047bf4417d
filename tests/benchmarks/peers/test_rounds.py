from __future__ import annotations

import contextlib
import json
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from rich.console import Console

from benchmarks.peers import __main__ as peers_main
from benchmarks.peers.agreement import compare
from benchmarks.peers.figures import Cell, ratios, tokens_per_second
from benchmarks.peers.in_process import find_peft
from benchmarks.peers.measurement import OWN_TURNS, MachineBusy, Measurement
from benchmarks.peers.model_files import ModelFiles
from benchmarks.peers.report import document, notes, picture, ratio_table, speed_table
from benchmarks.peers.system import LORAMUX, Running, System, SystemFailed, missing_peer
from benchmarks.peers.workload import (
    BASE,
    DISTINCT,
    KINDS,
    PEER_KINDS,
    SAME,
    Answers,
    Load,
    Work,
    adapters_of,
)
from benchmarks.random_model import SHAPES

SHORT = Load(64, 32)


@dataclass
class Scripted:
    """A system that takes a scripted number of seconds per token for each kind of work. Other kinds fail."""

    seconds: dict[str, float]
    asked: list[Work] = field(default_factory=list)
    num_opened: int = 0

    @contextlib.contextmanager
    def open(self, files: ModelFiles, is_check: bool) -> Iterator[Running]:
        self.num_opened += 1
        yield self

    def answer(self, work: Work, *, needs_token_ids: bool) -> Answers:
        self.asked.append(work)
        adapters = [question.adapter for question in work.questions]
        kind = next(kind for kind in KINDS if adapters == adapters_of(kind, len(adapters)))
        if kind not in self.seconds:
            raise SystemFailed(f"cannot do {kind}")
        return Answers(self.seconds[kind] * work.num_output, None)


def system(name: str, dtype: str, scripted: Scripted) -> System:
    return System(name, dtype, KINDS if name == LORAMUX else PEER_KINDS, scripted.open)


@pytest.fixture
def files(tmp_path: Path) -> ModelFiles:
    return ModelFiles(tmp_path, SHAPES["small"], num_adapters=4, rank=16)


def measurement(files: ModelFiles, *systems: System, repeats: int = 2, busy: float = 0.0) -> Measurement:
    return Measurement(
        files, systems, [SHORT], repeats, False, Console(quiet=True, width=200), look=lambda _seconds: busy
    )


def flat(seconds: float) -> Scripted:
    return Scripted(dict.fromkeys(KINDS, seconds))


def test_rounds_alternate_the_order_and_send_every_system_the_same_prompts(files: ModelFiles) -> None:
    own, peer = flat(1.0), flat(1.2)
    order: list[str] = []
    run = measurement(files, system(LORAMUX, "bfloat16", own), system("peft", "float32", peer))

    def look(seconds: float) -> float:
        order.append(f"{own.num_opened}/{peer.num_opened}")
        return 0.0

    run.look = look
    saved: list[int] = []
    run.run(lambda: saved.append(len(run.samples)))
    # `look` recorded how often each system had been opened before each session.
    assert order == ["0/0", "1/0", "1/1", "1/2"]
    assert saved == [4, 7, 7, 7]
    assert {len(seconds) for seconds in run.samples.values()} == {2}
    timed = [[work for work in scripted.asked if work.num_output == 32] for scripted in (own, peer)]
    asked = [{work.questions for work in works} for works in timed]
    assert len(asked[0]) == len(timed[0]) == 4 * 2 * OWN_TURNS, "no prompt is repeated"
    assert len(asked[1]) == len(timed[1]) == 3 * 2
    assert asked[1] < asked[0]


def test_loramux_runs_its_cells_forwards_then_backwards(files: ModelFiles) -> None:
    """The second pass counts in comparisons with loramux's own base, but not in comparisons with peers."""
    own = flat(1.0)
    run = measurement(files, system(LORAMUX, "bfloat16", own), repeats=1)
    run.run(lambda: None)
    adapters = [work.questions[0].adapter for work in own.asked if work.num_output == SHORT.num_output]
    there = [adapters_of(kind, files.num_adapters)[0] for kind in KINDS]
    assert adapters == there + there[::-1]
    assert set(run.samples) == set(run.way_back) == set(run.own_samples)
    assert {len(seconds) for seconds in run.own_samples.values()} == {2}


def test_overheads_use_all_turns_and_peer_ratios_the_first(files: ModelFiles) -> None:
    own, peer = system(LORAMUX, "bfloat16", flat(1.0)), system("peft", "float32", flat(1.0))
    speeds = {Cell(one, SHORT, kind): 10.0 for one in (own, peer) for kind in one.kinds}
    all_turns = {cell: 8.0 if cell.kind == DISTINCT else 10.0 for cell in speeds}
    found = {ratio.name: ratio.value for ratio in ratios(speeds, all_turns, [SHORT])}
    assert found["distinct adapters over the best peer"] == 1.0
    assert found["overhead of distinct adapters, all seven linears"] == 0.25


def test_slow_dtype_is_tried_but_not_timed(files: ModelFiles) -> None:
    fast, slow = flat(1.0), flat(2.0)
    run = measurement(
        files, system(LORAMUX, "bfloat16", flat(1.0)), system("peft", "float32", fast), system("peft", "bfloat16", slow)
    )
    run.run(lambda: None)
    assert {cell.system.dtype for cell in run.trials} == {"float32", "bfloat16"}
    assert {cell.load for cell in run.trials} == {Load(16, 8)}
    assert {cell.system.dtype for cell in run.samples if cell.system.name == "peft"} == {"float32"}
    assert slow.num_opened == 1


def test_dtype_hopeless_on_the_base_is_not_tried_with_adapters(files: ModelFiles) -> None:
    slow = flat(3.0)
    run = measurement(
        files,
        system(LORAMUX, "bfloat16", flat(1.0)),
        system("peft", "float32", flat(1.0)),
        system("peft", "bfloat16", slow),
    )
    run.run(lambda: None)
    assert [cell.kind for cell in run.trials if cell.system.dtype == "bfloat16"] == [BASE]
    assert {work.questions[0].adapter for work in slow.asked} == {None}
    assert {cell.system.dtype for cell in run.samples if cell.system.name == "peft"} == {"float32"}


def test_slow_peer_runs_once_and_loramux_in_every_round(files: ModelFiles) -> None:
    own = flat(5.0)
    run = measurement(
        files,
        system(LORAMUX, "bfloat16", own),
        system("peft", "float32", flat(1.0)),
        system("vLLM", "float32", Scripted({BASE: 0.9, DISTINCT: 4.0, SAME: 4.0})),
        repeats=3,
    )
    run.run(lambda: None)
    times = {(cell.system.name, cell.kind): len(seconds) for cell, seconds in run.samples.items()}
    assert times == {
        **{(LORAMUX, kind): 3 for kind in KINDS},
        **{("peft", kind): 3 for kind in PEER_KINDS},
        ("vLLM", BASE): 3,
        ("vLLM", DISTINCT): 1,
        ("vLLM", SAME): 1,
    }


def test_failed_peer_is_reported_and_not_run_again(files: ModelFiles) -> None:
    broken = Scripted({BASE: 1.0})
    run = measurement(files, system(LORAMUX, "bfloat16", flat(1.0)), system("vLLM", "float32", broken))
    run.run(lambda: None)
    assert run.failures == {"vLLM, float32": f"cannot do {DISTINCT}"}
    assert broken.num_opened == 1
    assert notes([], {}, run) == [f"vLLM, float32: cannot do {DISTINCT}"]


def test_failure_of_loramux_ends_the_run(files: ModelFiles) -> None:
    with pytest.raises(SystemFailed, match="cannot do"):
        measurement(files, system(LORAMUX, "bfloat16", Scripted({}))).run(lambda: None)


def test_busy_machine_ends_the_run_unless_allowed(files: ModelFiles, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("benchmarks.peers.measurement.PATIENCE_S", 0.0)
    own = flat(1.0)
    with pytest.raises(MachineBusy, match="50% busy"):
        measurement(files, system(LORAMUX, "bfloat16", own), busy=0.5).run(lambda: None)
    assert own.num_opened == 0
    allowed = measurement(files, system(LORAMUX, "bfloat16", own), busy=0.5)
    allowed.is_busy_allowed = True
    allowed.run(lambda: None)
    assert allowed.busy_shares == [0.5, 0.5]
    assert notes([], {}, allowed) == [
        "the machine was up to 50% busy with other programs: this run does not decide any target"
    ]


def test_busy_machine_is_refused_before_files_are_created(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("benchmarks.machine.busy_share", lambda: 0.5)
    with pytest.raises(SystemExit, match="50% busy"):
        peers_main.main(["--size", "small", "--scratch", str(tmp_path / "scratch")])
    assert not (tmp_path / "scratch").exists()


def test_report_contains_figures_targets_and_missing_peers(files: ModelFiles) -> None:
    run = measurement(files, system(LORAMUX, "bfloat16", flat(1.0)), system("peft", "float32", flat(2.0)))
    run.run(lambda: None)
    absent = missing_peer("vLLM", "set a variable")
    part = compare({BASE: ((1,), (2,))}, {BASE: ((1,), (3,))})
    told = json.loads(json.dumps(document([find_peft(1), absent], {"peft": part}, run, [SHORT])))
    assert told["systems"]["vLLM"] == {"version": "not found", "missing": "set a variable"}
    assert told["check"] == {"peft": {"equal": {BASE: 1}, "answers": {BASE: 2}}}
    first = told["cells"][0]
    assert (first["system"], first["load"], first["kind"], first["seconds"]) == (LORAMUX, "64/32", BASE, [32.0, 32.0])
    assert first["tokens_per_second"] == 4.0
    assert {ratio["name"]: ratio["value"] for ratio in told["ratios"]}["base only over the best peer"] == 2.0
    assert notes([absent], {"peft": part}, run) == [
        "vLLM: not found; set a variable",
        "peft: some of its float32 answers differ from peft's: base only 1 of 2",
    ]
    console = Console(width=200, record=True, quiet=False, file=None)
    with console.capture() as shown:
        speeds = tokens_per_second(run.samples, 4)
        console.print(speed_table(speeds, [SHORT], [absent]))
        console.print(ratio_table(ratios(speeds, speeds, [SHORT])))
    text = shown.get()
    assert "vLLM, not found" in text
    assert "2.00x" in text
    assert "missed" in text
    ElementTree.fromstring(picture("a < b", speeds))
