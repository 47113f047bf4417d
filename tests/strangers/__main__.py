"""Run other projects' own tests of an OpenAI server against ours: `python -m tests.strangers`.

The tests come from the projects' sdists and are unpacked in the folder of the environment that runs them. Their
outcomes are compared with the lists in `expected/`, which give the reason for each failure.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from benchmarks.tables import open_console
from tests.strangers.outcomes import KINDS, Comparison, Outcome, compare, load
from tests.strangers.sdists import unpacked
from tests.strangers.stand import BASES, Served, served
from tests.strangers.suite import run
from tests.strangers.vendors import VENDORS, Vendor

ENVIRONMENT = Path(__file__).parents[2] / ".venv-strangers"


def main() -> int:
    arguments = _arguments()
    console = open_console()
    vendors = [vendor for vendor in VENDORS if arguments.only in (None, vendor.name)]
    folders = {vendor.name: unpacked(vendor.requirement, vendor.patterns, ENVIRONMENT) for vendor in vendors}
    bases = tuple(name for name in BASES if any(name in vendor.bases for vendor in vendors))
    ran: dict[str, list[Outcome]] = {}
    with tempfile.TemporaryDirectory() as scratch, served(Path(scratch), bases) as stand:
        for vendor in vendors:
            ran[vendor.name] = _run(vendor, folders[vendor.name], stand, tuple(arguments.tests), console)
    if arguments.out:
        found = {name: [asdict(outcome) for outcome in outcomes] for name, outcomes in ran.items()}
        arguments.out.write_text(json.dumps(found, indent=1))
    if arguments.tests:
        for outcome in (outcome for outcomes in ran.values() for outcome in outcomes):
            console.print(f"{outcome.outcome:8} {outcome.test} {outcome.reason}", highlight=False, markup=False)
        return int(any(outcome.outcome == "failed" for outcomes in ran.values() for outcome in outcomes))
    compared = {vendor: compare(load(vendor.expected), ran[vendor.name]) for vendor in vendors}
    _print(compared, console)
    return int(any(comparison.faults for comparison in compared.values()))


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="make test-strangers", description=__doc__.partition("\n")[0])
    parser.add_argument("--only", choices=[vendor.name for vendor in VENDORS], help="run only one project's tests")
    parser.add_argument("--out", type=Path, metavar="FILE", help="write every outcome with its reason, as JSON")
    parser.add_argument(
        "tests", nargs="*", metavar="TEST", help="with --only: run these tests and print their outcomes, without a list"
    )
    arguments = parser.parse_args()
    if arguments.tests and not arguments.only:
        parser.error("TEST needs --only")
    return arguments


def _run(
    vendor: Vendor, files: Path, stand: dict[str, Served], tests: tuple[str, ...], console: Console
) -> list[Outcome]:
    columns = (TextColumn(f"{vendor.name:>8}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    outcomes = []
    with Progress(*columns, console=console) as progress:
        task = progress.add_task(vendor.name, total=None)
        log = ENVIRONMENT / f"{vendor.name}.log"
        for item in run(vendor, ENVIRONMENT / "bin" / "python", files, stand, log, tests):
            if isinstance(item, int):
                progress.update(task, total=item)
            else:
                outcomes.append(item)
                progress.advance(task)
    return outcomes


def _print(compared: dict[Vendor, Comparison], console: Console) -> None:
    kinds: Sequence[str] = list(KINDS)
    table = Table("tests of", "passed", "skipped", "failed", *kinds, "differences", title="Outcomes")
    for vendor, comparison in compared.items():
        counts = [comparison.counts[name] for name in ("passed", "skipped", "failed")]
        counts += [comparison.kinds[kind] for kind in kinds]
        table.add_row(vendor.requirement, *(str(count) for count in [*counts, len(comparison.faults)]))
    console.print(table)
    for vendor, comparison in compared.items():
        for fault in comparison.faults:
            console.print(f"{vendor.name}: {fault}", highlight=False, markup=False, soft_wrap=True)


if __name__ == "__main__":
    raise SystemExit(main())
