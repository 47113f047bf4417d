"""The output of the GPU benchmark: one table per part, and a file that several runs can share."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

IDENTITY = ("gpu", "capability", "memory_gb", "cuda", "python", "torch", "triton", "commit")
"""Fields that must be equal for two runs to share a file."""

METHOD = (
    "kernels: median of alternating CUDA graph replays, L2 flushed by reading before each (benchmarks/gpu/bench.py); "
    "engine: events in the stream before and after each step, and the wall clock (benchmarks/gpu/step.py)"
)


def table(name: str, result: dict[str, Any]) -> str:
    """A part as Markdown: one row per case and method, one column per figure, and the goals that were met or missed."""
    rows = result["rows"]
    figures = list(dict.fromkeys(figure for row in rows for figure in row["figures"]))
    lines = [f"\n## {name} ({result['seconds']} s)\n"]
    if result["error"]:
        lines.append(f"FAILED: {result['error']}\n")
    if not rows:
        return "\n".join(lines)
    lines.append("| " + " | ".join(["case", "way", *figures, "goals", "note"]) + " |")
    lines.append("|" + " --- |" * 2 + " ---: |" * len(figures) + " --- |" * 2)
    for row in rows:
        values = [_number(row["figures"].get(figure)) for figure in figures]
        goals = ", ".join(f"{one['goal']} {'met' if one['is_met'] else 'MISSED'}" for one in row["goals"])
        lines.append("| " + " | ".join([row["case"], row["way"], *values, goals, row["problem"]]) + " |")
    return "\n".join(lines)


def _number(value: float | None) -> str:
    if value is None:
        return ""
    return f"{value:.0f}" if abs(value) >= 1000 else f"{value:.3g}"


def stored(path: Path | None, machine: dict[str, Any]) -> dict[str, Any]:
    """The parts already in the file. Raises ValueError if a field of IDENTITY differs."""
    if path is None or not path.exists():
        return {}
    document = json.loads(path.read_text())
    for name in IDENTITY:
        if document["machine"].get(name) != machine.get(name):
            raise ValueError(
                f"{path} was measured with {name} {document['machine'].get(name)}, not {machine.get(name)}: "
                "name another file"
            )
    return dict(document["parts"])


def store(path: Path, machine: dict[str, Any], parts: dict[str, Any]) -> None:
    """Replace the file atomically, so that it never contains a partial document."""
    document = {"machine": machine, "method": METHOD, "parts": parts}
    path.parent.mkdir(parents=True, exist_ok=True)
    whole = path.with_name(path.name + ".new")
    whole.write_text(json.dumps(document, indent=1, allow_nan=False) + "\n")
    whole.replace(path)
