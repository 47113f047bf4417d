"""Measures the gateways of loramux and LiteLLM without a model, each in front of a back end with scripted answers.

loramux's gateway is a process in front of a scripted engine's socket. LiteLLM's proxy is in front of a scripted
OpenAI-compatible server, which is also called directly. Answers are checked in a warm-up and after each measurement.
"""

from __future__ import annotations

import argparse
import os
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from sqlalchemy import func, select

from benchmarks.accounts.databases import KINDS, open_database_at
from benchmarks.gateway.clients import Load, Script, check_answers, run_load
from benchmarks.gateway.figures import Figures, cases_of, earlier_run, figures_of, judged, with_earlier_cases
from benchmarks.gateway.systems import (
    DIRECT,
    LORAMUX,
    MODEL,
    Running,
    find_litellm,
    open_direct,
    open_litellm,
    open_loramux,
)
from benchmarks.harness import SCRATCH, begin, exit_on_sigterm, new_parser, reports_failure
from benchmarks.peers.system import SystemFailed
from benchmarks.tables import table
from loramux.migrations import schema
from loramux.migrations.database import Database
from loramux.platform.tokenizer.model_tokenizer import ModelTokenizer

NUM_CLIENTS = (1, 32, 128)
WHOLE_TOKENS = 16
STREAM_TOKENS = 256
OFFERED = 64_000
"""Tokens per second that the engine generates for all streams together, more than a gateway can pass on."""
PACED_STEP_US = 20_000
PACED_RAMP_S = 1.0
"""Time, in seconds, within which the paced streams begin. If all began at once, the gaps would show how fast 128
requests are admitted.
"""
WARM_S = 0.5
COLUMNS = {
    "requests_per_s": "requests/s",
    "tokens_per_s": "tokens/s",
    "p50_ms": "p50, ms",
    "p99_ms": "p99, ms",
    "added_p50_ms": "added p50",
    "added_p99_ms": "added p99",
    "p99_gap_ms": "p99 gap, ms",
    "tokens_per_event": "tokens/event",
    "cores": "cores",
    "processor_us_per_token": "us/token",
}


@reports_failure
def main(argv: Sequence[str] | None = None) -> int:
    run = begin(_parse(argv))
    arguments, console = run.arguments, run.console
    python, version = find_litellm(os.environ)
    console.print(f"LiteLLM: {version}")
    method = {
        "machine": run.machine,
        "litellm": version,
        "database": arguments.database,
        "rounds": arguments.rounds,
        "seconds": arguments.seconds,
    }
    earlier = earlier_run(arguments.out, method) if arguments.only else None
    with ExitStack() as stack:
        script = Script.of(ModelTokenizer.load(MODEL))
        logs = arguments.scratch.absolute() / "logs"
        logs.mkdir(parents=True, exist_ok=True)
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="loramux-gateway-")))
        database, url = stack.enter_context(open_database_at(arguments.database))
        direct = stack.enter_context(open_direct(script, logs))
        systems = [stack.enter_context(open_loramux(script, folder, database, url, logs))]
        if python is not None:
            systems.append(stack.enter_context(open_litellm(python, direct.address, logs)))
        systems.append(direct)
        found = _measure(systems, arguments, script, database, console)
    cases = with_earlier_cases(cases_of(found, DIRECT), earlier)
    goals = judged(cases, LORAMUX)
    console.print(_table(cases))
    for goal in goals:
        bound = f"at least {goal['least']}" if goal["most"] is None else f"at most {goal['most']}"
        met = "met" if goal["is_met"] else "missed"
        console.print(f"{goal['load']}: {goal['figure']} is {goal['value']}, goal {bound}: {met}")
    # A file with several runs reports the busiest.
    before = {"busy_share": 0.0, "is_busy_allowed": False} if earlier is None else earlier
    figures = {
        "busy_share": max(round(run.busy_before or 0.0, 3), before["busy_share"]),
        "is_busy_allowed": arguments.allow_busy or before["is_busy_allowed"],
        **method,
        "goals": goals,
        "cases": cases,
    }
    run.write(figures)
    return 0


def loads(seconds: float) -> dict[str, Load]:
    whole = Load(num_clients=1, num_tokens=WHOLE_TOKENS, is_streamed=False, step_us=0, seconds=seconds)
    stream = replace(whole, num_tokens=STREAM_TOKENS, is_streamed=True)
    named = {}
    for num_clients in NUM_CLIENTS:
        clients = "1 client" if num_clients == 1 else f"{num_clients} clients"
        step_us = max(1, num_clients * 1_000_000 // OFFERED)
        named[f"whole, {clients}"] = replace(whole, num_clients=num_clients)
        named[f"streamed, {clients}"] = replace(stream, num_clients=num_clients, step_us=step_us)
    paced = replace(stream, num_clients=128, step_us=PACED_STEP_US, ramp_s=PACED_RAMP_S)
    return {**named, "20 ms steps, 128 clients": paced}


def _measure(
    systems: Sequence[Running], arguments: argparse.Namespace, script: Script, database: Database, console: Console
) -> dict[tuple[str, str], list[Figures]]:
    """Run every load on the systems in turn. Raises SystemFailed unless the ledger contains the tokens that loramux's
    clients received.
    """
    found: dict[tuple[str, str], list[Figures]] = {}
    num_received = 0
    for number in range(-1, arguments.rounds):
        is_warm_up = number < 0
        seconds = WARM_S if is_warm_up else arguments.seconds
        for name, load in loads(seconds).items():
            if (arguments.only or "") not in name or (is_warm_up and load.num_clients > 32):
                continue
            for system in systems if number % 2 == 0 else reversed(systems):
                before_s = system.processor_s()
                outcome = run_load(system.address, load)
                processor_s = system.processor_s() - before_s
                check_answers(outcome, load, script)
                if system.name == LORAMUX:
                    num_received += len(outcome.answers) * load.num_tokens
                if is_warm_up:
                    continue
                figures = figures_of(outcome, load, processor_s)
                found.setdefault((name, system.name), []).append(figures)
                rates = f"{figures.requests_per_s:.0f} requests/s, {figures.tokens_per_s:.0f} tokens/s"
                console.print(
                    f"  round {number}: {name}, {system.name}: {rates}, p99 {figures.p99_ms} ms, "
                    f"p99 gap {figures.p99_gap_ms} ms, {figures.tokens_per_event} tokens/event, "
                    f"{figures.cores} cores, {figures.processor_us_per_token} us/token"
                )
    num_billed = _billed_tokens(database)
    if num_billed != num_received:
        raise SystemFailed(f"the ledger has {num_billed} tokens, but the clients received {num_received}")
    return found


def _billed_tokens(database: Database) -> int:
    with database.read() as connection:
        return int(connection.scalar(select(func.sum(schema.usage_events.c.completion_tokens))) or 0)


def _table(cases: Sequence[Mapping[str, Any]]) -> Table:
    rows = [
        (
            case["load"],
            case["system"],
            *("" if case.get(name) is None else str(case[name]) for name in COLUMNS),
        )
        for case in cases
    ]
    title = "p50 and p99 of the time to the whole answer or, for a stream, to the first token"
    return table(title, ("load", "system", *COLUMNS.values()), rows, num_left=2)


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = new_parser("gateway", __doc__)
    add = parser.add_argument
    add("--rounds", type=int, default=3, help="rounds over all loads and systems; medians are reported")
    add("--seconds", type=float, default=3.0, help="seconds in which clients begin requests, per load")
    add("--only", metavar="TEXT", help="measure only loads with this text in their name; the file keeps other loads")
    add("--database", choices=KINDS, default="sqlite")
    add("--scratch", type=Path, default=SCRATCH / "gateway", help="directory for logs")
    return parser.parse_args(argv)


if __name__ == "__main__":
    exit_on_sigterm()
    raise SystemExit(main())
