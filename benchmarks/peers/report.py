"""The measured cells as tables, as a JSON document and as a picture."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.machine import BUSY_SHARE
from benchmarks.peers.agreement import Agreement
from benchmarks.peers.figures import FLOAT_GOALS, Cell, Goals, Ratio, ratios, tokens_per_second
from benchmarks.peers.measurement import Measurement
from benchmarks.peers.system import LORAMUX, Peer
from benchmarks.peers.workload import KINDS, Load
from benchmarks.tables import table
from loramux.admin.bench.pictures import draw_bars


def print_report(
    peers: Sequence[Peer],
    agreements: Mapping[str, Agreement],
    measurement: Measurement,
    console: Console,
    goals: Goals = FLOAT_GOALS,
) -> dict[Cell, float]:
    """Print the tables and notes, and return the speed of each cell."""
    loads, num_questions = measurement.loads, measurement.files.num_adapters
    speeds = tokens_per_second(measurement.samples, num_questions)
    console.print(speed_table(speeds, loads, peers))
    own_speeds = tokens_per_second(measurement.own_samples, num_questions)
    console.print(ratio_table(ratios(speeds, own_speeds, loads, goals)))
    for note in notes(peers, agreements, measurement):
        console.print(f"[yellow]{note}[/yellow]", highlight=False)
    return speeds


def speed_table(speeds: Mapping[Cell, float], loads: Sequence[Load], peers: Sequence[Peer]) -> Table:
    """One row per system and dtype, and one per peer that was not found."""
    columns = [(load, kind) for load in loads for kind in KINDS]
    rows = []
    for system in dict.fromkeys(cell.system for cell in speeds):
        cells = [Cell(system, load, kind) for load, kind in columns]
        rows.append([system.label, *(f"{speeds[cell]:.1f}" if cell in speeds else "-" for cell in cells)])
    rows += [[f"{peer.name}, not found", *("-" for _ in columns)] for peer in peers if peer.missing is not None]
    return table("output tokens/s, median", ("system", *(f"{load} {kind}" for load, kind in columns)), rows)


def ratio_table(found: Sequence[Ratio]) -> Table:
    verdicts = {True: "[green]met[/green]", False: "[red]missed[/red]", None: ""}
    rows = [
        (str(one.load), one.name, one.against, shown(one, one.value), _target(one), verdicts[one.is_met])
        for one in found
    ]
    headings = ("load", "figure", "over", "value", "target", "")
    return table(f"{LORAMUX} and its targets", headings, rows, num_left=3)


def shown(ratio: Ratio, value: float | None) -> str:
    """Format an overhead as a percentage and a ratio as a factor."""
    if value is None:
        return "-"
    return f"{value:.1%}" if ratio.is_ceiling else f"{value:.2f}x"


def _target(ratio: Ratio) -> str:
    if ratio.target is None:
        return "none"
    return f"{'<=' if ratio.is_ceiling else '>='} {shown(ratio, ratio.target)}"


def notes(peers: Sequence[Peer], agreements: Mapping[str, Agreement], measurement: Measurement) -> list[str]:
    found = [f"{peer.name}: not found; {peer.missing}" for peer in peers if peer.missing is not None]
    found += [
        f"{name}: some of its float32 answers differ from peft's: {agreement}"
        for name, agreement in agreements.items()
        if not agreement.is_whole
    ]
    found += [f"{label}: {message}" for label, message in measurement.failures.items()]
    busiest = max(measurement.busy_shares, default=0.0)
    if busiest > BUSY_SHARE:
        # Other programs distort ratios too, because they slow down spinning threads the most.
        found.append(
            f"the machine was up to {busiest:.0%} busy with other programs: this run does not decide any target"
        )
    return found


def document(
    peers: Sequence[Peer],
    agreements: Mapping[str, Agreement],
    measurement: Measurement,
    loads: Sequence[Load],
    goals: Goals = FLOAT_GOALS,
) -> dict[str, Any]:
    num_questions = measurement.files.num_adapters
    speeds = tokens_per_second(measurement.samples, num_questions)
    own_speeds = tokens_per_second(measurement.own_samples, num_questions)
    return {
        "systems": {peer.name: {"version": peer.version, "missing": peer.missing} for peer in peers},
        "check": {
            name: {"equal": dict(agreement.equal), "answers": dict(agreement.num_answers)}
            for name, agreement in agreements.items()
        },
        "failures": measurement.failures,
        "busy_share_before_sessions": measurement.busy_shares,
        "trials": [_cell(cell, seconds) for cell, seconds in measurement.trials.items()],
        "cells": [
            _cell(cell, seconds) | {"tokens_per_second": round(speeds[cell], 2)}
            for cell, seconds in measurement.samples.items()
        ],
        "way_back": [_cell(cell, seconds) for cell, seconds in measurement.way_back.items()],
        "ratios": [
            {
                "load": str(ratio.load),
                "name": ratio.name,
                "over": ratio.against,
                "value": None if ratio.value is None else round(ratio.value, 3),
                "target": ratio.target,
                "is_met": ratio.is_met,
            }
            for ratio in ratios(speeds, own_speeds, loads, goals)
        ],
    }


def _cell(cell: Cell, seconds: Sequence[float]) -> dict[str, Any]:
    return {
        "system": cell.system.name,
        "dtype": cell.system.dtype,
        "setting": cell.system.setting,
        "load": str(cell.load),
        "kind": cell.kind,
        "seconds": [round(value, 3) for value in seconds],
    }


def picture(title: str, speeds: Mapping[Cell, float]) -> str:
    """Draw each system in its fastest dtype: one panel per load, one group of bars per kind of work."""
    panels: dict[str, dict[str, dict[str, float]]] = {}
    for cell, speed in speeds.items():
        bars = panels.setdefault(f"prompt/output {cell.load}, tokens/s", {}).setdefault(cell.kind, {})
        bars[cell.system.name] = max(speed, bars.get(cell.system.name, 0.0))
    names = sorted({cell.system.name for cell in speeds}, key=lambda name: (name != LORAMUX, name))
    return draw_bars(title, panels, names)
