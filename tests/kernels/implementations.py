"""The implementations of the kernels that keep K and V as the CPU does, by name."""

from __future__ import annotations

from collections.abc import Callable

from loramux.kernels.dispatch import Kernels
from loramux.kernels.reference.kernels import ReferenceKernels
from loramux.kernels.tables import PoolViews

CPU_KERNELS = ("reference", "cpu")


def cpu_kernels(name: str) -> Callable[[PoolViews], Kernels]:
    """The implementation of that name; numba is imported only where it is used."""
    if name == "reference":
        return ReferenceKernels
    from loramux.kernels.cpu.kernels import CpuKernels

    return CpuKernels
