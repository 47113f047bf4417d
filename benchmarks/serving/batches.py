"""Measures a polite tenant beside a full batch of another tenant, and the throughput of a batch, on a whole server.

The server and its files are those of `benchmarks.serving`. The run measures, in this order:

    saturated   the output tokens per second of a closed loop with more open requests than sequences
    rounds      a polite tenant's Poisson arrivals, alone and beside a batch that never ends; the order alternates
    batch       the output tokens per second of a batch alone, alternating with those of the closed loop, and the
                gateway's processor time per line

The results are the p99 of a round's times to first token beside the batch, divided by the p99 alone, as the median of
the rounds and for the times of all rounds together; the throughput of the batch, divided by the saturated one before
or after it, as the median; and the share of the engine's sequences that a step of the batch fills. On a CPU, the client
of the saturated load uses the engine's cores and a batch has no client, which flatters the batch, and the rows of a
batch's step are limited, which limits that share.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import random
import statistics
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any, NamedTuple

import torch

from benchmarks.answers import CheckError
from benchmarks.harness import exit_on_sigterm, finite, percentile, reports_failure, rotated
from benchmarks.peers.child_server import processor_s
from benchmarks.serving.__main__ import BASE_NAME, WARM_S, Server, Serving, add_server, begin
from benchmarks.serving.clients import arrivals, closed_loop, greedy, open_loop
from benchmarks.serving.files import make_adapters
from loramux.admin.bench.asks import COMPLETIONS, Ask
from loramux.admin.client.batch_client import BatchClient
from loramux.admin.client.openai_server import OpenAIServer
from loramux.engine.scheduling.scheduler import QUIET_STEPS

ALONE, BESIDE = WAYS = ("alone", "beside a batch")
POLITE = "polite"
URL = "/v1/completions"
MAX_RATIO, MIN_SHARE = 1.15, 0.95
NUM_PAIRS = 4
"""Number of times that the throughput of a batch and the saturated one are compared."""

QUIET_S = 10.0
"""Time within which a batch alone begins to fill the engine's steps."""

PATIENCE_S = 120.0
POLL_S = 0.2


class BatchRate(NamedTuple):
    tokens_s: float
    """Output tokens per second."""
    filled_share: float
    """Output tokens per step and sequence of the engine."""
    line_ms: float
    """The gateway's processor time per line."""


class Measurement:
    def __init__(self, serving: Serving, server: Server, scratch: Path) -> None:
        self.serving = serving
        self.arguments = serving.arguments
        self.server = server
        self.scratch = scratch
        server.client.post("tenants", {"slug": POLITE})
        key = server.client.post("api_keys", {"tenant": POLITE, "name": "bench"})["secret"]
        self.polite = OpenAIServer(url=server.api.url, key=key)
        self._seeds = itertools.count()
        self.capacity = 0.0
        """Saturated requests per second."""

    def saturated(self) -> float:
        """Return the engine's output tokens per second when requests always wait."""
        arguments = self.arguments
        return closed_loop(self.server.api, self._new_asks(), arguments.open, WARM_S, arguments.seconds).tokens_s

    def first_tokens(self, number: int, way: str) -> list[float]:
        """Return the polite tenant's times to first token in round `number`, whose requests always come at the same
        times. Each way has its own prompts. Otherwise, the prefix cache would have those of the second way.
        """
        dice, arguments = random.Random(number), self.arguments
        asks = self._polite_asks(random.Random(f"{number} {way}"))
        due = arrivals(asks, arguments.load * self.capacity, arguments.seconds + WARM_S, dice.random)
        return open_loop(self.polite, due, WARM_S, arguments.seconds).first_tokens_s

    @contextmanager
    def batch(self, seconds: float) -> Iterator[BatchClient]:
        """Run a batch with work for more than `seconds`, and cancel it. Raises CheckError if it has ended before."""
        num_lines = math.ceil(2 * self.capacity * (seconds + WARM_S)) + 2 * self.arguments.sequences
        asks = self._new_asks()
        file = self.scratch / "batch.jsonl"
        with file.open("w") as lines:
            for number in range(num_lines):
                lines.write(json.dumps(_line(number, next(asks))) + "\n")
        with BatchClient(self.server.api) as client:
            self.batch_id = client.create(client.upload(file)["id"], URL)["id"]
            self._until(client, lambda found: found["request_counts"]["completed"] > 0)
            yield client
            if client.cancel(self.batch_id)["status"] != "cancelling":
                raise CheckError("the batch ended within the window")
            found = self._until(client, lambda found: found["status"] == "cancelled")
            if self._num_failed(client, found):
                raise CheckError("requests of the batch failed")

    def throughput(self) -> BatchRate:
        """Measure a batch alone, once it has been alone for so long that it may fill the engine's steps."""
        pid = self.server.pid
        with self.batch(self.arguments.seconds + QUIET_S) as client:
            first = self._num_steps()
            self._until(client, lambda _: self._num_steps() >= first + QUIET_STEPS)
            started, before, busy_s = time.perf_counter(), self._completed(client), processor_s(pid)
            num_steps = self._num_steps()
            time.sleep(self.arguments.seconds)
            done, seconds = self._completed(client) - before, time.perf_counter() - started
            num_steps = self._num_steps() - num_steps
            busy_s = processor_s(pid) - busy_s
        num_tokens = done * self.arguments.answer
        filled_share = num_tokens / max(1, num_steps) / self.arguments.sequences
        return BatchRate(num_tokens / seconds, filled_share, 1e3 * busy_s / max(1, done))

    def _num_steps(self) -> int:
        return int(self.server.client.get("engine")["num_steps"])

    def _completed(self, client: BatchClient) -> int:
        return int(client.get(self.batch_id)["request_counts"]["completed"])

    def _num_failed(self, client: BatchClient, found: dict[str, Any]) -> int:
        """The requests that ran and failed, without those that the cancellation has prevented."""
        if found["error_file_id"] is None:
            return 0
        path = self.scratch / "errors.jsonl"
        client.download(found["error_file_id"], path)
        return sum(json.loads(line)["response"] is not None for line in path.read_text().splitlines())

    def _until(self, client: BatchClient, is_so: Any) -> dict[str, Any]:
        deadline_s = time.perf_counter() + PATIENCE_S
        while not is_so(found := client.get(self.batch_id)):
            if found["status"] in ("failed", "completed", "expired") or time.perf_counter() > deadline_s:
                raise CheckError(f"the batch is {found['status']}: {found['errors']}")
            time.sleep(POLL_S)
        return dict(found)

    def _new_asks(self) -> Iterator[Ask]:
        """Requests whose prompts are not in the prefix cache yet."""
        return self.serving.asks(self.server.models, next(self._seeds))

    def _polite_asks(self, dice: random.Random) -> Iterator[Ask]:
        while True:
            yield greedy(BASE_NAME, self.serving.prompt(self.serving.short_prompt, dice), self.arguments.answer)


def _line(number: int, ask: Ask) -> dict[str, Any]:
    body = {name: value for name, value in ask.body(COMPLETIONS).items() if not name.startswith("stream")}
    return {"custom_id": f"{number}", "method": "POST", "url": URL, "body": body}


def p99_ratio(rounds: Sequence[Mapping[str, Sequence[float]]]) -> dict[str, Any]:
    """Compare the p99 of the times to first token beside the batch with that alone: the median of the rounds' ratios,
    which decides, and `together`, the ratio of all rounds' times.
    """
    ratios = [_p99_ratio(one) for one in rounds]
    together = {way: [seconds for one in rounds for seconds in one[way]] for way in WAYS}
    median = statistics.median(ratios)
    return {
        "median": finite(round(median, 3)),
        "rounds": [finite(round(ratio, 3)) for ratio in ratios],
        "together": finite(round(_p99_ratio(together), 3)),
        "samples": min(map(len, together.values())),
        "goal": MAX_RATIO,
        "is_met": median <= MAX_RATIO,
    }


def _p99_ratio(first_tokens: Mapping[str, Sequence[float]]) -> float:
    return percentile(first_tokens[BESIDE], 99) / percentile(first_tokens[ALONE], 99)


def _percentiles_ms(seconds: Sequence[float]) -> dict[str, float | None]:
    found = {f"p{place}_ms": finite(round(1e3 * percentile(seconds, place), 1)) for place in (50, 90, 99)}
    return {"requests": len(seconds)} | found


def measure(measurement: Measurement) -> dict[str, Any]:
    arguments, keep = measurement.arguments, measurement.serving.keep
    # The first load compiles what is left to compile, and loads the adapters.
    measurement.saturated()
    measurement.capacity = measurement.saturated() / arguments.answer
    keep("polite_requests_s", round(arguments.load * measurement.capacity, 2))
    # Until here, all requests were for adapters, and the first ones to the base take longer.
    measurement.first_tokens(arguments.repeats, ALONE)
    rounds: list[dict[str, list[float]]] = []
    for number in range(arguments.repeats):
        found: dict[str, list[float]] = {}
        for way in rotated(WAYS, number):
            with nullcontext() if way == ALONE else measurement.batch(arguments.seconds):
                found[way] = measurement.first_tokens(number, way)
        rounds.append(found)
        keep(f"round {number + 1}", {way: _percentiles_ms(seconds) for way, seconds in found.items()})
    for way in WAYS:
        keep(way, _percentiles_ms([seconds for one in rounds for seconds in one[way]]))
    batches = []
    shares = []
    for number in range(NUM_PAIRS):
        if number % 2 == 0:
            saturated = measurement.saturated()
            batch = measurement.throughput()
        else:
            batch = measurement.throughput()
            saturated = measurement.saturated()
        batches.append(batch)
        shares.append(batch.tokens_s / saturated)
        keep(f"tokens_s {number + 1}", {"saturated": round(saturated, 1), "batch": round(batch.tokens_s, 1)})
    share = statistics.median(shares)
    return {
        "gateway_ms_per_line": round(statistics.median(one.line_ms for one in batches), 2),
        "filled_share": round(statistics.median(one.filled_share for one in batches), 3),
        "ttft_p99_ratio": p99_ratio(rounds),
        "throughput_share": {"share": round(share, 3), "goal": MIN_SHARE, "is_met": share >= MIN_SHARE},
    }


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.serving.batches",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_server(parser)
    # More than the engine runs at once.
    parser.set_defaults(open=256)
    parser.add_argument("--repeats", type=int, default=7, help="rounds (%(default)s)")
    parser.add_argument("--load", type=float, default=0.1, help="the polite tenant's share of the capacity")
    return parser.parse_args(argv)


@reports_failure
def main(argv: Sequence[str] | None = None) -> int:
    exit_on_sigterm()
    arguments = parse(argv)
    serving = begin(arguments)
    with tempfile.TemporaryDirectory(dir=arguments.files) as files, tempfile.TemporaryDirectory() as data:
        base = serving.base(Path(files) / BASE_NAME)
        made = make_adapters(serving.model, serving.names, Path(files) / "adapters", serving.device, serving.dtype)
        if arguments.device == "cuda":
            torch.cuda.empty_cache()
        with serving.server(base, Path(data) / "data") as server:
            serving.push(server, made)
            serving.check(server)
            for name, value in measure(Measurement(serving, server, Path(data))).items():
                serving.keep(name, value)
    serving.keep("is_complete", True)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
