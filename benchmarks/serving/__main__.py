"""Measures a whole server over HTTP on loopback, and its engine alone in this process, under the same load.

A base, by default a random one, and a hundred random adapters of ranks 8 to 64 on the attention's four linear layers
are served by `loramux serve`. Requests choose adapters by Zipf's law; prompts have 128 to 2,048 tokens and answers 128.
The run measures, in this order:

    push        time from the first byte of an adapter's upload until its version is ready
    cold        first token of an adapter's first request, and of the same adapter's later requests, by rank
    closed      a fixed number of open requests: the server's capacity
    30 %, ...   Poisson arrivals at shares of that capacity: times to first token, gaps between tokens
    in process  the engine alone: the capacity, and the same arrivals

Before anything is timed, each of eight adapters must change the base's log-probabilities, and the answer to a request
in a mixed batch must have the log-probabilities of the same request alone. At the end, the tenant's usage report must
equal what the clients counted, to the token. Every figure is written as soon as it is measured.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import random
import secrets
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import torch

from benchmarks.answers import CheckError
from benchmarks.gpu.bench import Bench
from benchmarks.gpu.machine import describe
from benchmarks.gpu.model import Model
from benchmarks.gpu.random_models import RandomAdapters
from benchmarks.harness import exit_on_sigterm, finite, percentile, reports_failure
from benchmarks.machine import add_allow_busy, out_file, require_idle, shown_command
from benchmarks.peers.child_server import HOST, NO_DRAFTS, child_server, free_port, own_environment
from benchmarks.peers.vocabulary import FIRST_WORD
from benchmarks.running_engine import GREEDY, start_engine
from benchmarks.s_lora.run import Arrival, Drive, Stream, Window
from benchmarks.serving.clients import Observed, arrivals, closed_loop, greedy, open_loop
from benchmarks.serving.files import SHAPES, TARGETS, AdapterDirectory, make_adapters, make_base, shape_of
from loramux.admin.bench.asks import COMPLETIONS, Ask
from loramux.admin.client.client import AdminClient
from loramux.admin.client.openai_server import OpenAIServer
from loramux.admin.client.push import push_adapter
from loramux.engine.adapters.stager import MemoryStager
from loramux.engine.loop.config import EngineConfig
from loramux.engine.loop.loaded_base import DTYPES
from loramux.engine.protocol.messages import Add

BASE_NAME, TENANT = "base", "bench"
RANKS = (8, 8, 8, 8, 16, 16, 16, 32, 32, 64)
START_S = 400.0
PUSHERS = 4
WARM_S = 3.0
"""Seconds of each load before its observed window."""

CHECKED, CHECK_TOKENS = 8, 4
COLD_EACH, SHORT_PROMPT = 4, 128
TOLERANCES = {torch.bfloat16: 0.15, torch.float32: 1e-3}
"""Largest accepted difference in a log-probability between a request alone and in a batch."""

LEAST_EFFECT, LEAST_EFFECT_ON_TRAINED = 0.02, 0.005
"""Smallest accepted difference in a log-probability between an adapter and the base. The random adapters are scaled for
a random base and change a trained one less: SmolLM2-135M by 0.009.
"""


@dataclass(frozen=True, slots=True)
class Server:
    api: OpenAIServer
    client: AdminClient
    pid: int
    """The gateway's process."""
    models: dict[str, str] = field(default_factory=dict)
    """The model name to request, by adapter."""

    def ask(self, ask: Ask, **more: Any) -> dict[str, Any]:
        """Send a request without streaming. Raises CheckError if it fails."""
        body = ask.body(COMPLETIONS) | more
        url = f"{self.api.url}/completions"
        answer = httpx.post(url, json=body, headers=self.api.headers, timeout=120.0, trust_env=False)
        if answer.status_code != 200:
            raise CheckError(f"{ask.model} answers {answer.status_code}: {answer.text[:500]}")
        return dict(answer.json())


@dataclass(slots=True)
class Counts:
    """Tokens that the clients counted, to compare with the usage report."""

    requests: int = 0
    prompt: int = 0
    answer: int = 0

    def add(self, requests: int, prompt: int, answer: int) -> None:
        self.requests += requests
        self.prompt += prompt
        self.answer += answer


class Serving:
    def __init__(self, arguments: argparse.Namespace, figures: dict[str, Any]) -> None:
        self.arguments = arguments
        self.figures = figures
        self.model: Model = SHAPES[arguments.shape] if arguments.base is None else shape_of(arguments.base)
        self.device = torch.device(arguments.device)
        self.dtype = DTYPES[arguments.dtype or ("bfloat16" if arguments.device == "cuda" else "float32")]
        self.counts = Counts()
        ranks = {f"a{number:03}": RANKS[number % len(RANKS)] for number in range(arguments.adapters)}
        cold = {f"c{rank:02}-{number}": rank for rank in sorted(set(RANKS)) for number in range(COLD_EACH)}
        self.names, self.cold_names = ranks, cold

    def keep(self, name: str, value: Any) -> None:
        """Print a figure, and write all figures to the file."""
        self.figures[name] = value
        print(f"{time.strftime('%H:%M:%S')} {name}: {json.dumps(value)}", flush=True)
        if self.arguments.out:
            self.arguments.out.write_text(json.dumps(self.figures, indent=1) + "\n")

    def base(self, directory: Path) -> Path:
        """The base's directory. A random base is written to `directory`."""
        if self.arguments.base is not None:
            return Path(self.arguments.base)
        make_base(self.model, self.max_len, directory, self.device, self.dtype)
        return directory

    def asks(self, names: Mapping[str, str], seed: int) -> Iterator[Ask]:
        """Requests without end, with adapters by Zipf's law with exponent 1, and prompts of log-uniform lengths."""
        dice = random.Random(seed)
        ranked = random.Random(0).sample(sorted(self.names), len(self.names))
        weights = [1 / (place + 1) for place in range(len(ranked))]
        low, high = self.arguments.prompts
        while True:
            num_prompt = round(math.exp(dice.uniform(math.log(low), math.log(high))))
            (name,) = dice.choices(ranked, weights)
            yield greedy(names[name], self.prompt(num_prompt, dice), self.arguments.answer)

    def prompt(self, num_tokens: int, dice: random.Random) -> tuple[int, ...]:
        return tuple(dice.randrange(FIRST_WORD, self.model.vocab_size) for _ in range(num_tokens))

    @property
    def short_prompt(self) -> int:
        return int(self.arguments.short_prompt or min(SHORT_PROMPT, self.arguments.prompts[1]))

    @property
    def max_len(self) -> int:
        return int(max(self.arguments.prompts[1], self.short_prompt) + self.arguments.answer + 16)

    @contextlib.contextmanager
    def server(self, base: Path, data_dir: Path) -> Iterator[Server]:
        port, admin_port, admin_key = free_port(), free_port(), secrets.token_urlsafe(32)
        command = [
            sys.executable,
            "-m",
            "loramux.admin.cli",
            "serve",
            "--model",
            str(base),
            "--data-dir",
            str(data_dir),
        ]
        command += ["--host", HOST, "--port", str(port), "--admin-port", str(admin_port), "--served-name", BASE_NAME]
        command += ["--dtype", str(self.dtype).removeprefix("torch."), "--device", self.arguments.device, *NO_DRAFTS]
        settings = {"LORAMUX_ADMIN_KEY": admin_key, "LORAMUX_MAX_SEQUENCES": str(self.arguments.sequences)}
        log = data_dir.parent / "server.log"
        started = time.perf_counter()
        with child_server("loramux", command, own_environment(settings), log) as child:
            try:
                child.wait_until_ready(f"http://{HOST}:{admin_port}/health/ready", START_S)
                self.keep("start_s", round(time.perf_counter() - started, 1))
                with AdminClient(f"http://{HOST}:{admin_port}", admin_key, timeout_s=120.0) as client:
                    client.post("tenants", {"slug": TENANT})
                    key = client.post("api_keys", {"tenant": TENANT, "name": "bench"})["secret"]
                    yield Server(OpenAIServer(url=f"http://{HOST}:{port}/v1", key=key), client, child.pid)
            finally:
                sys.stderr.write(log.read_text(errors="replace")[-3000:])

    def push(self, server: Server, made: Sequence[AdapterDirectory]) -> None:
        """Push all adapters, a few at a time, and keep the times by rank."""
        seconds: dict[int, list[float]] = {}

        def one(adapter: AdapterDirectory) -> tuple[AdapterDirectory, str, float]:
            started = time.perf_counter()
            pushed = push_adapter(server.client, adapter.path, TENANT, adapter.name)
            return adapter, pushed.model, time.perf_counter() - started

        started = time.perf_counter()
        with ThreadPoolExecutor(PUSHERS) as pool:
            for adapter, model, taken in pool.map(one, made):
                server.models[adapter.name] = model
                seconds.setdefault(adapter.rank, []).append(taken)
        by_rank = {str(rank): round(statistics.median(taken), 3) for rank, taken in sorted(seconds.items())}
        num_bytes = sum((one.path / "adapter_model.safetensors").stat().st_size for one in made)
        total = {"adapters": len(made), "gb": round(num_bytes / 1e9, 2), "at_once": PUSHERS}
        self.keep("push", total | {"seconds": round(time.perf_counter() - started, 1), "median_s_by_rank": by_rank})

    def check(self, server: Server) -> None:
        """Compare answers in a mixed batch with answers alone, and adapters with the base. Raises CheckError."""
        dice = random.Random(7)
        prompt = self.prompt(self.short_prompt, dice)
        models = [BASE_NAME, *(server.models[name] for name in list(self.names)[:CHECKED])]
        asks = [greedy(model, prompt, CHECK_TOKENS) for model in models]
        alone = [server.ask(one, logprobs=5) for one in asks]
        with ThreadPoolExecutor(len(asks)) as pool:
            mixed = list(pool.map(lambda one: server.ask(one, logprobs=5), asks))
        for answer in (*alone, *mixed):
            self.counts.add(1, answer["usage"]["prompt_tokens"], answer["usage"]["completion_tokens"])
        worst = max(map(_difference, alone, mixed))
        least = min(_difference(one, alone[0]) for one in alone[1:])
        self.keep("check", {"alone_to_mixed": finite(worst), "adapter_to_base": finite(least)})
        if not worst <= TOLERANCES[self.dtype]:
            raise CheckError(f"a mixed batch changes a log-probability by {worst:.3f}")
        least_effect = LEAST_EFFECT if self.arguments.base is None else LEAST_EFFECT_ON_TRAINED
        if not least > max(least_effect, 2 * worst):
            raise CheckError(f"an adapter changes the base's log-probabilities by only {least:.4f}")

    def cold(self, server: Server) -> None:
        """Measure first tokens of adapters that were never loaded, and of the same adapters afterwards."""
        dice = random.Random(8)
        found: dict[str, dict[str, float]] = {}
        for rank in sorted(set(self.cold_names.values())):
            names = [name for name, one in self.cold_names.items() if one == rank]
            first, later = [], []
            for name in names:
                for times, repeats in ((first, 1), (later, 3)):
                    for _ in range(repeats):
                        ask = greedy(server.models[name], self.prompt(self.short_prompt, dice), 2)
                        observed = open_loop(server.api, [(0.0, ask)], 0.0, 60.0)
                        self._count(observed)
                        times += observed.first_tokens_s
            cold_s, warm_s = statistics.median(first), statistics.median(later)
            found[str(rank)] = {"cold_ms": round(cold_s * 1e3, 1), "warm_ms": round(warm_s * 1e3, 1)}
        self.keep("cold_first_token_by_rank", found)

    def loads(self, server: Server) -> list[tuple[str, float]]:
        """Measure the capacity, and then arrivals at shares of it. Returns the requests per second of each share."""
        seconds = self.arguments.seconds
        # The first load compiles what is left to compile, and loads the adapters that most requests use.
        for warm_s in (0.0, WARM_S):
            observed = closed_loop(server.api, self.asks(server.models, 1), self.arguments.open, warm_s, seconds)
            self._count(observed)
        self.keep("HTTP closed loop", _shown(observed))
        rates = [
            (f"{share:.0%} of capacity", share * observed.tokens_s / self.arguments.answer)
            for share in self.arguments.shares
        ]
        for name, rate in rates:
            due = arrivals(self.asks(server.models, 2), rate, seconds + WARM_S, random.Random(name).random)
            load = open_loop(server.api, due, WARM_S, seconds)
            self._count(load)
            self.keep(f"HTTP {name}", _shown(load) | {"requests_s": round(rate, 2)})
        return rates

    def settle(self, server: Server) -> None:
        """Compare the usage report with what the clients counted. Raises CheckError if they differ."""
        report = server.client.get("usage", tenant=TENANT, group_by="tenant")
        reported = Counts()
        for line in (line for part in report["data"] for line in part["results"]):
            reported.add(line["requests"], line["prompt_tokens"], line["completion_tokens"])
        self.keep("usage", {"reported": str(reported), "counted": str(self.counts)})
        if reported != self.counts:
            raise CheckError(f"the usage report says {reported}, the clients counted {self.counts}")

    def in_process(self, base: Path, rates: Sequence[tuple[str, float]]) -> None:
        """Run the same loads on the engine alone."""
        bench = Bench(self.device, False, False, False, False, False, Path())
        adapters = RandomAdapters(bench, self.model, str(self.dtype).removeprefix("torch."))
        for rank in sorted(set(self.names.values())):
            adapters.make([name for name, one in self.names.items() if one == rank], rank, tuple(TARGETS.values()))
        config = EngineConfig(
            model_dir=str(base),
            blob_url="",
            cache_dir="",
            device=self.arguments.device,
            dtype=str(self.dtype).removeprefix("torch."),
            max_sequences=self.arguments.sequences,
            max_batch_tokens=self.arguments.batch_tokens,
            max_resident_adapters=256,
        )
        seconds, own = self.arguments.seconds, dict(zip(self.names, self.names, strict=True))
        started = time.perf_counter()
        with start_engine(config, MemoryStager(adapters.packed)) as engine:
            self.keep("in process start_s", round(time.perf_counter() - started, 1))
            for warm_s in (0.0, WARM_S):
                adds = (_add(ask) for ask in self.asks(own, 1))
                drive = Drive(engine, [], warm_s, warm_s + seconds, 60.0, [Stream(adds, self.arguments.open)])
                drive.run(math.inf)
                observed = drive.end()
            self.keep("in process closed loop", {"tokens_s": round(observed.num_tokens / seconds, 1)})
            for name, rate in rates:
                due = arrivals(self.asks(own, 2), rate, seconds + WARM_S, random.Random(name).random)
                timed = [Arrival(at_s, _add(ask)) for at_s, ask in due]
                drive = Drive(engine, timed, WARM_S, WARM_S + seconds, 60.0)
                drive.run(math.inf)
                self.keep(f"in process {name}", _window(drive.end()) | {"requests_s": round(rate, 2)})

    def _count(self, observed: Observed) -> None:
        self.counts.add(observed.num_requests, observed.num_prompt_tokens, observed.num_answer_tokens)


def _add(ask: Ask) -> Add:
    return Add(
        sequence_id="",
        prompt=ask.prompt,
        max_tokens=ask.num_tokens,
        sampling=GREEDY,
        digest=ask.model,
        share_key=TENANT,
    )


def _difference(one: dict[str, Any], other: dict[str, Any]) -> float:
    """The largest difference between two answers' log-probabilities of the first token, over the tokens in both lists.
    Infinity if there are none.
    """
    first, second = (answer["choices"][0]["logprobs"]["top_logprobs"][0] for answer in (one, other))
    return max((abs(first[token] - second[token]) for token in first.keys() & second.keys()), default=math.inf)


def _percentiles(name: str, seconds: Sequence[float]) -> dict[str, float | None]:
    return {f"{name}_p{place}_ms": finite(round(percentile(seconds, place) * 1e3, 2)) for place in (50, 99)}


def _shown(observed: Observed) -> dict[str, float | None]:
    figures = {"tokens_s": round(observed.tokens_s, 1), "requests": len(observed.first_tokens_s)}
    return figures | _percentiles("ttft", observed.first_tokens_s) | _percentiles("gap", observed.gaps_s)


def _window(window: Window) -> dict[str, float | None]:
    figures = {"tokens_s": round(window.num_tokens / window.seconds, 1), "requests": len(window.journeys)}
    return figures | _percentiles("ttft", window.first_tokens_s) | _percentiles("gap", window.gaps_s)


def add_server(parser: argparse.ArgumentParser) -> None:
    """Add the arguments that describe the server and its loads. Without a GPU, a tiny base runs on the CPU."""
    add = parser.add_argument
    has_gpu = torch.cuda.is_available()
    add("--out", type=out_file, help="write the figures to this JSON file")
    bases = parser.add_mutually_exclusive_group()
    bases.add_argument(
        "--shape", choices=SHAPES, default="8b" if has_gpu else "tiny", help="a random base's shape (%(default)s)"
    )
    bases.add_argument("--base", type=Path, help="directory of a Llama to serve instead of a random base")
    add("--device", choices=("cuda", "cpu"), default="cuda" if has_gpu else "cpu", help="(%(default)s)")
    add("--dtype", choices=DTYPES, help="(bfloat16 with --device cuda, otherwise float32)")
    add("--files", type=Path, help="existing directory for the base and the adapters, such as /dev/shm")
    add("--adapters", type=int, default=100)
    add("--prompts", type=int, nargs=2, default=(128, 2048), metavar=("LOW", "HIGH"), help="tokens of a prompt")
    add("--short-prompt", type=int, help=f"tokens of a short prompt (the smaller of {SHORT_PROMPT} and HIGH)")
    add("--answer", type=int, default=128, help="tokens of an answer (%(default)s)")
    add("--open", type=int, default=96, help="open requests of the closed loop (%(default)s)")
    add("--sequences", type=int, default=128, help="most sequences that run at once (%(default)s)")
    add("--seconds", type=float, default=15.0, help="length of each measurement (%(default)s)")
    add_allow_busy(parser)


def begin(arguments: argparse.Namespace, **head: Any) -> Serving:
    """Describe the machine and the run, which is not complete yet. Exit if the run measures a busy CPU, unless that is
    allowed.
    """
    busy = {} if arguments.device == "cuda" else {"busy_share": round(require_idle(arguments.allow_busy), 3)}
    return Serving(arguments, {"command": shown_command(), **head, "machine": describe(), **busy, "is_complete": False})


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.serving", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_server(parser)
    add = parser.add_argument
    add("--batch-tokens", type=int, default=2048, help="tokens of a step, in process (%(default)s)")
    add("--shares", type=float, nargs="+", default=(0.3, 0.6, 0.85), help="shares of the capacity")
    add("--skip", nargs="*", default=(), choices=("cold", "in-process"), help="parts to leave out")
    return parser.parse_args(argv)


@reports_failure
def main(argv: Sequence[str] | None = None) -> int:
    exit_on_sigterm()
    arguments = parse(argv)
    serving = begin(arguments, speculate=NO_DRAFTS[1])
    with tempfile.TemporaryDirectory(dir=arguments.files) as files, tempfile.TemporaryDirectory() as data:
        started = time.perf_counter()
        base = serving.base(Path(files) / BASE_NAME)
        names = serving.names | serving.cold_names
        made = make_adapters(serving.model, names, Path(files) / "adapters", serving.device, serving.dtype)
        if arguments.device == "cuda":
            torch.cuda.empty_cache()
        serving.keep("files_s", round(time.perf_counter() - started, 1))
        rates: list[tuple[str, float]] = []
        with serving.server(base, Path(data) / "data") as server:
            serving.push(server, made)
            serving.check(server)
            if "cold" not in arguments.skip:
                serving.cold(server)
            rates = serving.loads(server)
            serving.settle(server)
        if "in-process" not in arguments.skip:
            serving.in_process(base, rates)
    serving.keep("is_complete", True)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
