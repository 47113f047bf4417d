"""Compares loramux on an 8-bit or 4-bit base with llama-server on a base with the same number of bits, on a CPU.

llama-server serves a Q8_0 or Q4_0 file that llama.cpp's own quantiser writes. Sixteen greedy requests arrive together,
for the base only and for sixteen adapters. Before that, each server's answers on the small model, with K and V in
float32, are compared with peft's answers over a float32 copy of that server's own dequantised weights. loramux must
give the same tokens. llama-server rounds the inputs of its products to 8 bits, as loramux does with `--activations
int8`, so the number of equal answers is reported.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
from collections.abc import Sequence
from dataclasses import replace
from datetime import UTC, datetime
from functools import partial
from pathlib import Path

from rich.console import Console

from benchmarks.machine import add_allow_busy, busy_share, describe, require_idle
from benchmarks.peers.__main__ import LOADS, MIN_COLUMNS, exit_on_signal, load_of, positive
from benchmarks.peers.agreement import Agreement, CheckFailed, answers_of, compare, require_effect
from benchmarks.peers.figures import Goals, ratios, tokens_per_second
from benchmarks.peers.float_copies import llama_copy, own_copy
from benchmarks.peers.in_process import find_peft
from benchmarks.peers.llama_server import find_llama, locate_llama
from benchmarks.peers.loramux_server import open_loramux
from benchmarks.peers.measurement import MachineBusy, Measurement
from benchmarks.peers.model_files import ModelFiles, make_model_files
from benchmarks.peers.report import document, notes, ratio_table, speed_table
from benchmarks.peers.system import LORAMUX, Peer, System, SystemFailed
from benchmarks.peers.workload import BASE, DISTINCT
from benchmarks.random_model import SHAPES

FORMATS = {"int8": "Q8_0", "int4": "Q4_0"}
"""llama.cpp's format with the same number of bits as each `--quantization`."""

KINDS = (BASE, DISTINCT)
GOALS = Goals({BASE: 1.0, DISTINCT: 4.0}, {})

WORKLOAD = ("size", "quantization", "activations", "adapters", "rank", "repeats", "threads")
"""The arguments that are written to the result file under their own names."""

LEAST_SHARE = 0.25
"""Minimum share of answers that equal peft's if a server rounds inputs to 8 bits.

Rounding changes the choice between tokens of similar likelihood, which are frequent in a random model, but a wrong
model or adapter changes every answer.
"""


def main(argv: Sequence[str] | None = None) -> int:
    arguments = _parse(argv)
    console = Console()
    if not console.is_terminal:
        console.width = MIN_COLUMNS
    machine, busy_before = describe(), require_idle(arguments.allow_busy)
    logs = arguments.scratch.absolute() / "logs"
    llama = find_llama(os.environ, arguments.threads, logs, console.print, FORMATS[arguments.quantization])
    console.print(f"{llama.name}: {llama.missing or llama.version}")
    try:
        small = make_model_files(arguments.scratch, "small", arguments.adapters, arguments.rank)
        agreements = check(arguments, small, llama, logs, console)
        files = make_model_files(arguments.scratch, arguments.size, arguments.adapters, arguments.rank)
        systems = [own_system("bfloat16", arguments, logs), *(replace(one, kinds=KINDS) for one in llama.systems)]
        measurement = Measurement(files, systems, arguments.load, arguments.repeats, arguments.allow_busy, console)
        measurement.run(lambda: None)
    except (CheckFailed, SystemFailed, MachineBusy) as error:
        console.print(f"[red]{error}[/red]", highlight=False)
        return 1
    speeds = tokens_per_second(measurement.samples, files.num_adapters)
    console.print(speed_table(speeds, arguments.load, [llama]))
    own_speeds = tokens_per_second(measurement.own_samples, files.num_adapters)
    console.print(ratio_table(ratios(speeds, own_speeds, arguments.load, GOALS)))
    for note in notes([llama], agreements, measurement):
        console.print(f"[yellow]{note}[/yellow]", highlight=False)
    if arguments.out is not None:
        body = document([llama], agreements, measurement, arguments.load, GOALS)
        head = {
            "date": datetime.now(UTC).date().isoformat(),
            "workload": {
                **{name: getattr(arguments, name) for name in WORKLOAD},
                "loads": [str(load) for load in arguments.load],
            },
            "machine": machine,
            "is_busy_allowed": arguments.allow_busy,
            "busy_share": {"before": round(busy_before, 3), "after": round(busy_share(), 3)},
        }
        arguments.out.parent.mkdir(parents=True, exist_ok=True)
        arguments.out.write_text(json.dumps(head | body, indent=1) + "\n")
    return 0


def own_system(dtype: str, arguments: argparse.Namespace, logs: Path) -> System:
    opened = partial(
        open_loramux,
        dtype,
        arguments.threads,
        logs,
        quantization=arguments.quantization,
        activations=arguments.activations,
    )
    suffix = "" if arguments.activations is None else "-a8"
    return System(LORAMUX, dtype, KINDS, opened, arguments.quantization + suffix)


def check(
    arguments: argparse.Namespace, files: ModelFiles, llama: Peer, logs: Path, console: Console
) -> dict[str, Agreement]:
    """Each server's agreement with peft over a float copy of its own weights.

    Raises CheckFailed if any answer of loramux without `--activations int8` differs, or if more answers of a server
    with 8-bit inputs differ than rounding explains.
    """
    reference = find_peft(arguments.threads).systems[0]

    def agreement_of(system: System, copy: ModelFiles) -> Agreement:
        expected = answers_of(reference, copy, KINDS)
        require_effect(expected)
        agreement = compare(expected, answers_of(system, files, KINDS))
        console.print(f"  {system.name}: {agreement}")
        return agreement

    agreements = {
        LORAMUX: agreement_of(own_system("float32", arguments, logs), own_copy(files, arguments.quantization))
    }
    if arguments.activations is None and not agreements[LORAMUX].is_whole:
        raise CheckFailed(f"{LORAMUX} and peft disagree in float32: {agreements[LORAMUX]}")
    found = locate_llama(os.environ)
    if llama.check is not None and found is not None:
        copy = llama_copy(files, found, FORMATS[arguments.quantization])
        agreements[llama.name] = agreement_of(llama.check, copy)
    for name, agreement in agreements.items():
        if agreement.share < LEAST_SHARE:
            raise CheckFailed(f"too many answers of {name} differ from peft's: {agreement}")
    return agreements


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.peers.quantized",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--quantization", choices=sorted(FORMATS), required=True)
    add("--activations", choices=("int8",), help="round the inputs of loramux's products to 8 bits")
    add("--size", choices=sorted(SHAPES), default="1b")
    add("--load", type=load_of, action="append", metavar="PROMPT/OUTPUT", help="repeatable; default 64/32 and 32/128")
    add("--adapters", type=positive, default=16, help="number of adapters, and of requests that arrive together")
    add("--rank", type=positive, default=16)
    add("--repeats", type=positive, default=3, help="rounds over both systems; medians are reported")
    add("--threads", type=positive, default=len(os.sched_getaffinity(0)))
    add_allow_busy(parser)
    add("--scratch", type=Path, default=Path(__file__).parents[1] / "scratch" / "peers", help="directory for models")
    add("--out", type=Path, help="write the figures to this JSON file")
    arguments = parser.parse_args(argv)
    arguments.load = arguments.load or list(LOADS)
    return arguments


if __name__ == "__main__":
    # Raise SystemExit on SIGTERM too, so that the servers are stopped with this process.
    signal.signal(signal.SIGTERM, exit_on_signal)
    raise SystemExit(main())
