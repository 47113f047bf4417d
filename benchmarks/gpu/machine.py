"""Describes the machine of a GPU benchmark run."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import subprocess
from pathlib import Path

import torch

PACKAGES = ("torch", "triton", "numba", "numpy", "safetensors", "msgspec")


def describe() -> dict[str, str | int | float]:
    found: dict[str, str | int | float] = {"platform": platform.platform(), "python": platform.python_version()}
    for name in PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = "absent"
    if torch.cuda.is_available():
        properties = torch.cuda.get_device_properties(0)
        fields = "driver_version,clocks.sm,clocks.mem,temperature.gpu"
        query = ["nvidia-smi", f"--query-gpu={fields}", "--format=csv,noheader"]
        found |= {
            "gpu": properties.name,
            "capability": f"{properties.major}.{properties.minor}",
            "multiprocessors": properties.multi_processor_count,
            "l2_mb": properties.L2_cache_size / 1e6,
            "memory_gb": properties.total_memory / 1e9,
            "cuda": torch.version.cuda or "unknown",
            "driver_and_clocks": _output(query) or "unknown",
        }
    root = str(Path(__file__).parents[2])
    commit = _output(["git", "-C", root, "rev-parse", "--short=12", "HEAD"])
    changes = "+changes" if commit and _output(["git", "-C", root, "status", "--porcelain"]) else ""
    # A copy of the repository may have no .git folder, or the .git folder of another commit.
    found["commit"] = os.environ.get("LORAMUX_COMMIT") or (commit + changes if commit else "unknown")
    return found


def _output(command: list[str]) -> str:
    try:
        return subprocess.run(command, capture_output=True, text=True, check=False, timeout=20).stdout.strip()
    except (OSError, subprocess.TimeoutExpired):
        return ""
