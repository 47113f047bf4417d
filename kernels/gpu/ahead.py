"""Compile a GPU's programs before they are launched, in parallel processes (`python -m loramux.kernels.gpu.ahead`).

Triton compiles a program at its first launch, one after the other. Here launches are recorded instead of made, and the
programs that they need are compiled into Triton's cache on disk, where the launches after that find them. A recorded
launch has gone through all of Triton that names a program, so that both look under the same name.

The cache is the folder that `TRITON_CACHE_DIR` names. No GPU is needed. The engine compiles ahead before its warm-up,
and `tests/engine/execution/test_compile_ahead.py` compares the names.
"""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import triton
import triton.language as tl
from triton import knobs
from triton._C.libtriton import get_cache_invalidating_env_vars
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, make_backend
from triton.runtime.cache import get_cache_key, get_cache_manager

MAX_PROCESSES = 16
"""Processes that compile at a time; each holds a torch and a Triton of its own in memory."""

COMMAND = (sys.executable, "-m", "loramux.kernels.gpu.ahead")
"""Compiles the programs of its standard input, one a line."""


@dataclass(frozen=True, slots=True)
class Program:
    """A kernel with everything that it is compiled for."""

    source: ASTSource
    target: GPUTarget
    options: dict[str, Any]

    @staticmethod
    def parse(line: str) -> Program:
        """Read what Triton calls specialization data.

        `JITFunction.preload` reads it too, but leaves constants that are tuples as lists, which name another program.
        """
        said = json.loads(line)
        module, _, name = said["name"].rpartition(".")
        constants = zip(said["constant_keys"], said["constant_vals"], strict=True)
        attributes = zip(said["attrs_keys"], said["attrs_vals"], strict=True)
        source = ASTSource(
            fn=getattr(import_module(module), name),
            signature={name: _tuples(kind) for name, kind in said["signature"].items()},
            constexprs={tuple(path): _constant(value) for path, value in constants},
            attrs={tuple(path): value for path, value in attributes},
        )
        options = {name: _tuples(value) for name, value in said["options"].items()}
        return Program(source, GPUTarget(**said["target"]), options)

    def is_cached(self) -> bool:
        """Whether Triton's cache on disk has it."""
        backend = make_backend(self.target)
        options = backend.parse_options(self.options)
        key = get_cache_key(self.source, backend, options, env_vars=get_cache_invalidating_env_vars())
        cache = get_cache_manager(hashlib.sha256(key.encode()).hexdigest())
        return cache.get_group(f"{self.source.name[:150]}.json") is not None

    def compile(self) -> None:
        """Have it in Triton's cache; needs no GPU."""
        triton.compile(self.source, target=self.target, options=self.options)


def _constant(value: Any) -> Any:
    """Triton writes a dtype as its name; no kernel has strings as constants."""
    return tl.dtype(value) if isinstance(value, str) else _tuples(value)


def _tuples(value: Any) -> Any:
    """JSON knows lists only, and Triton's constants are never lists."""
    return tuple(_tuples(one) for one in value) if isinstance(value, list) else value


@contextmanager
def recorded_programs() -> Iterator[list[str]]:
    """Collect, a line each, the programs that launches need and this process has not loaded; these are not launched."""
    lines: dict[str, None] = {}

    def record(**said: Any) -> bool:
        lines[said["compile"]["specialization_data"]] = None
        # Triton takes this for "do not compile", and then has nothing to launch.
        return True

    programs: list[str] = []
    previous, knobs.runtime.jit_cache_hook = knobs.runtime.jit_cache_hook, record
    try:
        yield programs
    finally:
        knobs.runtime.jit_cache_hook = previous
        programs += lines


def compile_ahead(launch: Callable[[], None], num_processes: int, command: Sequence[str] = COMMAND) -> None:
    """Compile in parallel what `launch` would launch and Triton's cache lacks.

    Meanwhile `launch` launches at most programs that this process has loaded before. A program that is not compiled
    here, because a process died or refused, is compiled at its first launch. One line on standard error says so, one
    says what is done.
    """
    with recorded_programs() as lines:
        launch()
    missing = [line for line in lines if not Program.parse(line).is_cached()]
    num_processes = min(num_processes, MAX_PROCESSES, len(missing))
    if num_processes < 2:
        return
    begin = time.perf_counter()
    _say(f"compiling {len(missing)} of {len(lines)} GPU programs in {num_processes} processes, into {knobs.cache.dir}")
    failures = compile_in_processes(missing, num_processes, command)
    if failures:
        _say(
            f"{len(failures)} of {num_processes} compiling processes failed, "
            f"the engine compiles what is missing: {failures[0]}"
        )
    _say(f"compiling ahead took {time.perf_counter() - begin:.1f} s")


def compile_in_processes(lines: Sequence[str], num_processes: int, command: Sequence[str] = COMMAND) -> list[str]:
    """Share programs out to as many processes and wait for all; returns how each one that failed ended."""

    def run(share: Sequence[str]) -> str | None:
        try:
            done = subprocess.run(  # noqa: S603  our own module
                command, input="".join(f"{line}\n" for line in share), capture_output=True, text=True, check=False
            )
        except OSError as error:
            return str(error)
        last = done.stderr.strip().rpartition("\n")[2]
        return f"exit code {done.returncode}: {last}" if done.returncode else None

    # Programs of one kernel, which take about as long as each other, were recorded together.
    shares = [lines[first::num_processes] for first in range(num_processes)]
    with ThreadPoolExecutor(num_processes) as waiting:
        return [failure for failure in waiting.map(run, shares) if failure is not None]


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def main() -> None:
    """Compile the programs of standard input. One that cannot be compiled stops no other; the exit code is then 1."""
    engine = os.getppid()
    failed = None
    for line in sys.stdin.read().splitlines():
        if os.getppid() != engine:
            # The engine has died; nobody waits for the rest.
            return
        try:
            Program.parse(line).compile()
        except Exception as error:
            failed = error
    if failed is not None:
        sys.exit(f"{type(failed).__name__}: {str(failed).strip().splitlines()[-1] if str(failed) else ''}")


if __name__ == "__main__":
    main()
