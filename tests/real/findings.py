"""What the parts of the campaign find, as a table and as a JSON file that keeps the findings of other parts."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    model: str
    what: str
    figures: Mapping[str, Any] = field(default_factory=dict)
    problem: str | None = None
    """Why the campaign fails, or None."""


def show(console: Console, part: str, findings: Sequence[Finding]) -> None:
    table = Table("model", "what", "figures", "", title=part, title_justify="left")
    for one in findings:
        figures = ", ".join(f"{name} {value}" for name, value in one.figures.items())
        table.add_row(one.model, one.what, figures, one.problem or "")
    console.print(table)


def store(path: Path, part: str, findings: Sequence[Finding], machine: Mapping[str, Any]) -> None:
    """Replace the findings of this part about these models in the file."""
    document: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
    models = {one.model for one in findings}
    parts = document.setdefault("parts", {})
    kept = [one for one in parts.get(part, []) if one["model"] not in models]
    found_at = {"date": datetime.now(UTC).date().isoformat(), "commit": machine["commit"]}
    parts[part] = [*kept, *(asdict(one) | found_at for one in findings)]
    document["machine"] = {name: value for name, value in machine.items() if name != "commit"}
    path.write_text(json.dumps(document, indent=1, allow_nan=False) + "\n")
