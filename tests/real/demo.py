"""`loramux demo --real`: at most 20 % right answers without each adapter, and at least 90 % with it."""

from __future__ import annotations

import re
import subprocess
import sys
import time
from collections.abc import Iterator

from loramux.admin.demo.real.grading import GRADES
from tests.ports import free_port
from tests.real.findings import Finding
from tests.real.models import RealModel

BEFORE, AFTER = 20.0, 90.0
"""Goals, in percent."""


def real_demo(model: RealModel, num_prompts: int) -> Iterator[Finding]:
    if model.name != "smollm2":
        return
    started = time.monotonic()
    ports = ["--port", str(free_port()), "--admin-port", str(free_port())]
    command = [sys.executable, "-m", "loramux.admin.cli", "demo", "--real", "--exit", *ports]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    minutes = round((time.monotonic() - started) / 60, 1)
    adds_up = done.returncode == 0 and "It adds up: 1200 answers" in done.stdout
    yield Finding(
        model=model.name,
        what="runs, and its bill adds up",
        figures={"minutes": minutes},
        problem=None if adds_up else (done.stderr or done.stdout)[-300:],
    )
    for adapter in GRADES:
        found = re.search(rf"^ *{adapter} +200 +([0-9.]+)% +([0-9.]+)% *$", done.stdout, re.MULTILINE)
        before, after = (float(share) for share in found.groups()) if found else (100.0, 0.0)
        yield Finding(
            model=model.name,
            what=f"percent right, {adapter}",
            figures={"base": before, "with_adapter": after},
            problem=None if before <= BEFORE and after >= AFTER else f"the goals are {BEFORE} and {AFTER} percent",
        )
