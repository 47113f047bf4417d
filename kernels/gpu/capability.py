"""The GPUs that the kernels support. The check runs before torch is imported."""

from __future__ import annotations

MIN_CAPABILITY = (8, 0)
"""Ampere, the oldest generation with bfloat16 products and asynchronous copies to shared memory."""


def capability_problem(capability: tuple[int, int], gpu: int) -> str | None:
    """Reason why GPU `gpu`, of compute capability `(major, minor)`, cannot run the kernels, or None if it can."""
    if capability >= MIN_CAPABILITY:
        return None
    (major, minor), (least_major, least_minor) = capability, MIN_CAPABILITY
    return (
        f"GPU {gpu} has compute capability {major}.{minor}; the kernels need {least_major}.{least_minor} or later: "
        "use a newer GPU or --device cpu"
    )
