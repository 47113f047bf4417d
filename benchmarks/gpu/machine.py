"""Describes the machine of a GPU benchmark run."""

from __future__ import annotations

import platform

import torch

from benchmarks.machine import output_of, own_commit, versions_of

PACKAGES = ("torch", "triton", "numba", "numpy", "safetensors", "msgspec")


def describe() -> dict[str, str | int | float]:
    found: dict[str, str | int | float] = {"platform": platform.platform(), "python": platform.python_version()}
    found |= versions_of(PACKAGES)
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
            "driver_and_clocks": output_of(query) or "unknown",
        }
    return found | {"commit": own_commit()}
