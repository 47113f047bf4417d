from __future__ import annotations

import re
from pathlib import Path

from prometheus_client.parser import text_string_to_metric_families

DOCUMENT = Path(__file__).parents[2] / "docs" / "metrics.md"
ROW = re.compile(r"^\| `(?P<name>[a-z_]+)` \| (?P<kind>\w+) \|(?P<labels>[^|]*)\|(?P<unit>[^|]*)\|", re.MULTILINE)


def documented() -> dict[str, tuple[str, frozenset[str]]]:
    rows = list(ROW.finditer(DOCUMENT.read_text()))
    assert all(row["unit"].strip() for row in rows), "every metric has a unit"
    return {row["name"]: (row["kind"], frozenset(re.findall(r"`(\w+)`", row["labels"]))) for row in rows}


def exposed(scrape: str) -> dict[str, tuple[str, set[str]]]:
    """The type and labels of each exposed metric, by name. Metrics without samples have no labels.

    `_created` series are skipped.
    """
    found: dict[str, tuple[str, set[str]]] = {}
    for family in text_string_to_metric_families(scrape):
        if family.name.endswith("_created"):
            continue
        name = f"{family.name}_total" if family.type == "counter" else family.name
        assert name not in found, f"{name} is exposed twice"
        labels = {label for sample in family.samples for label in sample.labels if label != "le"}
        found[name] = (family.type, labels)
    return found
