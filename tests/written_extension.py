"""Writes distributions with entry points into a directory, as installers do."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path


def write_distribution(
    site: Path, name: str, entries: Mapping[str, Mapping[str, str]], version: str = "1.0", **modules: str
) -> Path:
    """Install a distribution and return `site`. `entries` maps groups to names and values. `modules` are sources."""
    information = site / f"{name.replace('-', '_')}-{version}.dist-info"
    information.mkdir(parents=True)
    (information / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    lines = [
        line
        for group, values in entries.items()
        for line in (f"[{group}]", *(f"{entry} = {value}" for entry, value in values.items()))
    ]
    (information / "entry_points.txt").write_text("\n".join(lines) + "\n", encoding="utf-8")
    for module, source in modules.items():
        (site / f"{module}.py").write_text(source)
    return site
