"""Compares servers that forward requests to the holder of an adapter with the same servers behind round robin.

Clients send streamed requests to all servers in turn. Both variants have the same servers on one PostgreSQL and one
S3-compatible store, with pools that hold only a share of the adapters:

    round robin    each server answers its own requests, and loads every adapter that they name
    routed         the servers are started with --peer-address, and forward requests to each other

The hit rate is the share of requests that needed no adapter load on any server.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import track
from rich.table import Table

from benchmarks.machine import add_allow_busy, describe, require_idle
from benchmarks.peers.http_questions import post_all
from benchmarks.peers.model_files import make_model_files
from benchmarks.peers.system import SystemFailed
from benchmarks.random_model import SHAPES
from benchmarks.sharing.cluster import ClusterSetting, Server, Store, open_servers, open_store
from benchmarks.sharing.traffic import Sample, Traffic, run_traffic
from benchmarks.tables import open_console
from benchmarks.tenants.figures import percentile

FOLDER = Path(__file__).parent.parent
ROUND_ROBIN, ROUTED = "round robin", "routed"
THROUGHPUT_GOAL, FIRST_TOKEN_GOAL = 2.0, 0.5
"""Goals for throughput and for the p99 of the time to first token, relative to round robin. One must be met."""


@dataclass(slots=True)
class Rounds:
    samples: list[Sample] = field(default_factory=list)
    hit_rates: list[float] = field(default_factory=list)

    @property
    def tokens_s(self) -> float:
        return statistics.median(sample.num_tokens / sample.seconds for sample in self.samples)

    def first_token_s(self, percent: float) -> float:
        return percentile([seconds for sample in self.samples for seconds in sample.first_token_s], percent)

    def document(self) -> dict[str, Any]:
        return {
            "tokens_s": [round(sample.num_tokens / sample.seconds, 1) for sample in self.samples],
            "hit_rate": [round(rate, 4) for rate in self.hit_rates],
            "first_token_p50_s": round(self.first_token_s(50), 4),
            "first_token_p99_s": round(self.first_token_s(99), 4),
        }


def check_answers(servers: Sequence[Server], store: Store, vocab_size: int) -> list[str]:
    """One greedy answer of each adapter, from the servers in turn."""
    headers = {"authorization": f"Bearer {store.api_key}"}
    answers = [""] * len(store.models)
    prompt = [300 + number * 7 % (vocab_size - 300) for number in range(24)]
    for index, server in enumerate(servers):
        asked = range(index, len(store.models), len(servers))
        bodies = [
            {"model": store.models[number], "prompt": prompt, "max_tokens": 8, "temperature": 0.0, "ignore_eos": True}
            for number in asked
        ]
        documents, _ = post_all(f"{server.url}/v1/completions", bodies, headers)
        for number, document in zip(asked, documents, strict=True):
            answers[number] = document["choices"][0]["text"]
    if len(set(answers)) < len(answers) // 2:
        raise SystemFailed("different adapters give the same answers")
    return answers


def measure_round(
    servers: Sequence[Server], store: Store, traffic: Traffic, num_warm_up: int, number: int, rounds: Rounds
) -> None:
    bodies = traffic.bodies(store.models, f"{number}", traffic.num_requests)
    urls = [server.url for server in servers]
    # Let the pools fill, and let the servers learn which adapters the other servers hold.
    warm_up = traffic.bodies(store.models, f"warm-up {number}", num_warm_up)
    asyncio.run(run_traffic(urls, store.api_key, warm_up, traffic.num_clients))
    before = sum(server.loads(store.admin_key) for server in servers)
    sample = asyncio.run(run_traffic(urls, store.api_key, bodies, traffic.num_clients))
    num_loads = sum(server.loads(store.admin_key) for server in servers) - before
    rounds.samples.append(sample)
    rounds.hit_rates.append(1 - num_loads / len(bodies))


def measure(arguments: argparse.Namespace, console: Console) -> dict[str, Rounds]:
    files = make_model_files(arguments.scratch, arguments.size, arguments.adapters, arguments.rank)
    setting = ClusterSetting(
        base=files.base,
        num_servers=arguments.servers,
        num_resident=arguments.resident,
        disk_tier_bytes=arguments.disk_tier_mib << 20,
        threads=1,
        logs=arguments.scratch / "logs",
    )
    traffic = traffic_of(arguments)
    found = {ROUND_ROBIN: Rounds(), ROUTED: Rounds()}
    with tempfile.TemporaryDirectory(prefix="loramux-sharing-") as place:
        folder = Path(place)
        with open_store(setting, list(files.adapters.values()), folder) as store:
            expected: list[str] | None = None
            for number in track(range(arguments.rounds), description="rounds", console=console):
                for variant in (ROUND_ROBIN, ROUTED) if number % 2 else (ROUTED, ROUND_ROBIN):
                    data = folder / f"{variant}-{number}"
                    with open_servers(setting, store, data, variant == ROUTED) as servers:
                        answers = check_answers(servers, store, files.shape.vocab_size)
                        if answers != (expected := expected or answers):
                            raise SystemFailed("an adapter's answer depends on the server that gives it")
                        measure_round(servers, store, traffic, arguments.warm_up, number, found[variant])
    return found


def traffic_of(arguments: argparse.Namespace) -> Traffic:
    return Traffic(
        num_clients=arguments.clients,
        num_requests=arguments.requests,
        num_prompt=arguments.prompt,
        num_output=arguments.output,
        alpha=arguments.alpha,
        vocab_size=SHAPES[arguments.size].vocab_size,
    )


def report(found: dict[str, Rounds], console: Console) -> bool:
    table = Table("variant", "hit rate", "tokens/s", "first token p50", "first token p99")
    for variant, rounds in found.items():
        table.add_row(
            variant,
            f"{statistics.median(rounds.hit_rates):.3f}",
            f"{rounds.tokens_s:.1f}",
            f"{rounds.first_token_s(50) * 1000:.0f} ms",
            f"{rounds.first_token_s(99) * 1000:.0f} ms",
        )
    console.print(table)
    throughput = found[ROUTED].tokens_s / found[ROUND_ROBIN].tokens_s
    tail = found[ROUTED].first_token_s(99) / found[ROUND_ROBIN].first_token_s(99)
    is_met = throughput >= THROUGHPUT_GOAL or tail <= FIRST_TOKEN_GOAL
    console.print(
        f"routed over round robin: throughput {throughput:.2f} (goal {THROUGHPUT_GOAL}), p99 of the time to first "
        f"token {tail:.2f} (goal {FIRST_TOKEN_GOAL}); one of the two: {'met' if is_met else 'missed'}"
    )
    return is_met


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.sharing.round_robin",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--servers", type=int, default=3, help="number of servers")
    add("--adapters", type=int, default=60, help="number of adapters")
    add("--resident", type=int, default=20, help="adapters that fit into each server's pool")
    add("--disk-tier-mib", type=int, default=256, help="size of each server's disk tier, in MiB")
    add("--size", choices=sorted(SHAPES), default="small", help="shape of the random base model")
    add("--rank", type=int, default=64, help="rank of the adapters")
    add("--alpha", type=float, default=1.0, help="exponent of Zipf's law for the adapters' popularity")
    add("--clients", type=int, default=12, help="clients, each with one open request")
    add("--requests", type=int, default=240, help="requests in each round")
    add("--warm-up", type=int, default=360, help="requests before each round")
    add("--prompt", type=int, default=32, help="prompt tokens of a request")
    add("--output", type=int, default=16, help="new tokens of a request")
    add("--rounds", type=int, default=3, help="rounds, each with both variants")
    add("--scratch", type=Path, default=FOLDER / "scratch" / "sharing", help="folder for models and logs")
    add("--out", type=Path, help="write the figures to this JSON file")
    add_allow_busy(parser)
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    arguments = parse(argv)
    console = open_console()
    busy_before = require_idle(arguments.allow_busy)
    try:
        found = measure(arguments, console)
    except SystemFailed as error:
        console.print(f"[red]nothing was measured: {error}[/red]")
        return 1
    is_met = report(found, console)
    if arguments.out is not None:
        hidden = {"scratch", "out", "allow_busy"}
        document = {
            "date": datetime.now(UTC).isoformat(timespec="seconds"),
            "machine": describe(),
            "busy_before": round(busy_before, 3),
            "setting": {name: value for name, value in vars(arguments).items() if name not in hidden},
            "figures": {variant: rounds.document() for variant, rounds in found.items()},
            "met": is_met,
        }
        arguments.out.write_text(json.dumps(document, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
