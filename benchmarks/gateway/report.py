"""Combines the figures of a run with the figures of other loads from an earlier run's file."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from operator import itemgetter
from pathlib import Path
from typing import Any

from benchmarks.peers.system import SystemFailed

METHOD = ("machine", "litellm", "database", "rounds", "seconds")
"""Fields that must be equal for two runs to share a file."""


def earlier_run(path: Path | None, method: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """The document in the file, if there is one. Raises SystemFailed if its figures were measured under other
    conditions.
    """
    if path is None or not path.exists():
        return None
    document: Mapping[str, Any] = json.loads(path.read_text())
    for name in METHOD:
        if document[name] != method[name]:
            raise SystemFailed(
                f"the figures in {path} were measured with {name} {document[name]}, not {method[name]}: "
                "name another file, or measure all loads"
            )
    return document


def with_earlier_cases(
    cases: Sequence[Mapping[str, Any]], earlier: Mapping[str, Any] | None
) -> list[Mapping[str, Any]]:
    """Return these cases, plus the earlier cases of loads that were not measured this time."""
    measured = {case["load"] for case in cases}
    others = [] if earlier is None else [case for case in earlier["cases"] if case["load"] not in measured]
    return sorted([*others, *cases], key=itemgetter("load"))
