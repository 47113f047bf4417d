"""Compares loramux on an 8-bit or 4-bit base with llama-server on a base with the same number of bits, on a CPU.

llama-server serves a Q8_0 or Q4_0 file that llama.cpp's own quantiser writes. Sixteen greedy requests arrive together,
for the base only and for sixteen adapters. Before that, each server's answers on the small model, with K and V in
float32, are compared with peft's answers over a float32 copy of that server's own dequantised weights. loramux must
give the same tokens. llama-server rounds the inputs of its products to 8 bits, as loramux does with `--activations
int8`, so the number of equal answers is reported.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

from rich.console import Console

from benchmarks.answers import CheckError
from benchmarks.harness import begin, exit_on_sigterm, reports_failure
from benchmarks.peers.agreement import Agreement, answers_of, compare, require_effect
from benchmarks.peers.arguments import MIN_COLUMNS, parsed, peers_parser
from benchmarks.peers.child_server import NO_DRAFTS
from benchmarks.peers.figures import Goals
from benchmarks.peers.float_copies import llama_copy, own_copy
from benchmarks.peers.in_process import find_peft
from benchmarks.peers.llama_server import find_llama, locate_llama
from benchmarks.peers.loramux_server import open_loramux
from benchmarks.peers.measurement import Measurement
from benchmarks.peers.model_files import ModelFiles, make_model_files
from benchmarks.peers.report import document, print_report
from benchmarks.peers.system import LORAMUX, Peer, System
from benchmarks.peers.workload import BASE, DISTINCT
from benchmarks.random_model import SHAPES
from benchmarks.tables import open_console

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


@reports_failure
def main(argv: Sequence[str] | None = None) -> int:
    run = begin(_parse(argv), open_console(MIN_COLUMNS))
    arguments, console = run.arguments, run.console
    logs = arguments.scratch.absolute() / "logs"
    llama = find_llama(os.environ, arguments.threads, logs, console.print, FORMATS[arguments.quantization])
    console.print(f"{llama.name}: {llama.missing or llama.version}")
    small = make_model_files(arguments.scratch, "small", arguments.adapters, arguments.rank)
    agreements = check(arguments, small, llama, logs, console)
    files = make_model_files(arguments.scratch, arguments.size, arguments.adapters, arguments.rank)
    systems = [own_system("bfloat16", arguments, logs), *(replace(one, kinds=KINDS) for one in llama.systems)]
    measurement = Measurement(files, systems, arguments.load, arguments.repeats, arguments.allow_busy, console)
    measurement.run(lambda: None)
    print_report([llama], agreements, measurement, console, GOALS)
    workload = {name: getattr(arguments, name) for name in WORKLOAD}
    workload["speculate"] = NO_DRAFTS[1]
    workload["loads"] = [str(load) for load in arguments.load]
    head = {"workload": workload, "is_busy_allowed": arguments.allow_busy}
    run.write(head | document([llama], agreements, measurement, arguments.load, GOALS))
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

    Raises CheckError if any answer of loramux without `--activations int8` differs, or if more answers of a server
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
        raise CheckError(f"{LORAMUX} and peft disagree in float32: {agreements[LORAMUX]}")
    found = locate_llama(os.environ)
    if llama.check is not None and found is not None:
        copy = llama_copy(files, found, FORMATS[arguments.quantization])
        agreements[llama.name] = agreement_of(llama.check, copy)
    for name, agreement in agreements.items():
        if agreement.share < LEAST_SHARE:
            raise CheckError(f"too many answers of {name} differ from peft's: {agreement}")
    return agreements


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = peers_parser("peers.quantized", __doc__, SHAPES)
    parser.add_argument("--quantization", choices=sorted(FORMATS), required=True)
    parser.add_argument("--activations", choices=("int8",), help="round the inputs of loramux's products to 8 bits")
    return parsed(parser, argv)


if __name__ == "__main__":
    exit_on_sigterm()
    raise SystemExit(main())
