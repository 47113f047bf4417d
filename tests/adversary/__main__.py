"""Attack a running server and measure the effect on a polite tenant: `python -m tests.adversary`.

There are two kinds of attacks. A counted attack makes a fixed number of calls. Afterwards, the ledger must match the
tokens that the engine committed, and no quota may remain reserved. A timed attack alternates with quiet periods, or
with as many plain requests, while a polite tenant sends requests at a steady rate. The result is that tenant's time to
first token. The seed determines all random choices.
"""

from __future__ import annotations

import argparse
import asyncio
import math
import os
import random
import resource
import statistics
import subprocess
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass, field
from itertools import permutations
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np
from rich.progress import track
from rich.table import Table
from sqlalchemy import func, select

from benchmarks.machine import add_allow_busy, describe, require_idle
from benchmarks.tables import open_console
from loramux.migrations import schema
from loramux.platform.grammars.checker import FULL
from tests.adversary.attacks import BASELINES, COUNTED, FELT, RAMP_S, nothing
from tests.adversary.polite_tenant import Asked, PoliteSettings
from tests.adversary.stand import ADAPTER, DATABASES, NUM_SOCKETS, Stand, open_stand
from tests.adversary.tenant_floods import TENANT_FLOODS, Beside, flood

ATTACKS = [*COUNTED, *FELT, *TENANT_FLOODS]
LIMIT = 1.25
"""Highest allowed ratio of the polite tenant's p99 under attack to its p99 in quiet periods."""
SETTLING_S = 2.0
"""Pause between a timed attack and the next quiet period, in seconds."""


@dataclass(slots=True)
class Finding:
    database: str
    attack: str
    outcomes: dict[str, int]
    quiet_p99_ms: float | None = None
    attacked_p99_ms: float | None = None
    quiet_gap_p99_ms: float | None = None
    attacked_gap_p99_ms: float | None = None
    gap_ratio: float | None = None
    rounds: list[dict[str, float]] = field(default_factory=list)
    num_polite: int = 0
    """Number of requests that the polite tenant sent during the attack."""
    notes: list[str] = field(default_factory=list)
    faults: list[str] = field(default_factory=list)
    first_token_ratio: float | None = None
    """Ratio of the polite tenant's p99 under attack to its p99 without, the median over the rounds."""


Note = Callable[[Finding], None]


@asynccontextmanager
async def polite_tenant(
    stand: Stand,
    seed: int,
    dice: random.Random,
    bystanders: ThreadPoolExecutor,
    asked: list[Asked],
    **fields: Any,
) -> AsyncIterator[None]:
    settings = PoliteSettings(
        **{
            "port": stand.deployment.port,
            "key": stand.polite.key,
            "model": ADAPTER,
            "seed": seed,
            "prompt_seed": dice.randrange(10**9),
        }
        | fields
    )

    def start() -> subprocess.Popen[str]:
        process = subprocess.Popen(
            [sys.executable, "-m", "tests.adversary.polite_tenant"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=stand.deployment.environment | {"PYTHONPATH": os.pathsep.join([str(Path.cwd()), *sys.path])},
        )
        assert process.stdin is not None
        process.stdin.write(msgspec.json.encode(asdict(settings)).decode() + "\n")
        process.stdin.flush()
        return process

    process = await asyncio.get_running_loop().run_in_executor(bystanders, start)
    yield
    output, _ = await asyncio.to_thread(process.communicate, timeout=120)
    asked += [msgspec.json.decode(line, type=Asked) for line in output.splitlines()]


async def count(stand: Stand, only: Sequence[str], seed: int, num_calls: int, kind: str, note: Note) -> None:
    """Run every counted attack once. After each, compare the ledger with the engine's token count."""
    for name, attack in COUNTED.items():
        if name not in only:
            continue
        outcomes = await attack(stand, random.Random(f"{seed} {name}"), num_calls)
        note(Finding(kind, name, dict(outcomes.most_common()), faults=await asyncio.to_thread(check, stand)))


async def feel(
    stand: Stand,
    only: Sequence[str],
    seed: int,
    rounds: int,
    stretch_s: float,
    kind: str,
    note: Note,
    bystanders: ThreadPoolExecutor,
) -> None:
    """Alternate every timed attack with equally long quiet periods. `bystanders` starts the polite tenant.

    An attack's baseline runs in its quiet periods. The ratio is the median over the rounds.
    """
    for name, attack in FELT.items():
        if name not in only:
            continue
        baseline = BASELINES.get(name, nothing)
        dice = random.Random(f"{seed} {name}")
        outcomes: Counter[str] = Counter()
        failed: Counter[str] = Counter()
        found: list[tuple[float, float]] = []
        num_polite = 0
        for number in range(rounds):
            attacked: list[Asked] = []
            quiet: list[Asked] = []
            began_s = time.monotonic()
            async with polite_tenant(stand, seed + number, dice, bystanders, attacked):
                outcomes += await attack(stand, dice, stretch_s)
            lasted_s = time.monotonic() - began_s
            await asyncio.sleep(SETTLING_S)
            async with polite_tenant(stand, seed + number, dice, bystanders, quiet):
                await asyncio.gather(asyncio.sleep(lasted_s), baseline(stand, dice, stretch_s))
            num_polite += len(attacked)
            failed.update(str(one.status) for one in attacked + quiet if one.status != 200 or not one.is_complete)
            found.append((_p99_ms(quiet) or math.inf, _p99_ms(attacked) or math.inf))
        finding = Finding(
            kind,
            name,
            dict(outcomes.most_common()),
            quiet_p99_ms=round(statistics.median(quiet_ms for quiet_ms, _ in found), 1),
            attacked_p99_ms=round(statistics.median(attacked_ms for _, attacked_ms in found), 1),
            first_token_ratio=round(statistics.median(one / other for other, one in found), 2),
            rounds=[{"quiet_first_ms": quiet_ms, "attacked_first_ms": attacked_ms} for quiet_ms, attacked_ms in found],
            num_polite=num_polite,
            notes=_taken(stand.notes),
            faults=await asyncio.to_thread(check, stand),
        )
        if failed:
            finding.faults.append(f"the polite tenant got errors: {dict(failed)}")
        if finding.first_token_ratio is None or finding.first_token_ratio > LIMIT:
            finding.faults.append(f"the polite tenant's p99 rose by a factor of {finding.first_token_ratio or 0:.2f}")
        note(finding)


async def compare(
    stand: Stand,
    only: Sequence[str],
    seed: int,
    rounds: int,
    stretch_s: float,
    kind: str,
    note: Note,
    bystanders: ThreadPoolExecutor,
) -> None:
    """Alternate every tenant flood with as many plain requests and with none, and compare the polite tenant's p99s.

    A round's ratio is that of the p99 beside the costly requests to the higher of the two others.
    """
    orders = list(permutations(Beside))
    for name, one in TENANT_FLOODS.items():
        if name not in only:
            continue
        dice = random.Random(f"{seed} {name}")
        outcomes: Counter[str] = Counter()
        failed: Counter[str] = Counter()
        found: dict[Beside, list[_Latency]] = {beside: [] for beside in Beside}
        num_polite = 0
        for number in range(rounds):
            for beside in orders[number % len(orders)]:
                asked: list[Asked] = []
                fields = {"max_tokens": 24, "requests_per_s": 10.0} | one.polite
                async with polite_tenant(stand, seed + number, dice, bystanders, asked, **fields):
                    counts = await flood(stand, one, beside, dice, stretch_s)
                await asyncio.to_thread(stand.wait_idle)
                if beside is Beside.COSTLY:
                    outcomes += counts
                    num_polite += len(asked)
                failed.update(str(item.status) for item in asked if item.status != 200 or not item.is_complete)
                gaps = [gap_s for item in asked for gap_s in item.gaps_s]
                found[beside].append(_Latency(_p99_ms(asked) or 0.0, float(np.percentile(gaps or [0.0], 99)) * 1e3))
        finding = _compared(found, Finding(kind, name, dict(outcomes.most_common()), num_polite=num_polite))
        finding.faults = await asyncio.to_thread(check, stand)
        if failed:
            finding.faults.append(f"the polite tenant got errors: {dict(failed)}")
        finding.faults += [f"the attackers got {outcome}" for outcome in outcomes if outcome.startswith("5")]
        for what, ratio in (("first token", finding.first_token_ratio), ("gaps", finding.gap_ratio)):
            if ratio is None or ratio > LIMIT:
                finding.faults.append(f"the polite tenant's p99 of {what} rose by a factor of {ratio or 0:.2f}")
        note(finding)


class _Latency(NamedTuple):
    """The polite tenant's p99 in a stretch."""

    first_ms: float
    gap_ms: float


def _compared(found: dict[Beside, list[_Latency]], finding: Finding) -> Finding:
    rounds = [dict(zip(found, latencies, strict=True)) for latencies in zip(*found.values(), strict=True)]
    quiet = [_Latency(*map(max, beside[Beside.PLAIN], beside[Beside.NOTHING])) for beside in rounds]
    costly = [beside[Beside.COSTLY] for beside in rounds]
    finding.quiet_p99_ms = round(statistics.median(one.first_ms for one in quiet), 1)
    finding.attacked_p99_ms = round(statistics.median(one.first_ms for one in costly), 1)
    finding.quiet_gap_p99_ms = round(statistics.median(one.gap_ms for one in quiet), 1)
    finding.attacked_gap_p99_ms = round(statistics.median(one.gap_ms for one in costly), 1)
    pairs = list(zip(costly, quiet, strict=True))
    finding.first_token_ratio = round(statistics.median(one.first_ms / other.first_ms for one, other in pairs), 2)
    finding.gap_ratio = round(statistics.median(one.gap_ms / other.gap_ms for one, other in pairs), 2)
    finding.rounds = [
        {
            f"{beside.name.lower()}_{what}_ms": round(time_ms, 1)
            for beside, latency in one.items()
            for what, time_ms in (("first", latency.first_ms), ("gap", latency.gap_ms))
        }
        for one in rounds
    ]
    return finding


def check(stand: Stand) -> list[str]:
    """Block until the server is idle, then return any faults."""
    stand.wait_idle()
    faults = [f"{what} ({number} times)" for what, number in stand.undocumented.items()]
    stand.undocumented.clear()
    with stand.database.read() as connection:
        held = connection.execute(select(func.sum(schema.quota_counters.c.reserved))).scalar_one() or 0
    metrics = stand.metrics()
    billed = stand.num_billed() - stand.billed_before
    discarded = metrics["loramux_tokens_total", ("discarded",)]
    committed = metrics["loramux_engine_tokens_total", ("completion",)]
    if billed + discarded != committed:
        faults.append(
            f"{billed} tokens were billed and {discarded:.0f} discarded, but the engine committed {committed:.0f}"
        )
    if held:
        faults.append(f"{held} tokens are still reserved")
    leaked = metrics["loramux_engine_pages", ("kv",)] - metrics["loramux_engine_prefix_pages", ()]
    if leaked:
        faults.append(f"{leaked:.0f} pages have no owner")
    return faults


def _taken(notes: list[str]) -> list[str]:
    found, notes[:] = list(notes), []
    return found


def _p99_ms(asked: Sequence[Asked]) -> float | None:
    times = [one.first_token_s for one in asked if one.first_token_s is not None]
    return round(float(np.percentile(times, 99)) * 1e3, 1) if times else None


async def attack_all(
    stand: Stand, arguments: argparse.Namespace, kind: str, note: Note, bystanders: ThreadPoolExecutor
) -> None:
    only, seed = arguments.only, arguments.seed
    # Warm up with a small round, because descriptors that the server keeps open must not count as leaks.
    await count(stand, only, seed + 1, 40, kind, _forget)
    # Longer than a ramp, so that the server also makes what it makes only once, such as its OpenAPI document.
    await feel(stand, only, seed + 1, 1, RAMP_S + 2.0, kind, _forget, bystanders)
    await compare(stand, only, seed + 1, 1, 2.0, kind, _forget, bystanders)
    before = stand.num_descriptors()
    await count(stand, only, seed, arguments.calls, kind, note)
    await feel(stand, only, seed, arguments.rounds, arguments.stretch_s, kind, note, bystanders)
    await compare(stand, only, seed, arguments.comparisons, arguments.comparison_s, kind, note, bystanders)
    leaks = await asyncio.to_thread(leaked_descriptors, stand, before)
    faults = [f"more open descriptors than before: {leaks}"] if leaks else []
    note(Finding(kind, "all of them", {}, faults=faults))


def leaked_descriptors(stand: Stand, before: Counter[str]) -> dict[str, int]:
    """Return the descriptors that are open in addition, once checks of cancelled requests have run to their ends."""
    until_s = time.monotonic() + SETTLING_S + FULL.wall_s
    while (leaks := dict(stand.num_descriptors() - before)) and time.monotonic() < until_s:
        time.sleep(0.5)
    return leaks


def _forget(finding: Finding) -> None:
    pass


def _leave_the_processor_to_others() -> None:
    """Let this thread and its child threads use only idle CPU time: a real attacker has its own machine."""
    os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))


def main() -> int:
    arguments = _arguments()
    require_idle(arguments.allow_busy)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, max(soft, 4 * NUM_SOCKETS)), hard))
    findings: list[Finding] = []
    earlier = _earlier(arguments.out)

    def note(finding: Finding) -> None:
        findings.append(finding)
        if arguments.out is not None:
            _write(arguments, findings, earlier)

    for kind in track(arguments.databases, "attacking", console=open_console()):
        with (
            open_stand(kind) as stand,
            ThreadPoolExecutor(1) as bystanders,
            ThreadPoolExecutor(1, initializer=_leave_the_processor_to_others) as attackers,
        ):
            # A thread inherits the priority of the thread that started it.
            bystanders.submit(int).result()
            attackers.submit(asyncio.run, attack_all(stand, arguments, kind, note, bystanders)).result()
    _print(findings)
    return 1 if any(finding.faults for finding in findings) else 0


def _earlier(out: Path | None) -> list[dict[str, Any]]:
    """The findings of earlier runs in the file, because the whole campaign takes hours and can run in parts."""
    return msgspec.json.decode(out.read_bytes())["findings"] if out is not None and out.exists() else []


def _write(arguments: argparse.Namespace, findings: Sequence[Finding], earlier: Sequence[dict[str, Any]]) -> None:
    """Write the findings, and those of earlier runs for other attacks. Each names its commit."""
    machine = describe()
    replaced = {(one.database, one.attack) for one in findings}
    kept = [one for one in earlier if (one["database"], one["attack"]) not in replaced]
    document = {
        "machine": machine,
        "seed": arguments.seed,
        "calls": arguments.calls,
        "rounds": arguments.rounds,
        "stretch_s": arguments.stretch_s,
        "comparisons": arguments.comparisons,
        "comparison_s": arguments.comparison_s,
        "findings": kept + [asdict(finding) | {"commit": machine["commit"]} for finding in findings],
    }
    arguments.out.write_bytes(msgspec.json.format(msgspec.json.encode(document), indent=2) + b"\n")


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--databases", nargs="+", choices=DATABASES, default=DATABASES)
    parser.add_argument("--only", nargs="+", choices=ATTACKS, default=ATTACKS, metavar="ATTACK")
    parser.add_argument("--calls", type=int, default=600, help="number of calls per counted attack")
    parser.add_argument("--rounds", type=int, default=7, help="number of attacked and quiet periods per timed attack")
    parser.add_argument("--stretch-s", type=float, default=20.0, help="length of an attacked period, in seconds")
    parser.add_argument("--comparisons", type=int, default=7, help="number of rounds per tenant flood")
    parser.add_argument("--comparison-s", type=float, default=8.0, help="length of each third of a round, in seconds")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--out", type=Path, help="write the figures here as JSON, beside those of earlier runs")
    add_allow_busy(parser)
    return parser.parse_args()


def _print(findings: Sequence[Finding]) -> None:
    table = Table(title="effects of the attacks", show_lines=True)
    columns = (
        "database",
        "attack",
        "answers",
        "quiet p99 ms",
        "attacked p99 ms",
        "ratio",
        "gap ratio",
        "faults and notes",
    )
    for column in columns:
        table.add_column(column, justify="right" if "p99" in column or "ratio" in column else "left")
    for finding in findings:
        answers = ", ".join(f"{outcome}: {number}" for outcome, number in finding.outcomes.items())
        times = [finding.quiet_p99_ms, finding.attacked_p99_ms]
        table.add_row(
            finding.database,
            finding.attack,
            answers,
            *("" if time_ms is None else str(time_ms) for time_ms in times),
            "" if finding.first_token_ratio is None else f"{finding.first_token_ratio:.2f}",
            "" if finding.gap_ratio is None else f"{finding.gap_ratio:.2f}",
            "\n".join([*finding.faults, *finding.notes]) or "none",
        )
    open_console().print(table)


if __name__ == "__main__":
    sys.exit(main())
