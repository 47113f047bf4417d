"""Describes the machine on which figures are measured, and refuses to measure on a busy machine.

It needs no packages but torch, because a machine with a GPU may lack those of the other benchmarks.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import os
import platform
import subprocess
import sys
import time
from collections.abc import Iterable
from pathlib import Path

import torch

PACKAGES = ("torch", "transformers", "peft", "numba", "numpy")
BUSY_SHARE = 0.15
ROOT = Path(__file__).parents[1]


def out_file(path: str) -> Path:
    """The type of an argument that names a file to write. Makes its directory, so that no measured figure is lost."""
    made = Path(path)
    made.parent.mkdir(parents=True, exist_ok=True)
    return made


def busy_share(seconds: float = 2.0) -> float:
    def read() -> tuple[int, int]:
        fields = [int(value) for value in Path("/proc/stat").read_text().splitlines()[0].split()[1:]]
        return sum(fields), fields[3] + fields[4]

    total, idle = read()
    time.sleep(seconds)
    later_total, later_idle = read()
    return 1.0 - (later_idle - idle) / max(1, later_total - total)


def add_allow_busy(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--allow-busy", action="store_true", help="measure even while other programs use the machine")


def require_idle(is_busy_allowed: bool) -> float:
    """Return the share of the machine's CPU time that is in use. Exit if other processes keep the machine busy, unless
    that is allowed.
    """
    share = busy_share()
    if share > BUSY_SHARE and not is_busy_allowed:
        raise SystemExit(
            f"the machine is {share:.0%} busy: stop other programs, or pass --allow-busy to measure anyway"
        )
    return share


def shown_command() -> list[str]:
    """The arguments of this program, for a result file. Paths below the home or the current directory, which are the
    machine's own, become names.
    """
    own = (f"{Path.home()}/", f"{Path.cwd().parent}/")
    return [Path(one).name if one.startswith(own) else one for one in sys.argv[1:]]


def describe() -> dict[str, str | int | bool]:
    from loramux.kernels.cpu.linear.linear import product_of

    cpu = next(
        (line.split(":")[1].strip() for line in Path("/proc/cpuinfo").read_text().splitlines() if "model name" in line),
        platform.processor(),
    )
    return {
        "cpu": cpu,
        "cores": len(os.sched_getaffinity(0)),
        "capability": torch.backends.cpu.get_cpu_capability(),
        "bfloat16_product": product_of(torch.bfloat16).__name__,
        "python": platform.python_version(),
        **versions_of(PACKAGES),
        "commit": own_commit(),
    }


def versions_of(names: Iterable[str]) -> dict[str, str]:
    found = {}
    for name in names:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = "absent"
    return found


def commit(checkout: Path) -> str:
    """The checkout's commit, marked if there are uncommitted changes."""
    git = ["git", "-C", str(checkout)]
    found = output_of([*git, "rev-parse", "--short=12", "HEAD"])
    changes = "+changes" if found and output_of([*git, "status", "--porcelain"]) else ""
    return found + changes if found else "unknown"


def own_commit() -> str:
    # A copy of the repository may have no .git folder, or the .git folder of another commit.
    return os.environ.get("LORAMUX_COMMIT") or commit(ROOT)


def output_of(command: list[str]) -> str:
    """What a command prints, or nothing if it cannot be run."""
    try:
        return subprocess.run(command, capture_output=True, text=True, check=False, timeout=20).stdout.strip()
    except (OSError, subprocess.TimeoutExpired):
        return ""
