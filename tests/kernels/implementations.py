from __future__ import annotations

from collections.abc import Callable

from loramux.kernels.dispatch import Kernels
from loramux.kernels.reference.kernels import ReferenceKernels
from loramux.kernels.tables import PoolViews

CPU_KERNELS = ("reference", "cpu")


def cpu_kernels(name: str) -> Callable[[PoolViews], Kernels]:
    if name == "reference":
        return ReferenceKernels
    from loramux.kernels.cpu.kernels import CpuKernels

    return CpuKernels
