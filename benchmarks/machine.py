"""Describes the machine on which figures are measured, and refuses to measure on a busy machine."""

from __future__ import annotations

import argparse
import importlib.metadata
import os
import platform
import subprocess
import time
from pathlib import Path

import torch

from loramux.kernels.cpu.linear.linear import product_of

PACKAGES = ("torch", "transformers", "peft", "numba", "numpy")
BUSY_SHARE = 0.15


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


def describe() -> dict[str, str | int | bool]:
    cpu = next(
        (line.split(":")[1].strip() for line in Path("/proc/cpuinfo").read_text().splitlines() if "model name" in line),
        platform.processor(),
    )
    root = Path(__file__).parent.parent
    git = ["git", "-C", str(root)]
    commit = subprocess.run([*git, "rev-parse", "--short=12", "HEAD"], capture_output=True, text=True, check=False)
    changes = subprocess.run([*git, "status", "--porcelain"], capture_output=True, text=True, check=False)
    return {
        "cpu": cpu,
        "cores": len(os.sched_getaffinity(0)),
        "capability": torch.backends.cpu.get_cpu_capability(),
        "bfloat16_product": product_of(torch.bfloat16).__name__,
        "python": platform.python_version(),
        **{name: importlib.metadata.version(name) for name in PACKAGES},
        "commit": commit.stdout.strip() + ("+changes" if changes.stdout.strip() else ""),
    }
