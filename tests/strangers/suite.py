"""Runs one suite in the environment of `make test-strangers`."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from pathlib import Path

from tests.strangers.outcomes import Outcome
from tests.strangers.stand import Served
from tests.strangers.vendors import STAND_IN, Vendor

TIMEOUT_S = 600
"""Longest time of one test, in seconds."""


def run(
    vendor: Vendor, python: Path, files: Path, stand: Mapping[str, Served], log: Path, selection: tuple[str, ...] = ()
) -> Iterator[Outcome | int]:
    """Yield the number of tests as soon as it is known, and then each test's outcome.

    pytest's own output is in `log`. Raise RuntimeError if pytest cannot run the tests.
    """
    tests = selection or vendor.tests
    root = STAND_IN if vendor.plugin is None else files
    command = [str(python), "-m", "pytest", "-c", str(STAND_IN / "suite.ini"), "--rootdir", str(root)]
    command += [
        "-p",
        "no:cacheprovider",
        "-p",
        "report_outcomes",
        "--timeout",
        str(TIMEOUT_S),
        "--tb",
        "native",
        *vendor.options,
        *tests,
    ]
    if vendor.plugin is not None:
        command += ["-p", vendor.plugin]
    reading, writing = os.pipe()
    environment = {
        **{name: value for name, value in os.environ.items() if not name.startswith(("LORAMUX_", "PYTHON"))},
        "PYTHONPATH": os.pathsep.join([str(STAND_IN), str(files)]),
        "HF_HUB_OFFLINE": "1",
        "STRANGERS_STAND": json.dumps({name: asdict(served) for name, served in stand.items()}),
        "STRANGERS_PIPE": str(writing),
    }
    with log.open("w") as output, os.fdopen(reading) as lines:
        process = subprocess.Popen(
            command, cwd=files, env=environment, pass_fds=[writing], stdout=output, stderr=subprocess.STDOUT
        )
        os.close(writing)
        num_outcomes = 0
        for line in lines:
            fields = json.loads(line)
            if "collected" in fields:
                yield int(fields["collected"])
            else:
                num_outcomes += 1
                yield Outcome(fields["test"], fields["outcome"], fields["reason"])
        if process.wait() not in (0, 1, 2) or not num_outcomes:
            raise RuntimeError(f"pytest could not run the tests of {vendor.name}: see {log}")
