"""Asks a server for ten times what it can do: `python -m tests.reliability.overload [--tenants N] [--minutes M]`.

A real server serves thousands of random adapters of hundreds of tenants, each of which asks for more than its share,
half of the requests in the tier `default` and half in `flex`. The base is SmolLM2-135M-Instruct, which the first run
downloads. First, as many clients as there are slots each send one request after another, and their goodput is the
capacity. Two groups of polite tenants, one of the tier `priority` and one of `default`, send half of what their shares
allow, first while the others ask for nine tenths of the capacity, and then beside the overload. In all loads, the
goodput counts the part of each answer that lies between a warm-up and the end of sending.

The server, the load and the engine share one machine, so all figures are those of a busy machine.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

from rich.console import Console

from benchmarks.s_lora.adapters import make_adapters
from loramux.adapter_store.registry.bases import Bases
from loramux.engine.architectures.model_files import base_sha256
from loramux.engine.protocol.service_tiers import TIER_FACTORS
from loramux.migrations.database import Database
from loramux.platform.accounts.api_keys import ApiKeys
from loramux.platform.accounts.tenants import TenantChanges, Tenants
from tests.conformance.demo_adapters import DEMO
from tests.conformance.served import Deployment, deployment
from tests.platform.ready_adapters import add_ready_adapter
from tests.real.models import prepare as prepare_model
from tests.reliability.growth import growth
from tests.reliability.open_loop import Counted, LoadSettings
from tests.reliability.process_samples import Sampler, process_usage
from tests.reliability.record import recorded


@dataclass(frozen=True, slots=True)
class Stand:
    """A base, and what it needs: the rank of its adapters, and a pool that is full before the overload begins."""

    directory: Callable[[], Path]
    rank: int
    pool_bytes: str


def _smollm2() -> Path:
    return prepare_model("smollm2", Console()).directory


STANDS = {"smollm2": Stand(_smollm2, 1, "128MiB"), "demo": Stand(lambda: DEMO / "base", 8, "64MiB")}

CROWD_TIERS = ("default", "flex")
POLITE_TIERS = ("priority", "default")
POLITE_SHARE = 0.5
"""What a polite tenant asks for, as a part of its share of the engine."""

POLITE_PART = 20
"""Number of tenants that ask for too much for each polite tenant of a tier."""

NORMAL_LOAD = 0.9
"""The load beside which polite tenants are compared with those beside the overload, as a part of the capacity."""

HOST_TIER_BYTES = "8MiB"
MAX_BATCH_TOKENS = 128
"""A step with more rows would take a good part of the longest time until the first token."""

MAX_CAPACITY_S = 120.0
"""How long the capacity is measured for at most, in seconds."""

WARM_PART = 0.25
"""The part of that time in which the caches and the pool become full. It does not count for the goodput of any load."""

NUM_SAMPLES = 240
RESOLUTION = 0.05
"""Growth of a memory that does not count, as a part of it."""

Caller = tuple[str, list[str]]


@dataclass(frozen=True, slots=True)
class Overloaded:
    deployment: Deployment
    crowd: list[Caller]
    polite: dict[str, list[Caller]]
    """The callers of each tier in POLITE_TIERS."""


def prepare(
    stand: Stand, directory: Path, num_tenants: int, num_adapters: int, num_slots: int, objective_s: float
) -> Overloaded:
    """Create the tenants and the adapters, without a server, whose validation would take most of the time."""
    base, data = stand.directory(), directory / "data"
    data.mkdir(mode=0o700)
    files = make_adapters(directory, base, num_adapters, stand.rank, print)
    base_id = base_sha256(base)
    database = Database(f"sqlite:///{data / 'loramux.db'}")
    database.upgrade()
    Bases(database).register(base_id, "demo-base")
    crowd = []
    for number in range(num_tenants):
        tenant = Tenants(database).create(f"tenant-{number}")
        models = []
        for digest in files.digests[number::num_tenants]:
            add_ready_adapter(database, tenant.id, digest[:12], [digest], base_id=base_id)
            models.append(f"{tenant.slug}/{digest[:12]}")
        crowd.append((ApiKeys(database).create(tenant.id, "key").secret, models or ["demo-base"]))
    polite: dict[str, list[Caller]] = {}
    for tier in POLITE_TIERS:
        polite[tier] = []
        for number in range(max(1, num_tenants // POLITE_PART)):
            tenant = Tenants(database).create(f"polite-{tier}-{number}")
            changes = TenantChanges(max_service_tier=tier, default_service_tier=tier)
            Tenants(database).update(tenant.id, changes, lambda _: None)
            polite[tier].append((ApiKeys(database).create(tenant.id, "key").secret, ["demo-base"]))
    database.close()
    # The pool and the host tier are small, because memory is taken when it is first written.
    environment = {
        "LORAMUX_MAX_SEQUENCES": str(num_slots),
        "LORAMUX_POOL_BYTES": stand.pool_bytes,
        "LORAMUX_HOST_TIER_BYTES": HOST_TIER_BYTES,
        "LORAMUX_MAX_BATCH_TOKENS": str(MAX_BATCH_TOKENS),
    }
    arguments = (
        "--blob-url",
        files.blob_url,
        "--tier-objectives",
        f"priority={objective_s}s,default={objective_s}s,flex={objective_s}s",
    )
    return Overloaded(deployment(base, data, arguments, environment), crowd, polite)


async def load(settings: LoadSettings) -> Counted:
    """Run a load in a process of its own."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "tests.reliability.open_loop"), stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    printed, _ = await process.communicate(json.dumps(asdict(settings)).encode() + b"\n")
    assert process.returncode == 0, "the load failed"
    return Counted(**json.loads(printed))


@dataclass(frozen=True, slots=True, kw_only=True)
class Figures:
    calm: Counted
    """As many requests as slots."""
    normal: dict[str, Counted]
    """Polite tenants beside the normal load, by tier."""
    beside: dict[str, Counted]
    """Polite tenants beside the overload, by tier."""
    crowd: Counted
    grown: dict[str, tuple[float, float]]
    """The growth of each role's memory and its bound, in megabytes."""

    @property
    def polite_ratio(self) -> float:
        return self.beside["priority"].first_token_ms["p99"] / self.normal["priority"].first_token_ms["p99"]

    @property
    def goodput_share(self) -> float:
        return (self.crowd.goodput + sum(one.goodput for one in self.beside.values())) / self.calm.goodput

    @property
    def growing(self) -> list[str]:
        return [role for role, (rise, bound) in self.grown.items() if rise > bound]


async def measure(stand: Overloaded, pid: int, arguments: argparse.Namespace) -> Figures:
    seconds = 60 * arguments.minutes
    calm_s = min(max(10.0, seconds / 3), MAX_CAPACITY_S)
    # A tenant that asks for two tiers has a share of each.
    weights = len(stand.crowd) * sum(TIER_FACTORS[tier] for tier in CROWD_TIERS)
    weights += sum(len(callers) * TIER_FACTORS[tier] for tier, callers in stand.polite.items())
    settings = partial(
        LoadSettings, port=stand.deployment.port, objective_s=arguments.objective_s, warm_s=WARM_PART * calm_s
    )
    crowd = partial(settings, callers=stand.crowd, service_tiers=[*CROWD_TIERS])
    calm = await load(crowd(seconds=calm_s, num_clients=arguments.slots, seed=1))
    capacity = calm.goodput
    print(f"capacity: {capacity:.2f} requests/s, {calm}")

    rates = {
        tier: POLITE_SHARE * capacity * len(callers) * TIER_FACTORS[tier] / weights
        for tier, callers in stand.polite.items()
    }

    def polite(tier: str, seconds: float, seed: int) -> LoadSettings:
        return settings(callers=stand.polite[tier], skew=0.0, rate=rates[tier], seconds=seconds, seed=seed)

    async def polite_beside(crowd_rate: float, seconds: float, seed: int) -> tuple[Counted, dict[str, Counted]]:
        crowded, *besides = await asyncio.gather(
            load(crowd(seconds=seconds, rate=crowd_rate, seed=seed)),
            *(load(polite(tier, seconds, seed)) for tier in POLITE_TIERS),
        )
        return crowded, dict(zip(POLITE_TIERS, besides, strict=True))

    # As long as the overload, because a high quantile of few requests grows with their number.
    _, normal = await polite_beside(NORMAL_LOAD * capacity - sum(rates.values()), seconds, 5)
    print(f"beside the normal load: {normal}")
    with Sampler(partial(process_usage, pid), seconds / NUM_SAMPLES) as sampler:
        crowded, beside = await polite_beside(arguments.multiple * capacity, seconds, 4)
    print(f"overload: {crowded}\nbeside: {beside}")
    memory = {name: series for name, series in sampler.series.items() if name.endswith("MB")}
    grown = {name: growth(series, RESOLUTION) for name, series in memory.items()}
    print(f"memory: { {name: [round(one, 1) for one in pair] for name, pair in grown.items()} }")
    return Figures(calm=calm, normal=normal, beside=beside, crowd=crowded, grown=grown)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.reliability.overload", description=__doc__)
    parser.add_argument("--base", choices=STANDS, default="smollm2")
    parser.add_argument("--tenants", type=int, default=500)
    parser.add_argument("--adapters", type=int, default=2000)
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--multiple", type=float, default=10.0, help="the load, as a multiple of the capacity")
    parser.add_argument("--slots", type=int, default=16, help="sequences that the engine runs at the same time")
    parser.add_argument("--objective-s", type=float, default=2.0, help="longest time until the first token")
    arguments = parser.parse_args(argv)
    with tempfile.TemporaryDirectory(prefix="loramux-overload-") as directory, recorded("overload") as figures:
        sizes = arguments.tenants, arguments.adapters, arguments.slots
        stand = prepare(STANDS[arguments.base], Path(directory), *sizes, arguments.objective_s)
        with stand.deployment.running(Path(directory) / "server.log") as server:
            found = asyncio.run(measure(stand, server.pid, arguments))
        figures |= {
            "minutes": arguments.minutes,
            "tenants": arguments.tenants,
            "adapters": arguments.adapters,
            "refused": found.crowd.num_refused,
            "goodput_share": round(found.goodput_share, 3),
            "refusal_p99_ms": found.crowd.refusal_ms["p99"],
            "capacity": round(found.calm.goodput, 1),
            "polite_ratio": round(found.polite_ratio, 2),
            "polite_refused_share": round(found.beside["priority"].refused_share, 3),
            "polite_default_refused_share": round(found.beside["default"].refused_share, 3),
            "growing": len(found.growing),
        }
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
