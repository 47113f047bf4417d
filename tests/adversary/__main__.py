"""Attack a running server and say what a polite tenant felt: `python -m tests.adversary`.

Each attack is counted or felt. A counted one makes a number of calls; afterwards the ledger must equal what the engine
committed, and nothing may be held. A felt one runs in turn with quiet stretches beside a tenant that asks at a steady
rate, and is judged by that tenant's time to the first token. Everything is drawn by the seed.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import resource
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Awaitable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from rich.progress import track
from rich.table import Table
from sqlalchemy import func, select

from benchmarks.machine import add_allow_busy, describe, require_idle
from benchmarks.tables import open_console
from loramux.migrations import schema
from tests.adversary.attacks import COUNTED, FELT
from tests.adversary.polite_tenant import Asked, PoliteSettings
from tests.adversary.stand import ADAPTER, DATABASES, NUM_SOCKETS, Stand, open_stand

LIMIT = 1.25
"""Highest allowed ratio of the polite tenant's p99 with an attack to that without."""
SETTLING_S = 2.0
"""Pause after a felt attack, so that its leftovers are not counted as quiet."""


@dataclass(slots=True)
class Finding:
    """What one attack did on one database."""

    database: str
    attack: str
    outcomes: dict[str, int]
    quiet_p99_ms: float | None = None
    attacked_p99_ms: float | None = None
    num_polite: int = 0
    """The polite tenant's requests while attacked."""
    notes: list[str] = field(default_factory=list)
    faults: list[str] = field(default_factory=list)

    @property
    def ratio(self) -> float | None:
        if self.quiet_p99_ms is None or self.attacked_p99_ms is None:
            return None
        return self.attacked_p99_ms / self.quiet_p99_ms


class PoliteTenant:
    """The polite tenant's process, and its requests by the moment that they were sent."""

    def __init__(self, stand: Stand, seed: int) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.adversary.polite_tenant"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=stand.deployment.environment | {"PYTHONPATH": os.pathsep.join([str(Path.cwd()), *sys.path])},
        )
        settings = PoliteSettings(port=stand.deployment.port, key=stand.polite.key, model=ADAPTER, seed=seed)
        assert self._process.stdin is not None
        self._process.stdin.write(msgspec.json.encode(asdict(settings)).decode() + "\n")
        self._process.stdin.flush()

    def end(self) -> list[Asked]:
        output, _ = self._process.communicate(timeout=120)
        return [msgspec.json.decode(line, type=Asked) for line in output.splitlines()]


async def count(stand: Stand, only: Sequence[str], seed: int, num_calls: int, kind: str) -> list[Finding]:
    """Run every counted attack once, and hold the ledger to the engine's own count after each."""
    findings = []
    for name, attack in COUNTED.items():
        if name not in only:
            continue
        outcomes = await attack(stand, random.Random(f"{seed} {name}"), num_calls)
        findings.append(Finding(kind, name, dict(outcomes.most_common()), faults=await asyncio.to_thread(check, stand)))
    return findings


async def feel(stand: Stand, only: Sequence[str], seed: int, rounds: int, stretch_s: float, kind: str) -> list[Finding]:
    """Run every felt attack in turn with quiet stretches of the same length."""
    findings = []
    for name, attack in FELT.items():
        if name not in only:
            continue
        dice = random.Random(f"{seed} {name}")
        polite = PoliteTenant(stand, seed)
        await asyncio.sleep(SETTLING_S)
        outcomes: Counter[str] = Counter()
        quiet: list[tuple[float, float]] = []
        attacked: list[tuple[float, float]] = []
        for _ in range(rounds):
            quiet.append(await _timed(asyncio.sleep(stretch_s)))
            begin_s = time.monotonic()
            outcomes += await attack(stand, dice, stretch_s)
            attacked.append((begin_s, time.monotonic()))
            await asyncio.sleep(SETTLING_S)
        asked = await asyncio.to_thread(polite.end)
        while_quiet = [one for one in asked if _is_within(one, quiet)]
        while_attacked = [one for one in asked if _is_within(one, attacked)]
        finding = Finding(
            kind,
            name,
            dict(outcomes.most_common()),
            quiet_p99_ms=_p99_ms(while_quiet),
            attacked_p99_ms=_p99_ms(while_attacked),
            num_polite=len(while_attacked),
            notes=_taken(stand.notes),
            faults=await asyncio.to_thread(check, stand),
        )
        failed = Counter(str(one.status) for one in asked if one.status != 200 or not one.is_complete)
        if failed:
            finding.faults.append(f"the polite tenant was answered {dict(failed)}")
        if finding.ratio is None or finding.ratio > LIMIT:
            finding.faults.append(f"the polite tenant's p99 rose {finding.ratio or 0:.2f} times")
        findings.append(finding)
    return findings


def check(stand: Stand) -> list[str]:
    """Wait until the server is idle; what is wrong then. Blocking."""
    stand.wait_idle()
    faults = [f"{what} ({number} times)" for what, number in stand.undocumented.items()]
    stand.undocumented.clear()
    with stand.database.read() as connection:
        held = connection.execute(select(func.sum(schema.quota_counters.c.reserved))).scalar_one() or 0
    metrics = stand.metrics()
    billed = stand.num_billed() - stand.billed_before
    committed = metrics["loramux_engine_tokens_total", ("completion",)]
    if billed != committed:
        faults.append(f"{billed} tokens are billed, the engine committed {committed:.0f}")
    if held:
        faults.append(f"{held} tokens stay reserved")
    leaked = metrics["loramux_engine_pages", ("kv",)] - metrics["loramux_engine_prefix_pages", ()]
    if leaked:
        faults.append(f"{leaked:.0f} pages have no owner")
    return faults


def _taken(notes: list[str]) -> list[str]:
    found, notes[:] = list(notes), []
    return found


async def _timed(waiting: Awaitable[Any]) -> tuple[float, float]:
    begin_s = time.monotonic()
    await waiting
    return begin_s, time.monotonic()


def _is_within(asked: Asked, stretches: Sequence[tuple[float, float]]) -> bool:
    return any(begin_s <= asked.at_s < end_s for begin_s, end_s in stretches)


def _p99_ms(asked: Sequence[Asked]) -> float | None:
    times = [one.first_token_s for one in asked if one.first_token_s is not None]
    return round(float(np.percentile(times, 99)) * 1e3, 1) if times else None


async def attack_all(stand: Stand, arguments: argparse.Namespace, kind: str) -> list[Finding]:
    # A small round first: what the server opens once and keeps is no leak.
    await count(stand, arguments.only, arguments.seed + 1, 40, kind)
    await feel(stand, arguments.only, arguments.seed + 1, 1, 3.0, kind)
    before = stand.num_descriptors()
    findings = await count(stand, arguments.only, arguments.seed, arguments.calls, kind)
    findings += await feel(stand, arguments.only, arguments.seed, arguments.rounds, arguments.stretch_s, kind)
    after = stand.num_descriptors()
    leaks = {name: after[name] - number for name, number in before.items() if after.get(name, 0) > number}
    findings.append(
        Finding(kind, "all of them", {}, faults=[f"open descriptors more than before: {leaks}"] if leaks else [])
    )
    return findings


def main() -> int:
    arguments = _arguments()
    require_idle(arguments.allow_busy)
    # The attacker's machine is elsewhere: here it takes only what the server leaves.
    os.nice(10)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, max(soft, 4 * NUM_SOCKETS)), hard))
    findings: list[Finding] = []
    for kind in track(arguments.databases, "attacking", console=open_console()):
        with open_stand(kind) as stand:
            findings += asyncio.run(attack_all(stand, arguments, kind))
    _print(findings)
    document = {
        "machine": describe(),
        "seed": arguments.seed,
        "calls": arguments.calls,
        "rounds": arguments.rounds,
        "stretch_s": arguments.stretch_s,
        "findings": [asdict(finding) | {"ratio": finding.ratio} for finding in findings],
    }
    if arguments.out is not None:
        arguments.out.write_bytes(msgspec.json.format(msgspec.json.encode(document), indent=2) + b"\n")
    return 1 if any(finding.faults for finding in findings) else 0


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--databases", nargs="+", choices=DATABASES, default=DATABASES)
    parser.add_argument("--only", nargs="+", choices=[*COUNTED, *FELT], default=[*COUNTED, *FELT], metavar="ATTACK")
    parser.add_argument("--calls", type=int, default=600, help="calls of each counted attack")
    parser.add_argument("--rounds", type=int, default=1, help="quiet and attacked stretches of each felt attack")
    parser.add_argument("--stretch-s", type=float, default=20.0, help="length of a stretch, in seconds")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--out", type=Path, help="write the figures here as JSON")
    add_allow_busy(parser)
    return parser.parse_args()


def _print(findings: Sequence[Finding]) -> None:
    table = Table(title="what attacks did", show_lines=True)
    for column in ("database", "attack", "answers", "quiet p99 ms", "attacked p99 ms", "ratio", "faults and notes"):
        table.add_column(column, justify="right" if "p99" in column or column == "ratio" else "left")
    for finding in findings:
        answers = ", ".join(f"{outcome}: {number}" for outcome, number in finding.outcomes.items())
        times = [finding.quiet_p99_ms, finding.attacked_p99_ms]
        table.add_row(
            finding.database,
            finding.attack,
            answers,
            *("" if time_ms is None else str(time_ms) for time_ms in times),
            "" if finding.ratio is None else f"{finding.ratio:.2f}",
            "\n".join([*finding.faults, *finding.notes]) or "none",
        )
    open_console().print(table)


if __name__ == "__main__":
    sys.exit(main())
