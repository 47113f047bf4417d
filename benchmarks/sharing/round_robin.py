"""Compares answering each request on the server that receives it with forwarding it to a server with its adapter.

Clients send streaming requests to all servers in turn. Both variants run the same number of servers on one PostgreSQL
database and one S3-compatible store, with pools that hold only some of the adapters:

    round robin    each server answers the requests that it receives, and loads every adapter that they name
    routed         the servers are started with --peer-address, and forward requests to each other

Popularity is uniform (exponent 0) or follows Zipf's law. For each exponent, requests fill the pools first. Throughput
is then measured with clients that each have one open request, and the time to first token with random arrivals. The
rate of arrivals is a fixed share of round robin's throughput, and the same for both variants.

The hit rate is 1 minus the number of adapter loads per request, over all servers. A server's disk tier holds about as
many adapters as its pool, and its host tier holds none. Other adapters come from the store, as on servers with far more
adapters than their disks hold.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console

from benchmarks.answers import CheckError
from benchmarks.harness import SCRATCH, begin, new_parser, percentile, reports_failure
from benchmarks.peers.child_server import NO_DRAFTS
from benchmarks.peers.http_questions import post_all
from benchmarks.peers.model_files import make_model_files
from benchmarks.random_model import SHAPES
from benchmarks.sharing.cluster import LOADS, ClusterSetting, Server, Store, open_servers, open_store
from benchmarks.sharing.traffic import Traffic, run_arrivals, run_clients
from benchmarks.tables import table

ROUND_ROBIN, ROUTED = "round robin", "routed"
THROUGHPUT_GOAL, FIRST_TOKEN_GOAL = 2.0, 0.5
"""Goals for throughput and for the p99 of the time to first token, relative to round robin. One of the two must be
met."""


@dataclass(slots=True)
class Rounds:
    """The measurements of one variant at one popularity.

    `num_loads` is the number of adapter loads, and `stage_s` is the time spent in each stage of loading, in seconds.
    Both exclude the warm-up.
    """

    tokens_s: list[float] = field(default_factory=list)
    requests_s: list[float] = field(default_factory=list)
    hit_rates: list[float] = field(default_factory=list)
    first_token_s: list[float] = field(default_factory=list)
    num_loads: float = 0.0
    stage_s: dict[str, float] = field(default_factory=dict)

    def document(self) -> dict[str, Any]:
        return {
            "tokens_s": [round(one, 1) for one in self.tokens_s],
            "hit_rate": [round(one, 4) for one in self.hit_rates],
            "first_token_ms": {f"p{percent}": self.first_token_ms(percent) for percent in (50, 90, 99)},
            "num_loads": round(self.num_loads),
            "load_ms_by_stage": {name: round(1000 * s / self.num_loads, 1) for name, s in sorted(self.stage_s.items())}
            if self.num_loads
            else {},
        }

    def first_token_ms(self, percent: float) -> float:
        return round(1000 * percentile(self.first_token_s, percent), 1)


Found = dict[float, dict[str, Rounds]]
"""The measurements by exponent and variant."""


def check_answers(servers: Sequence[Server], store: Store, vocab_size: int) -> list[str]:
    """Return one greedy answer per adapter, requested from the servers in turn."""
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
        raise CheckError("different adapters give the same answers")
    return answers


def count(servers: Sequence[Server], store: Store) -> dict[str, float]:
    """Each counter's sum over all servers."""
    totals: dict[str, float] = {}
    for server in servers:
        for name, value in server.counters(store.admin_key).items():
            totals[name] = totals.get(name, 0.0) + value
    return totals


def measure_popularity(
    arguments: argparse.Namespace,
    servers: Sequence[Server],
    store: Store,
    alpha: float,
    seed: str,
    requests_s: float | None,
    rounds: Rounds,
) -> None:
    traffic = Traffic(
        num_prompt=arguments.prompt,
        num_output=arguments.output,
        alpha=alpha,
        vocab_size=SHAPES[arguments.size].vocab_size,
    )
    urls, key = [server.url for server in servers], store.api_key
    warm_up, closed, open_loop = (
        traffic.bodies(store.models, f"{part} {seed}", num_requests)
        for part, num_requests in (
            ("warm-up", arguments.warm_up),
            ("closed", arguments.requests),
            ("open", arguments.requests),
        )
    )
    # Let the pools fill, and let the servers learn which adapters the other servers hold.
    asyncio.run(run_clients(urls, key, warm_up, arguments.clients))
    before = count(servers, store)
    sample = asyncio.run(run_clients(urls, key, closed, arguments.clients))
    rounds.tokens_s.append(sample.num_tokens / sample.seconds)
    rounds.requests_s.append(len(closed) / sample.seconds)
    rate = arguments.load * (rounds.requests_s[-1] if requests_s is None else requests_s)
    rounds.first_token_s += asyncio.run(run_arrivals(urls, key, open_loop, rate, seed)).first_token_s
    grown = {name: value - before.get(name, 0.0) for name, value in count(servers, store).items()}
    num_loads = grown.pop(LOADS)
    rounds.num_loads += num_loads
    for name, seconds in grown.items():
        rounds.stage_s[name] = rounds.stage_s.get(name, 0.0) + seconds
    rounds.hit_rates.append(1 - num_loads / (len(closed) + len(open_loop)))


def measure(arguments: argparse.Namespace, console: Console) -> Found:
    files = make_model_files(arguments.scratch, arguments.size, arguments.adapters, arguments.rank)
    setting = ClusterSetting(
        base=files.base,
        num_servers=arguments.servers,
        num_resident=arguments.resident,
        disk_tier_bytes=arguments.disk_tier_mib << 20,
        threads=1,
        logs=arguments.scratch / "logs",
    )
    found: Found = {alpha: {ROUND_ROBIN: Rounds(), ROUTED: Rounds()} for alpha in arguments.alpha}
    with tempfile.TemporaryDirectory(prefix="loramux-sharing-") as place:
        folder = Path(place)
        console.print(f"pushing {len(files.adapters)} adapters")
        with open_store(setting, list(files.adapters.values()), folder) as store:
            expected: list[str] | None = None
            for number in range(arguments.rounds):
                # The first round begins with round robin, whose throughput determines the rate of arrivals.
                for variant in (ROUTED, ROUND_ROBIN) if number % 2 else (ROUND_ROBIN, ROUTED):
                    console.print(f"round {number + 1} of {arguments.rounds}: {variant}")
                    data = folder / f"{variant}-{number}"
                    with open_servers(setting, store, data, variant == ROUTED) as servers:
                        answers = check_answers(servers, store, files.shape.vocab_size)
                        if answers != (expected := expected or answers):
                            raise CheckError("an adapter's answer depends on the server that gives it")
                        for alpha, rounds in found.items():
                            first = next(iter(rounds[ROUND_ROBIN].requests_s), None)
                            measure_popularity(
                                arguments, servers, store, alpha, f"{alpha} {number}", first, rounds[variant]
                            )
    return found


def report(found: Found, console: Console) -> bool:
    rows = [
        (
            popularity(alpha),
            variant,
            f"{statistics.median(one.hit_rates):.3f}",
            f"{statistics.median(one.tokens_s):.1f}",
            *(f"{one.first_token_ms(percent):.0f} ms" for percent in (50, 90, 99)),
        )
        for alpha, rounds in found.items()
        for variant, one in rounds.items()
    ]
    headings = ("popularity", "variant", "hit rate", "tokens/s", "first token p50", "p90", "p99")
    console.print(table("servers that share requests", headings, rows, num_left=2))
    are_met = []
    for alpha, rounds in found.items():
        throughput = statistics.median(rounds[ROUTED].tokens_s) / statistics.median(rounds[ROUND_ROBIN].tokens_s)
        tail = rounds[ROUTED].first_token_ms(99) / rounds[ROUND_ROBIN].first_token_ms(99)
        are_met.append(throughput >= THROUGHPUT_GOAL or tail <= FIRST_TOKEN_GOAL)
        console.print(
            f"{popularity(alpha)}, routed over round robin: throughput {throughput:.2f} (goal {THROUGHPUT_GOAL}), "
            f"p99 of the time to first token {tail:.2f} (goal {FIRST_TOKEN_GOAL}); one of the two: "
            f"{'met' if are_met[-1] else 'missed'}"
        )
    return all(are_met)


def popularity(alpha: float) -> str:
    return f"Zipf {alpha:g}" if alpha else "uniform"


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = new_parser("sharing.round_robin", __doc__)
    add = parser.add_argument
    add("--servers", type=int, default=3, help="number of servers")
    add("--adapters", type=int, default=60, help="number of adapters")
    add("--resident", type=int, default=20, help="adapters that fit into each server's pool")
    add("--disk-tier-mib", type=int, default=128, help="size of each server's disk tier, in MiB")
    add("--size", choices=sorted(SHAPES), default="small", help="shape of the random base model")
    add("--rank", type=int, default=32, help="rank of the adapters")
    add("--alpha", type=float, nargs="+", default=[0.0, 1.0], help="exponents of Zipf's law; 0 is uniform")
    add("--clients", type=int, default=12, help="clients of the throughput measurement, each with one open request")
    add("--load", type=float, default=0.5, help="rate of random arrivals, relative to round robin's throughput")
    add("--requests", type=int, default=200, help="requests of each measurement")
    add("--warm-up", type=int, default=200, help="warm-up requests before each popularity is measured")
    add("--prompt", type=int, default=32, help="prompt tokens of a request")
    add("--output", type=int, default=16, help="new tokens of a request")
    add("--rounds", type=int, default=2, help="rounds, each with both variants")
    add("--scratch", type=Path, default=SCRATCH / "sharing", help="folder for models and logs")
    return parser.parse_args(argv)


@reports_failure
def main(argv: Sequence[str] | None = None) -> int:
    run = begin(parse(argv))
    found = measure(run.arguments, run.console)
    is_met = report(found, run.console)
    hidden = {"scratch", "out", "allow_busy"}
    figures = {
        popularity(alpha): {variant: one.document() for variant, one in rounds.items()}
        for alpha, rounds in found.items()
    }
    setting = {name: value for name, value in vars(run.arguments).items() if name not in hidden}
    setting["speculate"] = NO_DRAFTS[1]
    run.write({"setting": setting, "figures": figures, "met": is_met})
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
