from __future__ import annotations

import importlib
import json
import os
import shutil
import sys
from importlib import metadata

import torch

from benchmarks.gpu.machine import describe
from benchmarks.gpu.plan import PROVIDED, TESTS
from loramux.engine.device.cuda_driver import missing_for_cuda
from loramux.kernels.gpu.capability import MIN_CAPABILITY

NEEDED = (*PROVIDED, *TESTS)
TOOLS = ("compute-sanitizer", "ncu", "nvcc", "nvidia-smi")


def problems(is_interpreted: bool) -> list[str]:
    found = []
    for name in NEEDED:
        try:
            importlib.import_module(name)
        except ImportError as error:
            found.append(f"{name} cannot be imported: {error}")
    if is_interpreted:
        return found
    missing = missing_for_cuda()
    if missing is not None:
        return [*found, missing]
    capability = torch.cuda.get_device_capability()
    if capability < MIN_CAPABILITY:
        found.append(f"the GPU has compute capability {capability}, and the kernels need {MIN_CAPABILITY}")
    return found


def main() -> int:
    machine = describe()
    for name in ("transformers", "peft", "pytest", "prometheus-client"):
        try:
            machine[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            machine[name] = "absent"
    machine |= {tool: shutil.which(tool) or "absent" for tool in TOOLS}
    machine["cores"] = len(os.sched_getaffinity(0))
    print(json.dumps(machine, indent=2), flush=True)
    found = problems(os.environ.get("TRITON_INTERPRET") == "1")
    print("\n".join(found), file=sys.stderr)
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
