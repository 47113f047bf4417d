"""Measures engines in a Ray cluster against servers that run their own: overheads, and the choice of replicas.

Everything but the engines is loramux as it is run: servers with accounts, a ledger in PostgreSQL, and Ray Serve. An
engine is a process without a model, whose tokens carry the time (benchmarks/sharing/stamping_engine.py).

Overheads: clients stream answers, and each sends its next request after the last answer. The first token leaves the
engine at once, so the time until it arrives is the overhead of a request. The age of a later token is the overhead of a
chunk. All ways use one adapter, which their engine holds:

    one server         the server runs the engine
    another server     the server forwards each request to a second server, whose engine holds the adapter
    ray handles        the server runs in front of a cluster with one replica
    ray proxy          Ray Serve runs the gateway too, and its proxy takes the requests

Choice of replicas: requests arrive at random times, for adapters that follow Zipf's law. There are three engines, each
of which holds some of the adapters, and loading one takes a while. The hit rate is 1 minus the loads per request:

    ray, our router    a server in front of three replicas
    ray, default       the same, but each request is a call of a handle, and Ray Serve's default router chooses
    ray, multiplexed   the same, with Ray Serve's model multiplexing
    own servers        three servers that share requests
    round robin        three servers that do not

`make bench NAME=cluster` runs in the environment of `make test-cluster`, which has Ray.
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import msgspec
import uvloop

from benchmarks.accounts.databases import open_database_at
from benchmarks.cluster.deployer import MULTIPLEXED, PLAIN
from benchmarks.cluster.environment import enter_environment
from benchmarks.cluster.streams import Overheads, measure
from benchmarks.cluster.systems import System, World, gateway_behind_proxy, make_world, server_of_cluster, servers
from benchmarks.gateway.clients import Load
from benchmarks.harness import Run, begin, exit_on_sigterm, new_parser, percentiles_ms, reports_failure
from benchmarks.peers.system import SystemFailed
from benchmarks.sharing.stamping_engine import StampScript
from benchmarks.sharing.traffic import Traffic, run_arrivals
from benchmarks.tables import table
from tests.platform.ready_adapters import digest_of

ADAPTER = "adapter-0"
VOCAB_SIZE = 1024
"""Number of tokens of the demo base."""
PROMPT_TOKENS = 32
NUM_ENGINES = 3

Open = Callable[[World, StampScript], AbstractContextManager[System]]


@contextmanager
def _one_server(world: World, script: StampScript) -> Iterator[System]:
    with servers(world, "one", [script], is_sharing=False) as system:
        yield system


@contextmanager
def _another_server(world: World, script: StampScript) -> Iterator[System]:
    with servers(world, "pair", [_without_adapters(script), script], is_sharing=True) as system:
        # Only the first server gets requests.
        yield dataclasses.replace(system, urls=system.urls[:1])
        if system.forwarded() == 0:
            raise SystemFailed("no request ran on another server")


def _without_adapters(script: StampScript) -> StampScript:
    """The script of an engine that holds no adapter."""
    return msgspec.structs.replace(script, resident=())


OVERHEADS: dict[str, Open] = {
    "one server": _one_server,
    "another server": _another_server,
    "ray handles": lambda world, script: server_of_cluster(world, "handles", script, 1),
    "ray proxy": lambda world, script: gateway_behind_proxy(world, "proxy", script),
}
ROUTERS: dict[str, Open] = {
    "ray, our router": lambda world, script: server_of_cluster(world, "ours", script, NUM_ENGINES),
    "ray, default": lambda world, script: server_of_cluster(world, "default", script, NUM_ENGINES, PLAIN),
    "ray, multiplexed": lambda world, script: server_of_cluster(world, "multi", script, NUM_ENGINES, MULTIPLEXED),
    "own servers": lambda world, script: servers(world, "own", [script] * NUM_ENGINES, is_sharing=True),
    "round robin": lambda world, script: servers(world, "robin", [script] * NUM_ENGINES, is_sharing=False),
}


def measure_overheads(run: Run, world: World) -> list[dict[str, Any]]:
    options, rows = run.arguments, []
    script = msgspec.structs.replace(
        world.script, interval_s=options.interval_ms / 1000, resident=(digest_of(ADAPTER),)
    )
    for way in options.overheads:
        run.console.print(f"overheads: {way}")
        with OVERHEADS[way](world, script) as system:
            for num_clients in options.clients:
                found = _overheads(options, system, num_clients)
                row = {"way": way, "clients": num_clients, "proxy": world.proxy if way == "ray proxy" else None}
                rows.append(row | {"request": _figures(found.requests_s), "chunk": _figures(found.chunks_s)})
    return rows


def _overheads(options: argparse.Namespace, system: System, num_clients: int) -> Overheads:
    load = Load(
        num_clients=num_clients,
        num_tokens=options.tokens,
        is_streamed=True,
        step_us=0,
        seconds=options.seconds,
        ramp_s=options.interval_ms / 1000,
    )
    # The first requests open connections and caches.
    warm_up = dataclasses.replace(load, seconds=1.0)
    uvloop.run(measure(system.address, f"bench/{ADAPTER}", warm_up))
    return uvloop.run(measure(system.address, f"bench/{ADAPTER}", load))


def _figures(seconds: Sequence[float]) -> dict[str, float]:
    return {**percentiles_ms(seconds, 50, 99), "count": len(seconds)}


def measure_routers(run: Run, world: World) -> list[dict[str, Any]]:
    options, rows = run.arguments, []
    for way in options.routers:
        counts = world.folder / f"counts-{way.replace(', ', '-').replace(' ', '-')}"
        counts.touch()
        script = msgspec.structs.replace(
            world.script,
            interval_s=options.interval_ms / 1000,
            load_s=options.load_ms / 1000,
            num_slots=options.resident,
            capacity=options.capacity,
            counts=str(counts),
        )
        run.console.print(f"choice of replicas: {way}")
        with ROUTERS[way](world, script) as system:
            for alpha in options.alpha:
                rows.append({"way": way, "zipf": alpha, **_routed(options, world, system, alpha, counts)})
    return rows


def _routed(options: argparse.Namespace, world: World, system: System, alpha: float, counts: Path) -> dict[str, Any]:
    traffic = Traffic(num_prompt=PROMPT_TOKENS, num_output=options.tokens, alpha=alpha, vocab_size=VOCAB_SIZE)

    def arrive(part: str, num_requests: int) -> list[float]:
        seed = f"{part} {alpha}"
        bodies = traffic.bodies(world.models, seed, num_requests)
        return asyncio.run(run_arrivals(system.urls, world.api_key, bodies, options.rate, seed)).first_token_s

    arrive("warm-up", options.warm_up)
    before = counts.stat().st_size
    first_token_s = arrive("measured", options.requests)
    found = counts.read_bytes()[before:]
    num_sequences, num_loads = found.count(b"s"), found.count(b"l")
    if num_sequences != options.requests:
        raise SystemFailed(f"the engines ran {num_sequences} sequences instead of {options.requests}")
    return {
        "hit_rate": round(1 - num_loads / num_sequences, 4),
        "first_token": {**percentiles_ms(first_token_s, 50, 90, 99, digits=1), "count": len(first_token_s)},
    }


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = new_parser("cluster", __doc__)
    add = parser.add_argument
    add("--overheads", choices=OVERHEADS, nargs="*", default=list(OVERHEADS), help="ways to measure; may be empty")
    add("--routers", choices=ROUTERS, nargs="*", default=list(ROUTERS), help="ways to measure; may be empty")
    add("--proxy", choices=("haproxy", "default"), default="haproxy", help="Ray Serve's proxy")
    add("--clients", type=int, nargs="+", default=[1, 32])
    add("--seconds", type=float, default=20.0, help="time in which the clients of the overheads begin requests")
    add("--tokens", type=int, default=8, help="tokens of each answer")
    add("--interval-ms", type=float, default=40.0, help="time between two steps of an engine")
    add("--adapters", type=int, default=60)
    add("--resident", type=int, default=20, help="adapters that each engine holds")
    add("--capacity", type=int, default=8, help="sequences that each engine runs at once")
    add("--load-ms", type=float, default=250.0, help="time to load an adapter")
    add("--alpha", type=float, nargs="+", default=[0.0, 1.0], help="exponents of Zipf's law; 0 is uniform")
    add("--rate", type=float, default=24.0, help="requests per second")
    add("--warm-up", type=int, default=250, help="requests before each measurement, which fill the pools")
    add("--requests", type=int, default=500, help="requests of each measurement")
    return parser.parse_args(argv)


def report(run: Run, overheads: list[dict[str, Any]], routers: list[dict[str, Any]]) -> None:
    if overheads:
        kinds, cuts = ("request", "chunk"), ("p50", "p99")
        headings = ("way", "clients", *(f"{kind} {cut}" for kind in kinds for cut in cuts))
        shown = [
            [row["way"], str(row["clients"]), *(f"{row[kind][f'{cut}_ms']:.2f}" for kind in kinds for cut in cuts)]
            for row in overheads
        ]
        run.console.print(table("overheads, in milliseconds", headings, shown))
    if routers:
        headings = ("way", "Zipf", "hit rate", "first token p50", "p90", "p99")
        shown = [
            [
                row["way"],
                f"{row['zipf']:g}",
                f"{row['hit_rate']:.3f}",
                *(f"{row['first_token'][f'p{cut}_ms']:.0f} ms" for cut in (50, 90, 99)),
            ]
            for row in routers
        ]
        run.console.print(table("choice of replicas", headings, shown))


@reports_failure
def main(argv: Sequence[str] | None = None) -> int:
    arguments = parse(argv)
    enter_environment("benchmarks.cluster", sys.argv[1:] if argv is None else argv)
    run = begin(arguments)
    exit_on_sigterm()
    with tempfile.TemporaryDirectory(prefix="loramux-bench-") as place, open_database_at("postgresql") as (data, url):
        world = make_world(Path(place), data, url, arguments.adapters, arguments.proxy)
        overheads = measure_overheads(run, world)
        routers = measure_routers(run, world)
    report(run, overheads, routers)
    hidden = ("out", "allow_busy")
    setting = {name: value for name, value in vars(arguments).items() if name not in hidden}
    run.write({"setting": setting, "overheads": overheads, "routers": routers})
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
