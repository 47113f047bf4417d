"""Runs the rows of docs/reliability.md: `make reliability ARGS='--size small --only kills'`.

Each row is a campaign that exists by itself. A row that fails does not stop the others. Its figures, the commit and the
machine replace the row's earlier ones in benchmarks/results/reliability.json, and the table in docs/reliability.md is
written from that file.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from benchmarks.machine import busy_share, describe
from tests.reliability.record import FILE, read_records
from tests.reliability.rows import ROWS, SIZES, Row
from tests.reliability.table import PAGE, RESULTS, reliability_page

ROOT = Path(__file__).parents[2]


def run_row(name: str, row: Row, size: str, machine: Mapping[str, Any]) -> dict[str, Any]:
    """Run a row's commands and judge what they recorded."""
    busy = round(busy_share(), 3) if row.is_timed else None
    started = time.monotonic()
    with tempfile.TemporaryDirectory() as directory:
        records = Path(directory) / "records"
        statuses = []
        for command in row.commands:
            folder = command.environment
            python = sys.executable if folder is None else str(ROOT / f".venv-{folder}" / "bin" / "python")
            environment = os.environ | command.variables(size) | {FILE: str(records)}
            ran = subprocess.run([python, "-m", *command.words(size)], cwd=ROOT, env=environment, check=False)
            statuses.append(ran.returncode)
        figures = row.combined(read_records(records, name))
    problems = row.problems(figures)
    problems += [
        f"{command.arguments[0]} ended with {status}"
        for command, status in zip(row.commands, statuses, strict=True)
        if status
    ]
    return {
        "size": size,
        "date": datetime.now(UTC).date().isoformat(),
        "machine": dict(machine),
        "busy_share": busy,
        "duration_s": round(time.monotonic() - started, 1),
        "commands": [
            {"command": ["python", "-m", *command.words(size)], "settings": command.variables(size)}
            for command in row.commands
        ],
        "figures": figures,
        "problems": problems,
    }


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.reliability", description=__doc__)
    parser.add_argument("--size", choices=SIZES, default="small", help="small by default; full takes days")
    parser.add_argument("--only", nargs="+", choices=ROWS, default=list(ROWS), metavar="ROW", help=", ".join(ROWS))
    parser.add_argument("--out", type=Path, default=RESULTS, help="the file of results, whose other rows are kept")
    arguments = parser.parse_args(argv)
    machine = describe()
    results = json.loads(arguments.out.read_text()) if arguments.out.exists() else {}
    for name in arguments.only:
        print(f"{name}: {ROWS[name].title}", flush=True)
        results[name] = run_row(name, ROWS[name], arguments.size, machine)
        # Write after every row, so that an interrupted run keeps the rows before.
        ordered = {name: results[name] for name in ROWS if name in results}
        arguments.out.write_text(json.dumps(ordered, indent=1, allow_nan=False) + "\n")
        problems = results[name]["problems"]
        print(f"{name}: {'; '.join(problems) if problems else 'passed'}", flush=True)
    if arguments.out == RESULTS:
        PAGE.write_text(reliability_page())
    return 1 if any(results[name]["problems"] for name in arguments.only) else 0


if __name__ == "__main__":
    raise SystemExit(main())
