"""Prints, for each given instruction set, the signatures of the CPU kernels that each part of the warm-up compiles, and
those that requests need, as JSON.

Recorders replace the kernels, so nothing is compiled or computed. The result therefore does not depend on this CPU, but
only on the instruction set.
"""

from __future__ import annotations

import importlib
import json
import multiprocessing
import platform
import sys
from collections.abc import Callable
from typing import Any

import numba
import torch

from loramux.kernels.cpu.instructions import compiled
from tests.kernels.cpu.instruction_sets import features_of

SIGNATURES: set[str] = set()


def record(function: Callable[..., None]) -> Callable[..., None]:
    """A replacement of a kernel, which adds the signature of each call to SIGNATURES."""

    def call(*arguments: Any) -> None:
        kinds = ", ".join(str(numba.typeof(argument)) for argument in arguments)
        SIGNATURES.add(f"{function.__module__.rpartition('.')[2]}.{function.__name__}({kinds})")

    return call


class RecordedOperation:
    """A replacement of a compiled operation. Each use of its address adds its name, and the values that it was made
    for, to SIGNATURES.
    """

    def __init__(self, function: Callable[..., None]) -> None:
        made_for = [str(cell.cell_contents) for cell in function.__closure__ or ()]
        self._name = f"{function.__module__.rpartition('.')[2]}.{function.__name__}({', '.join(made_for)})"

    @property
    def address(self) -> int:
        SIGNATURES.add(self._name)
        return 0


def signatures_of(call: Callable[[torch.dtype], None]) -> list[str]:
    """The signatures of the kernels that a function calls with pools of both dtypes."""
    SIGNATURES.clear()
    for dtype in (torch.float32, torch.bfloat16):
        call(dtype)
    return sorted(SIGNATURES)


def found_with(name: str) -> list[list[str]]:
    """The signatures of the two parts of the warm-up, and of requests. Each instruction set needs a process of its own,
    because modules look at the CPU when they are imported.
    """
    compiled._config.CPU_FEATURES = features_of(name)
    # Nothing has imported the kernels yet, so they are all decorated with `record`.
    assert "loramux.kernels.cpu.kernels" not in sys.modules
    compiled.kernel = record
    compiled.operation = RecordedOperation
    amx = importlib.import_module("loramux.kernels.cpu.instructions.amx")
    # Linux would refuse permission to use tiles that this CPU lacks.
    amx.has_amx = lambda: "amx-bf16" in compiled.cpu_features()  # type: ignore[attr-defined]
    # On ARM, oneDNN would multiply by bfloat16 weights.
    platform.machine = lambda: "x86_64"
    # No kernel writes outputs, and some callers read them.
    torch.empty = torch.zeros
    warm = importlib.import_module("loramux.kernels.cpu.warm")
    requests = importlib.import_module("tests.kernels.cpu.every_request")
    calls = (warm.warm_adapters, warm.warm_base, requests.call_every_kernel)
    return [signatures_of(call) for call in calls]


def main(names: list[str]) -> None:
    # Forked processes need not import torch and numba again.
    with multiprocessing.get_context("fork").Pool(1, maxtasksperchild=1) as processes:
        print(json.dumps(dict(zip(names, processes.map(found_with, names, chunksize=1), strict=True))))


if __name__ == "__main__":
    main(sys.argv[1:])
