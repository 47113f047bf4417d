"""Run everything that needs a GPU within nine minutes. `--interpret` rehearses it on a CPU.

Run it from the repository root: `PYTHONPATH=.src python -m tests.gpu --out DIR`. The packages that it needs are in
`versions.NEEDED`. Each stage runs in its own processes, has a time limit, and writes a result file with its processes'
output. A failed stage does not stop the next one. The exit code is 1 if a stage failed, was stopped or was skipped, and
2 if this machine cannot run any stage.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from loramux.engine.device.cuda_driver import missing_for_cuda
from tests.gpu.processes import run_at_once
from tests.gpu.reports import left_out, result_of, table
from tests.gpu.stages import STAGES, Setting, Stage

ROOT = Path(__file__).parents[2]
TOTAL_S = 530.0
MAX_PROCESSES = 12
GOOD = ("passed", "tool absent")
SHOWN_LINES = 12
"""Number of output lines to print for a failed process, counted from the end. The result file has more."""


def parse(arguments: list[str]) -> argparse.Namespace:
    names = [stage.name for stage in STAGES]
    parser = argparse.ArgumentParser(
        prog="tests.gpu", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", nargs="+", choices=names, default=names, metavar="STAGE", help=", ".join(names))
    parser.add_argument(
        "--out", type=Path, default=ROOT / "build" / "gpu", help="directory for the result files (%(default)s)"
    )
    parser.add_argument("--seconds", type=float, default=TOTAL_S, help="seconds for all chosen stages (%(default)s)")
    parser.add_argument("--processes", type=int, help="number of processes that share a stage's tests")
    parser.add_argument(
        "--select", default="", help="run only these tests of kernels and engine (a pytest -k expression)"
    )
    parser.add_argument("--campaign", action="store_true", help="run the long tests too")
    parser.add_argument("--interpret", action="store_true", help="rehearse on the CPU, in Triton's interpreter")
    return parser.parse_args(arguments)


def environment_of(is_interpreted: bool) -> dict[str, str]:
    """Every stage's environment: this checkout, and a pytest configuration that allows any versions and plugins."""
    paths = [str(ROOT / ".src"), str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    configuration = [
        "-c",
        str(ROOT / "tests" / "gpu" / "any_versions.ini"),
        "--rootdir",
        str(ROOT),
        "--confcutdir",
        str(ROOT),
    ]
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join(paths),
        "PYTHONUNBUFFERED": "1",
        "PYTEST_ADDOPTS": shlex.join(configuration),
        "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
    }
    environment.pop("TRITON_INTERPRET", None)
    if is_interpreted:
        environment |= {"TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""}
    return environment


def run_stage(stage: Stage, arguments: argparse.Namespace, num_processes: int, limit_s: float) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(prefix="loramux-gpu-") as scratch:
        setting = Setting(
            is_interpreted=arguments.interpret,
            num_processes=num_processes,
            select=arguments.select,
            marks="campaign or not campaign" if arguments.campaign else "not campaign",
            scratch=Path(scratch),
        )
        plan = stage.plan(setting)
        environment = environment_of(arguments.interpret) | plan.environment
        started = time.monotonic()
        ended = run_at_once(plan.commands, setting.scratch, environment, ROOT, limit_s)
        return result_of(stage.name, time.monotonic() - started, ended, plan.note, setting.scratch)


def show(result: dict[str, Any]) -> None:
    print(f"{result['stage']}: {result['outcome']}, {result['seconds']} s, {result['summary']}", flush=True)
    if result["outcome"] in GOOD:
        return
    for number, one in enumerate(result["processes"]):
        if one["exit_code"] or one["was_stopped"]:
            lines = one["output"].splitlines()[-SHOWN_LINES:]
            print("\n".join(f"  {number}| {line}" for line in lines), flush=True)


def main() -> int:
    arguments = parse(sys.argv[1:])
    missing = None if arguments.interpret else missing_for_cuda()
    if missing is not None:
        remedy = missing.replace("--device cpu", "--interpret to rehearse on the CPU")
        print(f"tests.gpu: {remedy}", file=sys.stderr)
        return 2
    num_cores = len(os.sched_getaffinity(0))
    num_processes = arguments.processes or max(1, min(MAX_PROCESSES, num_cores - (2 if num_cores > 2 else 0)))
    arguments.out.mkdir(parents=True, exist_ok=True)
    ends_at = time.monotonic() + arguments.seconds
    chosen = [stage for stage in STAGES if stage.name in arguments.only]
    # If fewer stages run, each may take longer.
    stretch = max(1.0, arguments.seconds / sum(stage.limit_s for stage in chosen))
    results = []
    for number, stage in enumerate(STAGES, 1):
        if stage not in chosen:
            continue
        left_s = ends_at - time.monotonic()
        if left_s > 0:
            result = run_stage(stage, arguments, num_processes, min(stage.limit_s * stretch, left_s))
        else:
            result = left_out(stage.name)
        (arguments.out / f"{number}-{stage.name}.json").write_text(json.dumps(result, indent=1) + "\n")
        show(result)
        results.append(result)
    print(f"\n{table(results)}\n\nresult files: {arguments.out}", flush=True)
    return 0 if all(result["outcome"] in GOOD for result in results) else 1


if __name__ == "__main__":
    sys.exit(main())
