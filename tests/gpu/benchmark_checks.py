"""Run the benchmark's checks after compiling in parallel processes: `python -m tests.gpu.benchmark_checks`.

`--interpret` checks the small model in Triton's interpreter. Other arguments are passed to the benchmark.
"""

from __future__ import annotations

import os
import subprocess
import sys

from benchmarks.gpu import __main__ as gpu
from benchmarks.gpu.parts import PARTS


def main() -> int:
    arguments = ["--check-only", *(argument for argument in sys.argv[1:] if argument != "--interpret")]
    if "--interpret" in sys.argv:
        arguments.append("--tiny")
    else:
        arguments.append("--quick")
        parsed = gpu.parse(arguments)
        gpu.warm_up([part for part in PARTS if part.name in parsed.only], parsed)
    return subprocess.run([sys.executable, "-m", "benchmarks.gpu", *arguments], env=os.environ, check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
