"""Compares loramux with peft, vLLM and llama-server on the same model, adapters and requests, in one run.

Sixteen greedy requests arrive together: for the base only, for sixteen adapters, and for one adapter. peft runs them in
process as a static batch, which favours it. The other systems run as servers on loopback, one at a time.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

from rich.console import Console

from benchmarks.machine import add_allow_busy, busy_share, describe, require_idle
from benchmarks.peers.agreement import LEAST_SHARE, Agreement, CheckFailed, answers_of, compare, require_effect
from benchmarks.peers.figures import ratios, tokens_per_second
from benchmarks.peers.in_process import find_peft
from benchmarks.peers.llama_server import find_llama
from benchmarks.peers.loramux_server import loramux_system
from benchmarks.peers.measurement import MachineBusy, Measurement
from benchmarks.peers.model_files import ModelFiles, make_model_files
from benchmarks.peers.report import document, notes, picture, ratio_table, speed_table
from benchmarks.peers.system import LORAMUX, Peer, SystemFailed
from benchmarks.peers.vllm_server import find_vllm
from benchmarks.peers.workload import Load
from benchmarks.random_model import SHAPES

FOLDER = Path(__file__).parents[1]
LOADS = (Load(64, 32), Load(32, 128))
CHECKED_SIZE = "small"
MIN_COLUMNS = 160
"""Width of a table when the output is not a terminal, in columns."""


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.peers", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--size", choices=sorted(SHAPES), default="1b")
    add("--load", type=load_of, action="append", metavar="PROMPT/OUTPUT", help="repeatable; default 64/32 and 32/128")
    add("--adapters", type=positive, default=16, help="number of adapters, and of requests that arrive together")
    add("--rank", type=positive, default=16)
    add("--repeats", type=positive, default=3, help="rounds over all systems; medians are reported")
    add("--only", action="append", metavar="NAME", help="peers to compare with: peft, vLLM, llama-server")
    add("--threads", type=positive, default=len(os.sched_getaffinity(0)))
    add("--dtype", choices=("bfloat16", "float32"), default="bfloat16", help="dtype of loramux")
    add("--check-only", action="store_true", help="compare the answers without timing")
    add_allow_busy(parser)
    add("--scratch", type=Path, default=FOLDER / "scratch" / "peers", help="directory for models and logs")
    add("--out", type=Path, help="write the figures to this JSON file")
    add("--plot", type=Path, help="plot the figures to this file; by default --out with the suffix .svg")
    arguments = parser.parse_args(argv)
    arguments.load = arguments.load or list(LOADS)
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

    Raises CheckFailed if loramux differs from peft.
    """
    own = loramux_system("float32", arguments.threads, logs)
    reference = find_peft(arguments.threads).systems[0]
    expected = answers_of(reference, files, own.kinds)
    require_effect(expected)
    agreements = {LORAMUX: compare(expected, answers_of(own, files, own.kinds))}
    console.print(f"  {LORAMUX}: {agreements[LORAMUX]}")
    if not agreements[LORAMUX].is_whole:
        raise CheckFailed(f"{LORAMUX} and peft disagree in float32: {agreements[LORAMUX]}")
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


def main(argv: Sequence[str] | None = None) -> int:
    arguments = parse(argv)
    console = Console()
    if not console.is_terminal:
        console.width = MIN_COLUMNS
    machine = describe()
    busy_before = require_idle(arguments.allow_busy)
    logs = arguments.scratch.absolute() / "logs"
    peers = find_peers(arguments, logs, console)
    for peer in peers:
        console.print(f"{peer.name}: {peer.version}" if peer.missing is None else f"{peer.name}: {peer.missing}")
    try:
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
        head = {
            "date": datetime.now(UTC).date().isoformat(),
            "workload": _workload(arguments),
            "machine": machine,
            "is_busy_allowed": arguments.allow_busy,
        }

        def save(is_complete: bool = False) -> None:
            """Write the results so far. Called after each session, so that an interrupted run keeps its figures."""
            if arguments.out is None:
                return
            busy = {"before": round(busy_before, 3), "after": round(busy_share(), 3)} if is_complete else {}
            body = document(peers, agreements, measurement, arguments.load)
            arguments.out.parent.mkdir(parents=True, exist_ok=True)
            arguments.out.write_text(
                json.dumps({**head, "is_complete": is_complete, "busy_share": busy, **body}, indent=1) + "\n"
            )

        measurement.run(save)
        save(is_complete=True)
    except (CheckFailed, SystemFailed, MachineBusy) as error:
        console.print(f"[red]{error}[/red]", highlight=False)
        return 1
    speeds = tokens_per_second(measurement.samples, files.num_adapters)
    console.print(speed_table(speeds, arguments.load, peers))
    own_speeds = tokens_per_second(measurement.own_samples, files.num_adapters)
    console.print(ratio_table(ratios(speeds, own_speeds, arguments.load)))
    for note in notes(peers, agreements, measurement):
        console.print(f"[yellow]{note}[/yellow]", highlight=False)
    for name, value in (head["workload"] | machine).items():
        console.print(f"[dim]{name}: {value}[/dim]", highlight=False)
    if arguments.plot is not None:
        arguments.plot.parent.mkdir(parents=True, exist_ok=True)
        title = f"{arguments.adapters} concurrent requests, {arguments.size} model, {arguments.threads} threads"
        arguments.plot.write_text(picture(title, speeds))
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
        "openmp": {name: value for name, value in os.environ.items() if name.startswith(("OMP_", "GOMP_", "KMP_"))},
    }


def load_of(text: str) -> Load:
    try:
        return Load.parse(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def exit_on_signal(number: int, frame: FrameType | None) -> NoReturn:
    # `timeout` signals both the process and its group. Ignore the second signal, so that the servers shut down cleanly.
    signal.signal(number, signal.SIG_IGN)
    raise SystemExit(128 + number)


def positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise ValueError(text)
    return value


if __name__ == "__main__":
    # Raise SystemExit on SIGTERM too, so that the servers are stopped with this process.
    signal.signal(signal.SIGTERM, exit_on_signal)
    raise SystemExit(main())
