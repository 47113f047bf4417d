"""Measures the time that forwarding a sequence to another server adds, compared with using the local engine.

There are three processes: an engine whose tokens carry the time, a server that relays to this engine, and this process.
This process reaches the engine in two ways in turn: directly over the socket, and through the server over TLS. The
engine sends the first token at once, so the time from the submission to the first token is the overhead of a request.
The age of each later token at its arrival is the overhead of a chunk.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import uvloop

from benchmarks.answers import CheckError, RunFailed
from benchmarks.harness import begin, new_parser, reports_failure
from benchmarks.sharing.stamping_engine import StampScript, passed_s
from benchmarks.tables import table
from loramux.engine.protocol.messages import Add, Finished, SamplingParams
from loramux.platform.engine_link.engine_connection import EngineConnection
from loramux.platform.engine_link.engine_session import EngineSession
from loramux.platform.replicas.certificates import OwnCertificates, read_certificates
from loramux.platform.replicas.peer_connection import PeerConnection

PROMPT = tuple(range(512))
SLACK, SLACK_S = 4, 30.0
"""A round fails if it takes longer than this factor times its usual duration, and this many seconds more."""


@dataclass(frozen=True, slots=True)
class Sample:
    requests_s: list[float]
    chunks_s: list[float]


async def ask(session: EngineSession, name: str, num_tokens: int, sample: Sample) -> None:
    add = Add(sequence_id=name, prompt=PROMPT, max_tokens=num_tokens, sampling=SamplingParams(num_logprobs=0))
    begin_s, num_received = time.monotonic(), 0
    async for item in session.submit(add):
        if isinstance(item, Finished):
            break
        if num_received == 0:
            sample.requests_s.append(time.monotonic() - begin_s)
        else:
            sample.chunks_s.append(passed_s(item.logprobs[0].logprob, time.monotonic()))
        num_received += len(item.token_ids)
    if num_received != num_tokens:
        raise CheckError(f"{num_received} tokens arrived instead of {num_tokens}")


async def run_clients(
    session: EngineSession, num_clients: int, num_requests: int, num_tokens: int, sample: Sample, timeout_s: float
) -> None:
    async def client(number: int) -> None:
        for turn in range(num_requests):
            await ask(session, f"{number}-{turn}", num_tokens, sample)

    clients = asyncio.gather(*(client(number) for number in range(num_clients)))
    lost = asyncio.create_task(session.wait_lost())
    await asyncio.wait((clients, lost), timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
    is_lost = lost.done()
    lost.cancel()
    if not clients.done():
        clients.cancel()
        # The session's owner ends the streams of a lost connection. Nobody does so here, and the clients would wait.
        raise RunFailed("a connection ended before its answers" if is_lost else f"no end after {timeout_s:.0f} s")
    await clients


@asynccontextmanager
async def connected(path: Path, server: subprocess.Popen[str]) -> AsyncIterator[dict[str, EngineSession]]:
    """Connect to the engine at `path` directly, and through `server`."""
    assert server.stdin is not None
    assert server.stdout is not None
    own = OwnCertificates("client")
    told = json.loads(server.stdout.readline())
    server.stdin.write(json.dumps({"certificates": own.pem}) + "\n")
    server.stdin.flush()
    server.stdout.readline()
    certificates = read_certificates("server", told["certificates"])
    local = await EngineConnection.open(path, lambda *_: None)
    peer = await PeerConnection.open("127.0.0.1", told["port"], own.in_use, certificates, lambda *_: None, 10.0)
    yield {"own engine": local, "another server": peer}
    local.close(frozenset())
    peer.close(frozenset())


@contextmanager
def processes(interval_ms: float) -> Iterator[tuple[Path, subprocess.Popen[str]]]:
    """Start an engine and a server that relays to it. Yield the engine's socket and the server."""
    with tempfile.TemporaryDirectory(prefix="loramux-bench-") as directory:
        path = Path(directory, "engine.sock")
        python = (sys.executable, "-m")
        script = msgspec.json.encode(StampScript(interval_s=interval_ms / 1000)).decode()
        engine = subprocess.Popen([*python, "benchmarks.sharing.stamping_engine", script, str(path)])
        command = [*python, "benchmarks.sharing.peer_server", str(path)]
        server = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        try:
            yield path, server
        finally:
            engine.kill()
            server.kill()
            engine.wait()
            server.communicate()


def figures(times_s: Sequence[float]) -> dict[str, float]:
    cuts = statistics.quantiles(times_s, n=100)
    return {"p50_us": round(1e6 * cuts[49]), "p99_us": round(1e6 * cuts[98]), "count": len(times_s)}


async def measure(
    options: argparse.Namespace, path: Path, server: subprocess.Popen[str], say: Callable[[str], None]
) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    usual_s = options.requests * options.tokens * options.interval_ms / 1000
    async with connected(path, server) as sessions:
        for num_clients in options.clients:
            samples = {way: Sample([], []) for way in sessions}
            for number in range(options.rounds):
                say(f"{num_clients} clients, round {number + 1} of {options.rounds}, {2 * usual_s:.0f} s")
                for way, session in sessions.items():
                    limits = (options.requests, options.tokens)
                    await run_clients(session, num_clients, *limits, samples[way], SLACK_S + SLACK * usual_s)
            for way, sample in samples.items():
                rows.append(
                    {
                        "clients": num_clients,
                        "way": way,
                        "request": figures(sample.requests_s),
                        "chunk": figures(sample.chunks_s),
                    }
                )
    return rows


@reports_failure
def main(argv: Sequence[str] | None = None) -> int:
    parser = new_parser("sharing.forwarding", __doc__)
    add = parser.add_argument
    add("--clients", type=int, nargs="+", default=[1, 32])
    add("--requests", type=int, default=10, help="requests of each client per round")
    add("--tokens", type=int, default=32, help="tokens of each answer")
    add("--rounds", type=int, default=3)
    add("--interval-ms", type=float, default=20.0, help="time between two steps")
    run = begin(parser.parse_args(argv))
    with (
        processes(run.arguments.interval_ms) as (path, server),
        asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner,
    ):
        rows = runner.run(measure(run.arguments, path, server, run.console.print))
    kinds, cuts = ("request", "chunk"), ("p50", "p99")
    shown = [
        [str(row["clients"]), row["way"], *(str(row[kind][f"{cut}_us"]) for kind in kinds for cut in cuts)]
        for row in rows
    ]
    headings = ("clients", "way", *(f"{kind} {cut}" for kind in kinds for cut in cuts))
    run.console.print(table("forwarding, in microseconds", headings, shown, num_left=2))
    workload = {name: getattr(run.arguments, name) for name in ("requests", "tokens", "rounds", "interval_ms")}
    run.write({"workload": {**workload, "prompt_tokens": len(PROMPT)}, "rows": rows})
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
