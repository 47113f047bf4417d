"""Prints the runs that a GPU owes this repository, in order: `make gpu-plan`, or `python -m benchmarks.gpu.plan`.

Each run is one command of at most eight minutes, with a rehearsal that needs no GPU and a statement of what a card must
show. A run is done if its result for the card is committed, and neither the run nor the code that it measures has
changed since the commit that was measured. `--wheels` also prints the size of the packages that a run needs beside
torch and Triton, as wheels would compress them. `decisions.md` lists what earlier runs decided.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import re
import subprocess
import sys
import zlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement

from benchmarks.gpu.cards import PLANNED

ROOT = Path(__file__).parents[2]
MAX_MINUTES = 8
PROVIDED = ("torch", "triton")
"""Packages that a GPU's machine already has, with everything that only they require."""

KERNELS = ("numba", "numpy", "safetensors", "msgspec")
TESTS = (*KERNELS, "transformers", "peft", "pytest", "hypothesis")
PRODUCT = ("loramux",)
HERE = "PYTHONPATH=.src python -m"
"""Runs a module of a checkout on a machine on which loramux is not installed."""

VLLM_MIB, VLLM_PARTS = 196, 7
"""Size of vLLM 0.24.0's parts in MiB, and their number, as `vllm_parts.py` cut them for Python 3.11."""


_GPU_CODE = ("kernels/gpu", "engine/decoder", "engine/execution", "engine/device")
_SHARED = ("benchmarks/gpu/bench.py", "benchmarks/gpu/engine.py", "benchmarks/gpu/model.py")


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """One command for a GPU. `{card}` stands for the card's name in `command`, `rehearsals` and `result`.

    `result` is a file in `benchmarks/results`, or empty for a run without figures, which every new card repeats. `part`
    is the part of the file that the run fills, or empty if the file has only one. `paths` are the files
    and folders whose changes make an older result obsolete. `packages` are needed beside torch and Triton. `before`
    says what must be done first, and `parts_mib` is the size of what it brings to the card's machine.
    """

    name: str
    minutes: int
    shows: str
    command: str
    rehearsals: tuple[str, ...]
    result: str
    paths: tuple[str, ...]
    part: str = ""
    packages: tuple[str, ...] = KERNELS
    before: tuple[str, ...] = ()
    parts_mib: float = 0.0


def _part(name: str, minutes: int, shows: str, paths: tuple[str, ...]) -> Run:
    """A part of `benchmarks.gpu`, which runs alone."""
    return Run(
        name=name,
        minutes=minutes,
        shows=shows,
        command=f"{HERE} benchmarks.gpu --only {name} --out build/gpu-{{card}}.json",
        rehearsals=(
            f"python -m benchmarks.gpu --dry-run --card {{card}} --only {name}",
            f"TRITON_INTERPRET=1 python -m benchmarks.gpu --check-only --tiny --only {name}",
        ),
        result="gpu-{card}.json",
        part=name,
        paths=(*paths, *_SHARED, f"benchmarks/gpu/{name}.py"),
    )


def _trace(name: str, minutes: int, shows: str, result: str, options: str = "") -> Run:
    """Traces of whole steps. `options` choose the model and the contexts."""
    arguments = f"benchmarks.gpu.kernel_times{options}"
    return Run(
        name=name,
        minutes=minutes,
        shows=shows,
        command=f"{HERE} {arguments} --out build/{result}",
        rehearsals=(
            f"python -m {arguments} --dry-run {{card}}",
            f"TRITON_INTERPRET=1 python -m {arguments} --tiny",
        ),
        result=result,
        paths=(*_GPU_CODE, *_SHARED, "benchmarks/gpu/kernel_times.py"),
    )


RUNS = (
    Run(
        name="tests",
        minutes=8,
        shows="every kernel equals its reference, and the engine's answers equal those of transformers and peft",
        command=f"{HERE} tests.gpu --out build/gpu-tests-{{card}}",
        rehearsals=("python -m tests.gpu --interpret --out build/gpu",),
        result="",
        paths=("kernels/gpu", "engine/device", "tests/kernels/gpu", "tests/gpu"),
        packages=TESTS,
    ),
    Run(
        name="workers",
        minutes=2,
        shows="NCCL's exchanges of a single worker are captured and replayed; two workers on one card, over gloo, "
        "choose the tokens of one worker",
        command=f"{HERE} tests.gpu --only workers --out build/gpu-workers-{{card}}",
        rehearsals=("python -m tests.gpu --interpret --only workers --out build/gpu",),
        result="",
        paths=("engine/parallel", "engine/device", "engine/execution"),
        packages=TESTS,
    ),
    _trace(
        "trace",
        2,
        "microseconds of each kernel of a decode and of a prefill; in a prefill, the expand at most 6 ms (H100)",
        "gpu-trace-{card}.json",
    ),
    _part(
        "prefill",
        4,
        "`over_base` of one adapter at most 1.15, since the base adds to the adapters; FP8 weights with FP8 inputs "
        "faster than bfloat16",
        _GPU_CODE,
    ),
    _part(
        "step",
        4,
        "`over_base` at most 1.15 at 64 rows with 16 adapters; `over_floor` at most 1.25; `idle` at most 0.05",
        _GPU_CODE,
    ),
    _part(
        "attention",
        2,
        "decode at most 1.1 times its floor; with K and V in int8, `over_16_bits` of 64 sequences of 8,192 tokens at "
        "most 0.67; prefill on contiguous K and V at most 1.05 times as long as SDPA, and on gathered pages shorter "
        "than on pages, or MIN_PAIRS_PER_KEY rises",
        ("kernels/gpu/attention.py", "kernels/gpu/attention_plan.py", "kernels/gpu/contiguous_attention.py"),
    ),
    _part("lora", 4, "`over_budget` at most 1; no case slower than before", ("kernels/gpu",)),
    _part("s_lora", 6, "`over_fewest` at least 0.955 with 2,000 adapters", _GPU_CODE),
    _part(
        "s_lora_fp8",
        4,
        "with `adapter_dtype` fp8, `over_fewest` at least 0.98 with 2,000 adapters",
        (*_GPU_CODE, "benchmarks/gpu/s_lora.py"),
    ),
    _trace(
        "context",
        4,
        "attention of a prefill of 8,192 and 32,768 tokens, and of decodes at these contexts; 16 adapters at most 10 %",
        "gpu-trace-long-{card}.json",
        " --long",
    ),
    _part(
        "fused",
        3,
        "with `fused_lora`, `over_base` at 64 rows at most 1.10 with 16 adapters of rank 16, at most 1.25 with 64",
        (*_GPU_CODE, "benchmarks/gpu/step.py"),
    ),
    Run(
        name="serving",
        minutes=8,
        shows="p99 of the first token at 30 % of capacity at most twice that at 60 %; the warm-up at most 30 s",
        command="python -m benchmarks.serving --out build/serving-{card}.json",
        rehearsals=("pytest tests/benchmarks/serving/test_serving.py",),
        result="serving-{card}.json",
        paths=("benchmarks/serving", "engine/loop", *_GPU_CODE),
        packages=PRODUCT,
    ),
    dataclasses.replace(
        _part(
            "cold",
            4,
            "first token of a cold adapter minus a warm one, by rank and by tier; the storm's p99 at most 1.1 times",
            (*_GPU_CODE, "engine/adapters", "adapter_store/tiers", "benchmarks/tenants/cold_storm.py"),
        ),
        packages=(*KERNELS, "rich"),
    ),
    _trace(
        "mixture",
        5,
        "products of experts in a prefill of Qwen3-30B-A3B at most 20 ms; decodes no slower than before",
        "gpu-trace-qwen3-{card}.json",
        " --model qwen3-30b-a3b",
    ),
    _part("codes", 3, "products with codes at most as long as in bfloat16 up to 64 rows", ("kernels/gpu",)),
    _trace(
        "hybrid",
        3,
        "`_prepare_chunks` and `_apply_chunks` in a prefill of 2,048 tokens of Qwen3.5-9B together at most 5 ms",
        "gpu-trace-qwen3.5-{card}.json",
        " --model qwen3.5-9b",
    ),
    dataclasses.replace(
        _part(
            "peer",
            8,
            "`over_loramux` of vLLM 0.24.0, with the same weights: a decode of 64 and a prefill of 16 x 128 tokens",
            (*_GPU_CODE, "benchmarks/gpu/vllm_child.py", "benchmarks/gpu/step.py"),
        ),
        command=f"{HERE} benchmarks.gpu --only peer --peers /tmp/vllm/peer --out build/gpu-{{card}}.json",
        rehearsals=(
            "python -m benchmarks.gpu.vllm_calls rehearse build/vllm build/machine",
            "python -m benchmarks.gpu.vllm_parts check build/machine/stage/peer",
            "python -m benchmarks.gpu --dry-run --card {card} --only peer",
            "TRITON_INTERPRET=1 python -m benchmarks.gpu --check-only --tiny --only peer",
        ),
        before=(
            "VENV/bin/python -m benchmarks.gpu.vllm_parts cut build/vllm, with the Python of the card's machine",
            f"{VLLM_PARTS} calls of up to 64 MiB with one part each, and a last one with the run: "
            "python -m benchmarks.gpu.vllm_calls list build/vllm --run '...'",
        ),
        parts_mib=VLLM_MIB,
    ),
)
"""Runs in the order in which a card returns most: the trace; what changed since the last card; the prototype; whole
servers and cold adapters; mixtures and quantised weights, which need an H200's memory; hybrids; the peer.
"""

DONE, OPEN = "done", "open"


def git(*arguments: str) -> str | None:
    """What a git command prints in this checkout, or None if it fails."""
    done = subprocess.run(["git", "-C", str(ROOT), *arguments], capture_output=True, text=True, check=False)
    return done.stdout.strip() if done.returncode == 0 else None


def state_of(run: Run, card: str, git: Callable[..., str | None] = git, root: Path = ROOT) -> str:
    """DONE, or OPEN with the reason."""
    if not run.result:
        return f"{OPEN}: first, whenever a card is at hand"
    path = Path("benchmarks/results") / run.result.format(card=card)
    try:
        document = json.loads((root / path).read_text())
    except (OSError, ValueError):
        return f"{OPEN}: no result"
    if not git("ls-files", "--", str(path)):
        return f"{OPEN}: {path} is not committed"
    problem = _problem(document, run.part)
    if problem:
        return f"{OPEN}: {problem}"
    measured = re.match(r"[0-9a-f]{7,40}", str(document.get("machine", {}).get("commit", "")))
    if measured is None:
        return f"{OPEN}: {path} does not name the commit that was measured"
    changes = git("diff", "--stat", "--relative", measured[0], "HEAD", "--", *run.paths)
    if changes is None:
        return f"{OPEN}: the measured commit {measured[0]} is not in this repository"
    if changes:
        return f"{OPEN}: changed since {measured[0][:8]} ({changes.splitlines()[-1].strip()})"
    return DONE


def _problem(document: dict[str, Any], part: str) -> str:
    """Why a result does not count, or an empty string."""
    if not part:
        return ""
    found = document.get("parts", {}).get(part)
    if found is None:
        return f"the result has no part {part}"
    return "the result is of a failed run" if found.get("is_failed") else ""


def required(roots: Iterable[str]) -> list[str]:
    """The installed packages that `roots` require, including themselves but not loramux, torch and Triton."""
    found: dict[str, None] = {}
    left = list(roots)
    while left:
        name = left.pop()
        key = re.sub(r"[-_.]+", "-", name).lower()
        if key in found or key in PROVIDED:
            continue
        try:
            needs = distribution(name).requires or []
        except PackageNotFoundError:
            continue
        found[key] = None
        for need in map(Requirement, needs):
            if need.marker is None or need.marker.evaluate({"extra": ""}):
                left.append(need.name)
    return sorted(key for key in found if key != "loramux")


def wheel_mib(name: str) -> float:
    """Size of an installed package in MiB, compressed like a wheel."""
    total = 0
    for file in distribution(name).files or ():
        path = Path(str(file.locate()))
        if path.suffix != ".pyc" and path.is_file():
            total += len(zlib.compress(path.read_bytes()))
    return total / 2**20


def lines_of(card: str, runs: Sequence[Run], states: Sequence[str], wheels: dict[str, float] | None) -> list[str]:
    """The plan as text. `wheels` maps packages to MiB, or is None."""
    lines = [f"Runs for one {PLANNED[card].card.name}, in this order:", ""]
    for run, state in zip(runs, states, strict=True):
        lines.append(f"[{'x' if state == DONE else ' '}] {run.name}, {run.minutes} min: {run.shows}")
        if state != DONE:
            lines.append(f"      {state}")
            lines += [f"      before:   {one}" for one in run.before]
            lines += [f"      rehearse: {one.format(card=card)}" for one in run.rehearsals]
            lines.append(f"      run:      {run.command.format(card=card)}")
        if wheels is not None:
            names = required(run.packages)
            total = f"{sum(wheels[name] for name in names):.0f} MiB ({len(names)} packages)"
            lines.append(f"      wheels:   {total}" + (f", and {run.parts_mib:.0f} MiB of parts" * bool(run.parts_mib)))
    open_runs = [run for run, state in zip(runs, states, strict=True) if state != DONE]
    total = sum(run.minutes for run in open_runs)
    lines += ["", f"{len(open_runs)} of {len(runs)} runs are open, {total} minutes. Commit files of build/ to"]
    lines.append("benchmarks/results/ unless a check failed; benchmarks/gpu/decisions.md lists what they decide.")
    return lines


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.gpu.plan", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--card", choices=PLANNED, default="h100", help="the card at hand (%(default)s)")
    parser.add_argument("--wheels", action="store_true", help="also add up the packages that each run needs")
    arguments = parser.parse_args()
    if git("rev-parse", "HEAD") is None:
        print("benchmarks.gpu.plan: this is not a git checkout, so nothing says which results are current")
        return 2
    wheels = None
    if arguments.wheels:
        names = {name for run in RUNS for name in required(run.packages)}
        wheels = {name: wheel_mib(name) for name in sorted(names)}
    states = [state_of(run, arguments.card) for run in RUNS]
    print("\n".join(lines_of(arguments.card, RUNS, states, wheels)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
