from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

from tests.gpu.processes import Ended

NO_TESTS = 5
"""Pytest's exit code if there are no tests to run. A share can be empty if there are more shares than tests."""

NUM_SLOWEST = 10


@dataclass(slots=True)
class Tests:
    """The test results of all shares. A crashed share is missing. Its output ends with the name of its last test."""

    num_passed: int = 0
    num_skipped: int = 0
    failed: list[str] = field(default_factory=list)
    slowest: list[tuple[float, str]] = field(default_factory=list)

    @property
    def num_run(self) -> int:
        return self.num_passed + self.num_skipped + len(self.failed)

    def __str__(self) -> str:
        return f"{self.num_passed} passed, {self.num_skipped} skipped, {len(self.failed)} failed"


def tests_of(scratch: Path) -> Tests | None:
    """The tests from the reports in `scratch`, or None if there is no report."""
    reports = [report for path in sorted(scratch.glob("*.xml")) if (report := _parsed(path)) is not None]
    if not reports:
        return None
    found = Tests()
    seconds: list[tuple[float, str]] = []
    for report in reports:
        for case in report.iter("testcase"):
            name = f"{case.get('classname')}::{case.get('name')}"
            seconds.append((float(case.get("time", 0)), name))
            kinds = {child.tag for child in case}
            if kinds & {"failure", "error"}:
                found.failed.append(name)
            elif "skipped" in kinds:
                found.num_skipped += 1
            else:
                found.num_passed += 1
    found.slowest = sorted(seconds, reverse=True)[:NUM_SLOWEST]
    return found


def _parsed(path: Path) -> ElementTree.ElementTree[ElementTree.Element] | None:
    """The report, or None if its process was killed while writing it."""
    try:
        return ElementTree.parse(path)
    except ElementTree.ParseError:
        return None


def _benchmark_of(scratch: Path) -> Any:
    try:
        return json.loads((scratch / "benchmark.json").read_text())
    except (OSError, ValueError):
        return None


def result_of(name: str, seconds: float, ended: list[Ended], note: str, scratch: Path) -> dict[str, Any]:
    tests = tests_of(scratch)
    allowed = (0,) if tests is None else (0, NO_TESTS)
    summary = [str(tests)] if tests else []
    if any(one.was_stopped for one in ended):
        outcome = "stopped"
        summary.append("it ran out of time")
    elif any(one.exit_code not in allowed for one in ended):
        outcome = "failed"
        summary += sorted({f"exit code {one.exit_code}" for one in ended if one.exit_code not in allowed})
    elif tests is not None and not tests.num_run:
        outcome = "failed"
    else:
        outcome = "tool absent" if note else "passed"
    return {
        "stage": name,
        "outcome": outcome,
        "seconds": round(seconds, 1),
        "summary": ", ".join([*summary, *([note] if note else [])]),
        "tests": None if tests is None else asdict(tests),
        "benchmark": _benchmark_of(scratch),
        "processes": [asdict(one) for one in ended],
    }


def left_out(name: str) -> dict[str, Any]:
    return {"stage": name, "outcome": "left out", "seconds": 0.0, "summary": "no time was left", "processes": []}


def table(results: list[dict[str, Any]]) -> str:
    rows = [
        ("stage", "outcome", "seconds", ""),
        *((r["stage"], r["outcome"], f"{r['seconds']}", r["summary"]) for r in results),
    ]
    widths = [max(len(row[i]) for row in rows) for i in range(3)]
    return "\n".join("  ".join([*(row[i].ljust(widths[i]) for i in range(3)), row[3]]).rstrip() for row in rows)
