from __future__ import annotations

import gc
import itertools
import json
import math
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from benchmarks import harness
from benchmarks.running_engine import RunningEngine
from benchmarks.s_lora import __main__ as s_lora
from benchmarks.s_lora import check as s_lora_check
from benchmarks.s_lora import engine as s_lora_engine
from benchmarks.s_lora import run as s_lora_run
from benchmarks.s_lora import setting as s_lora_setting
from benchmarks.s_lora.figures import Case, Goal, latency_figures, median_of, summaries
from benchmarks.s_lora.run import Arrival, Drive, Journey, Snapshot, Window, drive_in_turns
from benchmarks.s_lora.workload import Lengths, draw_arrivals, draw_requests
from loramux.engine.loop.engine import Outbound
from loramux.engine.protocol.messages import Add, Finished, SamplingParams, SequenceOutput, Stats, StepOutput

LENGTHS = Lengths(8, 32)
STATS = Stats(
    call_id="", num_steps=0, num_running=0, num_waiting=0, num_pages=0, num_free_pages=0, num_kv_pages=0,
    num_adapter_pages=0, num_prefix_pages=0, prompt_tokens=0, completion_tokens=0, cached_tokens=0,
    num_adapter_loads=0, num_adapter_evictions=0, num_preemptions=0, mixed_steps=0, max_adapters_in_step=0,
)  # fmt: skip


@pytest.fixture(scope="module")
def scratch(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("adapters")


def run(scratch: Path, *arguments: str) -> int:
    """Run a tiny workload on one thread, even on a machine that is busy with other tests."""
    tiny = ["--threads", "1", "--seconds", "0.5", "--pool-adapters", "4", "--host-adapters", "6", "--allow-busy"]
    lengths = ["--max-sequences", "8", "--input", "8-24", "--output", "4-12"]
    return s_lora.main([*tiny, *lengths, "--adapters", "5,20", "--scratch", str(scratch), *arguments])


@pytest.fixture(autouse=True)
def _no_look_at_the_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(harness, "require_idle", lambda is_allowed: 0.5)
    monkeypatch.setattr(harness, "busy_share", lambda: 0.5)


@pytest.fixture(autouse=True)
def _garbage_collection_stays_rare(monkeypatch: pytest.MonkeyPatch) -> None:
    """A run would end what `tests/conftest.py` does for all tests of this process. A full collection takes 2 s then."""
    monkeypatch.setattr(s_lora_engine, "freeze_gc", lambda: None)
    monkeypatch.setattr(gc, "unfreeze", lambda: None)


@pytest.mark.campaign
def test_run_checks_answers_evicts_adapters_and_writes_figures(
    scratch: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out, plot = tmp_path / "results" / "s_lora.json", tmp_path / "s_lora.svg"
    assert run(scratch, "--policy", "lru", "--out", str(out), "--plot", str(plot)) == 0
    document = json.loads(out.read_text())
    assert document.keys() == {"date", "machine", "busy_share", "workload", "check", "capacity", "cases"}
    assert {"cpu", "cores", "commit", "torch"} <= document["machine"].keys()
    assert document["workload"]["pool"] == "4 adapters of 16 pages, 16 pages of K and V"
    check = document["check"]["lru"]
    assert check["num_tokens"] > 100
    assert check["num_evictions"] > 0
    assert [(case["policy"], case["adapters"]) for case in document["cases"]] == [("lru", 5), ("lru", 20)]
    few, many = document["cases"]
    assert few["throughput"]["over_fewest"] == 1
    assert many["throughput"]["evictions"] > 0
    assert many["throughput"]["loads"] > 0
    for case in document["cases"]:
        assert case["throughput"]["tokens_s"] > 0
        assert case["throughput"]["prefix_hit_rate"] == 0
        latency = case["latency"]
        assert latency["ttft_ms_p50"] <= latency["ttft_ms_p90"] <= latency["ttft_ms_p99"]
        assert 0 <= latency["good_share"] <= 1
        assert 0 <= latency["adapter_hit_rate"] <= 1
    points = [element for element in ElementTree.parse(plot).iter() if element.tag.endswith("circle")]
    assert len(points) == 2
    said = capsys.readouterr().out
    assert "saturated," in said
    assert "commit:" in said


def test_drift_between_rounds_does_not_change_the_ratio_by_round() -> None:
    """Each round has half the speed of the previous one, and 2,000 adapters always reduce throughput by 10 %."""
    few = [{"tokens_s": speed} for speed in (400.0, 200.0, 100.0)]
    many = [{"tokens_s": speed * 0.9} for speed in (400.0, 200.0, 100.0)]
    found = summaries([Case("lru", 5, few, few), Case("lru", 2000, many, many)])
    assert found[1]["throughput"]["over_fewest"] == pytest.approx(0.9)
    assert found[1]["throughput"]["over_fewest_by_round"] == pytest.approx(0.9)
    disturbed = [{"tokens_s": 360.0}, {"tokens_s": 90.0}, {"tokens_s": 90.0}]
    found = summaries([Case("lru", 5, few, few), Case("lru", 2000, disturbed, many)])
    assert found[1]["throughput"]["over_fewest"] == pytest.approx(0.45)
    assert found[1]["throughput"]["over_fewest_by_round"] == pytest.approx(0.9)


def test_wrong_answer_stops_the_run_before_measuring(
    scratch: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    alone = s_lora_check.answer_alone

    def exchanged(*arguments: Any) -> Any:
        answers = alone(*arguments)
        names = list(answers)
        return dict(zip(names, [answers[name] for name in reversed(names)], strict=True))

    monkeypatch.setattr(s_lora_setting, "answer_alone", exchanged)
    monkeypatch.setattr(s_lora_check, "NUM_OTHERS", 12)
    out = tmp_path / "s_lora.json"
    assert run(scratch, "--policy", "greedy_dual", "--out", str(out)) == 1
    assert not out.exists()
    assert "nothing was measured: " in capsys.readouterr().out


def test_request_lengths_are_the_same_for_every_number_of_adapters() -> None:
    few, many = (draw_requests(1000, count, LENGTHS, Lengths(4, 5)) for count in (5, 2000))
    assert [(one.num_prompt, one.num_output) for one in few] == [(one.num_prompt, one.num_output) for one in many]
    assert {one.num_prompt for one in few} == set(range(8, 32))
    assert {one.num_output for one in few} == {4}
    assert {one.adapter for one in few} == set(range(5))


@pytest.mark.parametrize(("alpha", "wanted"), [(1.0, 0.1), (0.3, 0.1**0.3), (2.0, 0.01)])
def test_popularity_follows_alpha(alpha: float, wanted: float) -> None:
    drawn = draw_requests(20_000, 100, LENGTHS, LENGTHS, alpha)
    assert sum(one.adapter < 10 for one in drawn) / len(drawn) == pytest.approx(wanted, abs=0.01)


@pytest.mark.parametrize("cv", [0.5, 1.0, 3.0])
def test_arrivals_have_the_given_rate_and_variation(cv: float) -> None:
    times = list(draw_arrivals(50.0, cv, 400.0))
    gaps = [later - earlier for earlier, later in itertools.pairwise(times)]
    mean = sum(gaps) / len(gaps)
    spread = math.sqrt(sum((gap - mean) ** 2 for gap in gaps) / len(gaps))
    assert 1 / mean == pytest.approx(50.0, rel=0.06)
    assert spread / mean == pytest.approx(cv, rel=0.08)
    assert times[-1] < 400.0


class SteadyEngine:
    """An engine on a shared clock. Each step takes `step_s` and returns one token per sequence."""

    def __init__(self, clock: list[float], step_s: float) -> None:
        self._clock = clock
        self._step_s = step_s
        self._left: dict[str, int] = {}

    @property
    def num_sequences(self) -> int:
        return len(self._left)

    def add(self, add: Add) -> None:
        self._left[add.sequence_id] = add.max_tokens

    def is_resident(self, digest: str | None) -> bool:
        return True

    def stats(self) -> Stats:
        return STATS

    def step(self, wait_s: float) -> list[Outbound]:
        self._clock[0] += self._step_s
        said: list[Outbound] = []
        for name in list(self._left):
            self._left[name] -= 1
            output = SequenceOutput(sequence_id=name, token_ids=(1,))
            said.append(Outbound(b"", StepOutput(outputs=(output,))))
            if not self._left[name]:
                del self._left[name]
                said.append(
                    Outbound(b"", Finished(sequence_id=name, reason="length", prompt_tokens=1, completion_tokens=8))
                )
        return said

    def abort(self) -> None:
        self._left.clear()


def test_engine_clock_stops_during_other_engines_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [0.0]
    now = SimpleNamespace(perf_counter=lambda: clock[0], process_time=lambda: 2 * clock[0])
    monkeypatch.setattr(s_lora_run, "time", now)
    drives = []
    for step_s in (1 / 64, 1 / 32):
        arrivals = [
            Arrival(at_s, Add(sequence_id=f"{at_s}", prompt=(1,), max_tokens=8, sampling=SamplingParams()))
            for at_s in (0.0, 0.5, 1.0)
        ]
        drives.append(Drive(cast(RunningEngine, SteadyEngine(clock, step_s)), arrivals, 0.5, 1.5, 0.0))
    quick, slow = drive_in_turns(drives, 1 / 8)
    for window, step_s in ((quick, 1 / 64), (slow, 1 / 32)):
        assert [one.at_s for one in window.journeys] == [0.5, 1.0]
        assert [(one.ttft_s, one.tpot_s) for one in window.journeys] == [(step_s, step_s)] * 2
        assert (window.num_finished, window.num_tokens) == (2, 16)
        assert window.cpu_s == 2.0, "other engines' turns do not count"
    assert clock == [3.0]


def test_goodput_counts_requests_that_meet_both_limits() -> None:
    journeys = [
        Journey(0.0, True, first_s=0.1, latest_s=0.5, end_s=0.5, num_tokens=5),
        Journey(1.0, True, first_s=1.9, latest_s=2.0, end_s=2.0, num_tokens=5),
        Journey(1.0, False, first_s=1.1, latest_s=9.0, end_s=9.0, num_tokens=5),
        Journey(1.5, False),
    ]
    figures = latency_figures(
        Window(0.0, 2.0, journeys, before=Snapshot(STATS, 0.0), after=Snapshot(STATS, 1.0)), Goal(0.5, 0.2)
    )
    assert figures["goodput_requests_s"] == 0.5
    assert figures["good_share"] == 0.25
    assert figures["unanswered"] == 1
    assert figures["adapter_hit_rate"] == 0.5
    assert figures["ttft_ms_p50"] == pytest.approx(900.0)
    assert figures["ttft_ms_p99"] is None


def test_figures_are_medians_over_rounds() -> None:
    assert median_of([{"a": 3.0, "b": None}, {"a": 1.0, "b": None}, {"a": 2.0, "b": 1.0}]) == {"a": 2.0, "b": None}


def test_plot_has_one_line_per_policy() -> None:
    drawn = ElementTree.fromstring(s_lora.draw_plot("a < b", {"lru": [(5, 100.0), (2000, 96.0)], "other": [(5, 99.0)]}))
    kinds = [element.tag.rsplit("}", 1)[-1] for element in drawn]
    assert kinds.count("polyline") == 2
    assert kinds.count("circle") == 3


@pytest.mark.parametrize(
    "arguments", [("--plot", "figure.png"), ("--alpha", "0"), ("--input", "9-8"), ("--policy", "fifo")]
)
def test_invalid_arguments_are_refused(arguments: tuple[str, ...]) -> None:
    with pytest.raises(SystemExit):
        s_lora.parse(arguments)
