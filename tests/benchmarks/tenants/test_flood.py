from __future__ import annotations

import json
import math
import xml.etree.ElementTree as ElementTree
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType

import pytest

from benchmarks import harness
from benchmarks.answers import CheckError
from benchmarks.harness import percentile
from benchmarks.s_lora import setting as s_lora_setting
from benchmarks.s_lora.run import Stream, Window
from benchmarks.tables import open_console
from benchmarks.tenants import cold_storm, flood
from benchmarks.tenants import setting as tenants_setting
from benchmarks.tenants.figures import Target, compare, spread
from benchmarks.tenants.setting import draw_tails
from loramux.engine.protocol.messages import Add

COMMON = ("--threads", "1", "--repeats", "2", "--allow-busy")
FLOOD = ("--seconds", "0.6", "--seats", "4", "--open", "12", "--crowd", "3", "--polite", "2", "--polite-load", "0.39")
COLD_STORM = (
    *("--seconds", "0.6", "--settle", "0.1", "--residents", "3", "--resident-adapters", "2", "--seats", "3"),
    *("--loads", "4"),
)
SMALL_POOL = ("--pool-adapters", "5", "--spare-adapters", "2", "--host-adapters", "3")


@pytest.fixture(scope="module")
def scratch(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("adapters")


@pytest.fixture(autouse=True)
def _short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flood, "WARM_S", 0.1)
    monkeypatch.setattr(harness, "require_idle", lambda is_allowed: 0.5)
    monkeypatch.setattr(flood, "CALIBRATION_S", 0.3)
    monkeypatch.setattr(harness, "busy_share", lambda: 0.5)


def run(main: Callable[[Sequence[str]], int], scratch: Path, *arguments: str) -> int:
    return main([*COMMON, "--scratch", str(scratch), *arguments])


@pytest.mark.campaign
def test_flood_writes_figures_of_polite_requests(
    scratch: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out, plot = tmp_path / "flood.json", tmp_path / "flood.svg"
    assert run(flood.main, scratch, *FLOOD, "--out", str(out), "--plot", str(plot)) == 0
    document = json.loads(out.read_text())
    assert document["check"]["num_evictions"] > 0
    assert {"cpu", "cores", "commit", "torch"} <= document["machine"].keys()
    assert document["figures"].keys() == {"flood", "full crowd", "calm crowd"}
    for way in document["figures"].values():
        assert way["ttft"]["samples"] > 0
        assert way["ttft"]["p50_ms"] <= way["ttft"]["p90_ms"] <= way["ttft"]["p99_ms"]
        assert len(way["requests_s"]) == 2
    # The same polite requests arrive under every load.
    assert len({way["ttft"]["samples"] for way in document["figures"].values()}) == 1
    assert document["figures"]["flood"]["fewest_waiting"] > 0
    assert [one["reference"] for one in document["comparisons"]] == ["full crowd", "calm crowd"]
    lines = [element for element in ElementTree.parse(plot).iter() if element.tag.endswith("polyline")]
    assert len(lines) == 3
    assert "target 1.25" in capsys.readouterr().out


@pytest.mark.campaign
@pytest.mark.parametrize("source", ["disk", "blobs"])
def test_storm_loads_new_adapters_during_resident_streams(
    scratch: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], source: str
) -> None:
    out, plot = tmp_path / "storm.json", tmp_path / "storm.svg"
    arguments = (*COLD_STORM, *SMALL_POOL, "--output", "8-16", "--storm-output", "1-3", "--from", source)
    assert run(cold_storm.main, scratch, *arguments, "--out", str(out), "--plot", str(plot)) == 0
    document = json.loads(out.read_text())
    figures = document["figures"]
    assert figures.keys() == {"quiet", "loads", "warm", "storm"}
    for way in ("quiet", "warm"):
        assert figures[way]["loads"] == [0, 0]
    for way in ("loads", "storm"):
        assert min(figures[way]["loads"]) > 0
    assert figures["quiet"]["ttft"]["samples"] == figures["loads"]["ttft"]["samples"] == 0
    assert figures["warm"]["ttft"]["samples"] > 0
    assert figures["loads"]["load"]["samples"] > 0
    assert all(way["between_resident_tokens"]["p99_ms"] > 0 for way in figures.values())
    assert [(one["way"], one["reference"]) for one in document["comparisons"]] == [
        ("loads", "quiet"),
        ("storm", "warm"),
        ("storm", "quiet"),
    ]
    assert "MB in 0.6 s" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("module", "arguments"),
    [(flood, FLOOD), (cold_storm, (*COLD_STORM, *SMALL_POOL))],
    ids=["flood", "cold storm"],
)
def test_wrong_answer_stops_the_run_before_measuring(
    scratch: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    module: ModuleType,
    arguments: tuple[str, ...],
) -> None:
    def refuse(*arguments: object) -> None:
        raise CheckError("an answer is wrong")

    # The S-LoRA benchmark's test runs the check itself.
    monkeypatch.setattr(tenants_setting, "check_answers", refuse)
    out = tmp_path / "figures.json"
    assert run(module.main, scratch, *arguments, "--out", str(out)) == 1
    assert not out.exists()
    assert "nothing was measured: an answer is wrong" in capsys.readouterr().out


def a_measurement(scratch: Path, *arguments: str) -> flood.Measurement:
    parsed = flood.parse([*COMMON, *FLOOD, "--scratch", str(scratch), *arguments])
    return flood.Measurement(parsed, s_lora_setting.open_files(parsed, 5, open_console()))


def test_flood_and_full_crowd_send_the_same_requests(scratch: Path) -> None:
    measurement = a_measurement(scratch)

    def first(streams: Sequence[Stream], count: int) -> list[Add]:
        return [next(stream.requests) for _ in range(count // len(streams)) for stream in streams]

    flooding, crowded = (first(measurement.streams(way), 300) for way in ("flood", "full crowd"))
    assert [(one.prompt, one.max_tokens, one.digest) for one in flooding] == [
        (one.prompt, one.max_tokens, one.digest) for one in crowded
    ]
    assert {one.share_key for one in flooding} == {"flood"}
    assert set(Counter(one.share_key for one in crowded).values()) == {100}
    assert [sum(stream.num_open for stream in measurement.streams(way)) for way in flood.WAYS] == [12, 12, 0]


def test_polite_requests_are_the_same_under_every_load(scratch: Path) -> None:
    measurement = a_measurement(scratch, "--seconds", "20")
    beside = {way: measurement.timed(way, 50.0, 1) for way in flood.WAYS}
    polite = {way: [one for one in timed if one.is_counted] for way, timed in beside.items()}
    assert polite["flood"] == polite["full crowd"] == polite["calm crowd"] == beside["flood"]
    assert len(polite["flood"]) == pytest.approx(0.39 * 50 * 20, rel=0.2)
    # The load begins before the window, so that it is already running when the window opens.
    load = [one for one in beside["calm crowd"] if not one.is_counted]
    assert len(load) == pytest.approx(0.56 * 50 * 20, rel=0.2)
    assert load[0].at_s < 0


def test_every_storm_uses_new_adapters(scratch: Path) -> None:
    parsed = cold_storm.parse([*COMMON, *COLD_STORM, *SMALL_POOL, "--scratch", str(scratch)])
    measurement = cold_storm.Measurement(parsed, s_lora_setting.open_files(parsed, 5 + 16, open_console()))
    named = [
        one.message.digest for number in (0, 1) for way in ("loads", "storm") for one in measurement.timed(way, number)
    ]
    assert len(set(named)) == len(named) == 16
    assert set(named).isdisjoint({*measurement.resident, *measurement.warm})
    times = {way: [one.at_s for one in measurement.timed(way, 1)] for way in ("warm", "quiet")}
    assert times["quiet"] == []
    assert times["warm"] == sorted(times["warm"])
    assert {one.message.digest for one in measurement.timed("warm", 1)} <= set(measurement.warm)


def test_ratio_compares_the_p99_over_all_rounds() -> None:
    samples = {"a": [[0.1] * 99 + [0.3], [0.1] * 98 + [0.5] * 2], "b": [[0.1] * 100, [0.2] * 100]}
    comparison = compare(samples, Target("a", "b", 1.6))
    assert comparison.ratio == pytest.approx(percentile([0.1] * 197 + [0.3, 0.5, 0.5], 99) / 0.2)
    assert comparison.rounds == pytest.approx((percentile([0.1] * 99 + [0.3], 99) / 0.1, 2.5))
    assert comparison.document["met"] is (comparison.ratio <= 1.6)


def test_unanswered_request_misses_every_target() -> None:
    comparison = compare({"a": [[0.1] * 10 + [math.inf]], "b": [[0.1]]}, Target("a", "b", 1000.0))
    assert not comparison.is_met
    assert comparison.document["p99_over_reference"] is None
    assert "missed" in str(comparison)


def test_target_without_samples_is_missed() -> None:
    assert not compare({"a": [[]], "b": [[]]}, Target("a", "b", 1.0)).is_met
    assert spread([[]]) == {"samples": 0, "p50_ms": None, "p90_ms": None, "p99_ms": None}


def test_plot_omits_infinite_samples() -> None:
    drawn = ElementTree.fromstring(draw_tails("a < b", "gaps", {"one": [0.1, 0.2], "none": [], "cut": [0.1, math.inf]}))
    points = [element.get("points", "") for element in drawn if element.tag.endswith("polyline")]
    assert len(points) == 3
    assert points[1] == ""
    assert "inf" not in " ".join(points)


def test_engine_without_a_whole_core_triggers_a_warning(capsys: pytest.CaptureFixture[str]) -> None:
    class Snapshot:
        def __init__(self, cpu_s: float) -> None:
            self.cpu_s = cpu_s

    observed = Window(0.0, 10.0)
    observed.before, observed.after = Snapshot(1.0), Snapshot(6.0)  # type: ignore[assignment]
    tenants_setting.say_disturbed(observed, open_console())
    assert "50% of a core" in capsys.readouterr().out
    observed.after = Snapshot(11.0)  # type: ignore[assignment]
    tenants_setting.say_disturbed(observed, open_console())
    assert not capsys.readouterr().out


@pytest.mark.parametrize(
    ("module", "arguments"),
    [
        (flood, ("--plot", "figure.png")),
        (flood, ("--crowd", "7")),
        (flood, ("--polite-load", "0.5")),
        (flood, ("--calm-load", "1.0")),
        (flood, ("--repeats", "0")),
        (cold_storm, ("--output", "9-8")),
        (cold_storm, ("--resident-adapters", "46")),
    ],
)
def test_invalid_arguments_are_refused(module: ModuleType, arguments: tuple[str, ...]) -> None:
    with pytest.raises(SystemExit):
        module.parse(arguments)
