"""Compares loramux with peft, vLLM and llama-server on the same model, adapters and requests, in one run.

Sixteen greedy requests arrive together: for the base only, for sixteen adapters, and for one adapter. peft runs them in
process as a static batch, which favours it. The other systems run as servers on loopback, one at a time.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from benchmarks.answers import CheckError
from benchmarks.harness import begin, exit_on_sigterm, reports_failure, write_svg
from benchmarks.peers.agreement import LEAST_SHARE, Agreement, answers_of, compare, require_effect
from benchmarks.peers.arguments import MIN_COLUMNS, parsed, peers_parser
from benchmarks.peers.child_server import NO_DRAFTS
from benchmarks.peers.in_process import find_peft
from benchmarks.peers.llama_server import find_llama
from benchmarks.peers.loramux_server import loramux_system
from benchmarks.peers.measurement import Measurement
from benchmarks.peers.model_files import ModelFiles, make_model_files
from benchmarks.peers.report import document, picture, print_report
from benchmarks.peers.system import LORAMUX, Peer, SystemFailed
from benchmarks.peers.vllm_server import find_vllm
from benchmarks.random_model import SHAPES
from benchmarks.tables import open_console

CHECKED_SIZE = "small"


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = peers_parser("peers", __doc__, SHAPES)
    add = parser.add_argument
    add("--only", action="append", metavar="NAME", help="peers to compare with: peft, vLLM, llama-server")
    add("--dtype", choices=("bfloat16", "float32"), default="bfloat16", help="dtype of loramux")
    add("--check-only", action="store_true", help="compare the answers without timing")
    add("--plot", type=Path, help="plot the figures to this file; by default --out with the suffix .svg")
    arguments = parsed(parser, argv)
    if arguments.plot is None and arguments.out is not None:
        arguments.plot = arguments.out.with_suffix(".svg")
    if arguments.plot is not None and arguments.plot.suffix != ".svg":
        parser.error("--plot writes SVG only: name a file that ends in .svg")
    return arguments


def find_peers(arguments: argparse.Namespace, logs: Path, console: Console) -> list[Peer]:
    peers = [
        find_peft(arguments.threads),
        find_vllm(os.environ, arguments.threads, logs),
        find_llama(os.environ, arguments.threads, logs, console.print),
    ]
    names = {peer.name for peer in peers}
    unknown = set(arguments.only or ()) - names
    if unknown:
        raise SystemExit(f"--only {', '.join(sorted(unknown))}: no such peer; choose from {', '.join(sorted(names))}")
    return [peer for peer in peers if not arguments.only or peer.name in arguments.only]


def check(
    arguments: argparse.Namespace, files: ModelFiles, peers: Sequence[Peer], logs: Path, console: Console
) -> tuple[dict[str, Agreement], dict[str, str]]:
    """Return each system's agreement with peft, and the reason why each failed peer failed.

    Raises CheckError if loramux differs from peft.
    """
    own = loramux_system("float32", arguments.threads, logs)
    reference = find_peft(arguments.threads).systems[0]
    expected = answers_of(reference, files, own.kinds)
    require_effect(expected)
    agreements = {LORAMUX: compare(expected, answers_of(own, files, own.kinds))}
    console.print(f"  {LORAMUX}: {agreements[LORAMUX]}")
    if not agreements[LORAMUX].is_whole:
        raise CheckError(f"{LORAMUX} and peft disagree in float32: {agreements[LORAMUX]}")
    failures = {}
    for peer in peers:
        if peer.check is None or peer.check.label == reference.label:
            continue
        try:
            agreement = compare(expected, answers_of(peer.check, files, peer.check.kinds))
        except SystemFailed as error:
            failures[peer.name] = str(error)
            console.print(f"[yellow]{error}[/yellow]", highlight=False)
            continue
        agreements[peer.name] = agreement
        console.print(f"  {peer.name}: {agreement}")
        if agreement.share < LEAST_SHARE:
            failures[peer.name] = f"not timed, since most of its float32 answers differ from peft's: {agreement}"
    return agreements, failures


@reports_failure
def main(argv: Sequence[str] | None = None) -> int:
    run = begin(parse(argv), open_console(MIN_COLUMNS))
    arguments, console = run.arguments, run.console
    logs = arguments.scratch.absolute() / "logs"
    peers = find_peers(arguments, logs, console)
    for peer in peers:
        console.print(f"{peer.name}: {peer.missing or peer.version}")
    console.print("comparing greedy float32 answers on the small model with peft's")
    small = make_model_files(arguments.scratch, CHECKED_SIZE, arguments.adapters, arguments.rank)
    agreements, failures = check(arguments, small, peers, logs, console)
    if arguments.check_only:
        return 1 if failures else 0
    files = make_model_files(arguments.scratch, arguments.size, arguments.adapters, arguments.rank)
    systems = [loramux_system(arguments.dtype, arguments.threads, logs)]
    systems += [system for peer in peers if peer.name not in failures for system in peer.systems]
    measurement = Measurement(
        files, systems, arguments.load, arguments.repeats, arguments.allow_busy, console, failures=dict(failures)
    )
    workload = _workload(arguments)

    def save(is_complete: bool = False) -> None:
        """Write the results so far. Called after each session, so that an interrupted run keeps its figures."""
        busy: dict[str, Any] = {} if is_complete else {"busy_share": {}}
        head = {"workload": workload, "is_busy_allowed": arguments.allow_busy, "is_complete": is_complete, **busy}
        run.write(head | document(peers, agreements, measurement, arguments.load))

    measurement.run(save)
    save(is_complete=True)
    speeds = print_report(peers, agreements, measurement, console)
    run.say(workload)
    title = f"{arguments.adapters} concurrent requests, {arguments.size} model, {arguments.threads} threads"
    write_svg(arguments.plot, picture(title, speeds))
    return 0


def _workload(arguments: argparse.Namespace) -> dict[str, Any]:
    shape = SHAPES[arguments.size]
    return {
        "model": f"{arguments.size} ({shape.num_layers} layers, hidden {shape.hidden_size}), random weights",
        "requests_at_once": arguments.adapters,
        "rank": arguments.rank,
        "loads": [str(load) for load in arguments.load],
        "repeats": arguments.repeats,
        "threads": arguments.threads,
        "speculate": NO_DRAFTS[1],
        "openmp": {name: value for name, value in os.environ.items() if name.startswith(("OMP_", "GOMP_", "KMP_"))},
    }


if __name__ == "__main__":
    exit_on_sigterm()
    raise SystemExit(main())
