"""The instruction sets that the CPU kernels distinguish, and processes that see a CPU with only one of them.

As a program, it runs the tests of the CPU kernels once for each set that this CPU has. AMX is emulated on another CPU
with AVX512_BF16.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile

from loramux.kernels.cpu.instructions.capability import host_features

AVX512 = ("avx2", "avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl")

INSTRUCTION_SETS: dict[str, tuple[str, ...]] = {
    "no-avx2": (),
    "avx2": ("avx2",),
    "avx-vnni": ("avx2", "avxvnni"),
    "avx512": AVX512,
    "avx512-vnni": (*AVX512, "avx512vnni"),
    "avx512-bf16": (*AVX512, "avx512vnni", "avx512bf16"),
    "amx": (*AVX512, "avx512vnni", "avx512bf16", "amx-tile", "amx-int8", "amx-bf16"),
}
"""LLVM's names for the vector instructions of each kind of CPU."""

_VECTORS = ("avx2", "avx512", "avx10", "avxvnni", "avxifma", "avxneconvert", "amx", "vaes", "vpclmulqdq")
"""Prefixes of the features that an imitated CPU lacks, unless its instruction set includes them. LLVM would derive AVX2
from some of the others.
"""


def runs_here(name: str) -> bool:
    """True if this CPU has every instruction of the set."""
    return host_features().issuperset(INSTRUCTION_SETS[name])


def features_of(name: str) -> str:
    """The instruction set, and the features of this CPU that are not vector instructions, as numba expects them."""
    others = {feature for feature in host_features() if not feature.startswith(_VECTORS)}
    lacking = {feature for feature in host_features() if feature.startswith(_VECTORS)} - {*INSTRUCTION_SETS[name]}
    there = sorted(others | {*INSTRUCTION_SETS[name]})
    return ",".join([*(f"-{feature}" for feature in sorted(lacking)), *(f"+{feature}" for feature in there)])


def imitate(name: str) -> dict[str, str]:
    """The environment of a process whose kernels are compiled for one instruction set."""
    return {"NUMBA_CPU_NAME": "generic", "NUMBA_CPU_FEATURES": features_of(name)}


def run_python(*arguments: str, **environment: str) -> str:
    """The output of a new Python process, with additions to the environment of this one."""
    everything = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path), **environment}
    done = subprocess.run([sys.executable, *arguments], stdout=subprocess.PIPE, text=True, env=everything, check=True)
    return done.stdout


TESTS = (
    "tests/kernels", "--ignore=tests/kernels/gpu", "-k", "not gpu", "-p", "no:cacheprovider", "--timeout=3600",
    "--deselect=tests/kernels/test_dispatch.py::test_compiled_code_is_stored_in_the_cache_directory",
)  # fmt: skip
"""Arguments of pytest. The last test checks the cache directory, which emulated kernels must not share."""


def command_of(name: str) -> list[str] | None:
    """The command that runs the tests with an instruction set, or None if this CPU cannot run them."""
    if runs_here(name):
        return ["-m", "pytest", *TESTS]
    if name == "amx" and runs_here("avx512-bf16"):
        return ["-m", "tests.kernels.cpu.emulated_tiles", "test", *TESTS]
    return None


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="tests.kernels.cpu.instruction_sets", description=__doc__)
    parser.add_argument("--only", nargs="+", choices=INSTRUCTION_SETS, default=list(INSTRUCTION_SETS), metavar="SET")
    chosen, for_pytest = parser.parse_known_args(arguments)
    failed = []
    for name in chosen.only:
        command = command_of(name)
        print(f"== {name}: {'this CPU lacks it' if command is None else ' '.join(command)}", flush=True)
        if command is not None:
            with tempfile.TemporaryDirectory() as cache:
                environment = {**os.environ, **imitate(name), "NUMBA_CACHE_DIR": cache}
                done = subprocess.run([sys.executable, *command, *for_pytest], env=environment, check=False)
            failed += [name] if done.returncode else []
    print(f"== failed: {', '.join(failed) or 'none'}")
    return len(failed)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
