"""What a run of the GPU benchmark leaves behind: a table a part, and a file that several runs may fill."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

IDENTITY = ("gpu", "capability", "memory_gb", "cuda", "python", "torch", "triton", "commit")
"""What two runs must have in common for their parts to stand in one file."""

METHOD = (
    "kernels: median of CUDA graph replays in turns, L2 flushed by reading before each (benchmarks/gpu/bench.py); "
    "engine: marks in the stream before and after each step, and the wall clock (benchmarks/gpu/step.py)"
)


def table(name: str, result: dict[str, Any]) -> str:
    """A part as Markdown: a row a way, a column a figure, and which goals were met."""
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
    """The parts that the file holds already; raises ValueError where another card or other code was measured."""
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
    """Write the file anew, so that it never holds half a document."""
    document = {"machine": machine, "method": METHOD, "parts": parts}
    path.parent.mkdir(parents=True, exist_ok=True)
    whole = path.with_name(path.name + ".new")
    whole.write_text(json.dumps(document, indent=1, allow_nan=False) + "\n")
    whole.replace(path)
