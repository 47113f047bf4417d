"""Compiles GPU programs in parallel processes before they are launched (`python -m loramux.kernels.gpu.ahead`).

By default, Triton compiles programs one after another, each at its first launch. This module records launches instead
of executing them, and compiles the programs that they need into Triton's cache on disk, where later launches find them.
A recorded launch runs all of Triton's code that determines a program's cache key, so the keys match.

The cache is in `TRITON_CACHE_DIR`, or in `~/.triton/cache` by default. Compiling needs no GPU. The engine compiles
ahead before its warm-up, and `tests/engine/execution/test_compile_ahead.py` compares the keys.
"""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

import triton
import triton.language as tl
from triton import knobs
from triton._C.libtriton import get_cache_invalidating_env_vars
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, make_backend
from triton.runtime import driver
from triton.runtime.cache import get_cache_key, get_cache_manager

MAX_PROCESSES = 16
"""Maximum number of parallel compile processes. Each has its own copy of torch and Triton in memory."""

GROUP_PREFIX = "__grp__"
"""Start of the name of the file in which Triton lists a program's files."""

COMMAND = (sys.executable, "-m", "loramux.kernels.gpu.ahead")
"""Command that compiles the programs listed on its standard input, one per line."""


@dataclass(frozen=True, slots=True)
class Program:
    """A kernel, with everything that its compilation depends on."""

    source: ASTSource
    target: GPUTarget
    options: dict[str, Any]

    @staticmethod
    def parse(line: str) -> Program:
        """Parse a recorded line: Triton's specialization data, with the target.

        `JITFunction.preload` also parses specialization data, but leaves tuple constants as lists, which changes the
        cache key.
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
        """True if the program is in Triton's cache on disk."""
        backend = make_backend(self.target)
        options = backend.parse_options(self.options)
        key = get_cache_key(self.source, backend, options, env_vars=get_cache_invalidating_env_vars())
        cache = get_cache_manager(hashlib.sha256(key.encode()).hexdigest())
        return cache.get_group(f"{self.source.name[:150]}.json") is not None

    def compile(self) -> None:
        """Compile the program into Triton's cache. This needs no GPU."""
        triton.compile(self.source, target=self.target, options=self.options)


def _constant(value: Any) -> Any:
    """Parse a constant: Triton writes a dtype as its name, and no kernel has string constants."""
    return tl.dtype(value) if isinstance(value, str) else _tuples(value)


def _tuples(value: Any) -> Any:
    """Turn lists back into tuples, which JSON lacks. Triton's constants are never lists."""
    return tuple(_tuples(one) for one in value) if isinstance(value, list) else value


@contextmanager
def recorded_programs() -> Iterator[list[str]]:
    """Record programs that are not loaded yet, one per line, instead of compiling and launching them."""
    lines: dict[str, None] = {}

    def record(**said: Any) -> bool:
        program = json.loads(said["compile"]["specialization_data"])
        # The specialization data of Triton 3.6 does not include the target.
        program.setdefault("target", vars(driver.active.get_current_target()))
        lines[json.dumps(program)] = None
        # True tells Triton not to compile, so it has nothing to launch.
        return True

    programs: list[str] = []
    previous, knobs.runtime.jit_cache_hook = knobs.runtime.jit_cache_hook, record
    try:
        yield programs
    finally:
        knobs.runtime.jit_cache_hook = previous
        programs += lines


def compile_ahead(launch: Callable[[], None], num_processes: int, command: Sequence[str] = COMMAND) -> None:
    """Compile, in parallel, all programs that `launch` needs and that are not in Triton's cache.

    `launch` is called once and executes only programs that this process has already loaded. If
    `num_processes` is 1 or only one program is missing, nothing is compiled ahead. Programs that are not compiled
    ahead, for example because a process died, are compiled at their first launch. Progress and failures are reported on
    standard error.
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
            f"{len(failures)} of {num_processes} compile processes failed ({failures[0]}); "
            "the engine will compile the missing programs"
        )
    _say(f"compiling ahead took {time.perf_counter() - begin:.1f} s")


def compile_in_processes(lines: Sequence[str], num_processes: int, command: Sequence[str] = COMMAND) -> list[str]:
    """Divide programs among `num_processes` processes and wait for all of them. Return one line per failed process."""

    def run(share: Sequence[str]) -> str | None:
        try:
            done = subprocess.run(  # noqa: S603  our own module
                command, input="".join(f"{line}\n" for line in share), capture_output=True, text=True, check=False
            )
        except OSError as error:
            return str(error)
        last = done.stderr.strip().rpartition("\n")[2]
        return f"exit code {done.returncode}: {last}" if done.returncode else None

    # One kernel's programs take similar times to compile and are recorded together, so distribute them round-robin.
    shares = [lines[first::num_processes] for first in range(num_processes)]
    with ThreadPoolExecutor(num_processes) as waiting:
        return [failure for failure in waiting.map(run, shares) if failure is not None]


@contextmanager
def reported_programs() -> Iterator[None]:
    """Report, on standard error, how long the launches in this context took, and which programs they compiled because
    these had not been compiled ahead.
    """
    begin, known = time.perf_counter(), _cached()
    yield
    line = f"loading GPU programs and capturing graphs took {time.perf_counter() - begin:.1f} s"
    names = Counter(
        path.stem
        for directory in sorted(_cached() - known)
        for path in directory.glob("*.json")
        if not path.name.startswith(GROUP_PREFIX)
    )
    if names:
        line += f"; {names.total()} programs had not been compiled ahead: "
        line += ", ".join(f"{name} ({count})" for name, count in sorted(names.items()))
    _say(line)


def _cached() -> set[Path]:
    """The directories of the programs in Triton's cache."""
    return set(Path(knobs.cache.dir).glob("*"))


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def main() -> None:
    """Compile the programs on standard input. If one fails, the rest are still compiled, but the exit code is 1."""
    engine = os.getppid()
    failed = None
    for line in sys.stdin.read().splitlines():
        if os.getppid() != engine:
            # The engine has died, so nothing needs the remaining programs.
            return
        try:
            Program.parse(line).compile()
        except Exception as error:
            failed = error
    if failed is not None:
        sys.exit(f"{type(failed).__name__}: {str(failed).strip().splitlines()[-1] if str(failed) else ''}")


if __name__ == "__main__":
    main()
