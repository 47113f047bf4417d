"""Measures the time from a trainer's push to the first token of its new version, beside streams of other adapters.

A trainer pushes new versions of some adapters, one every few seconds, from memory to `loramux serve`. The alias
`default` moves once the engine has the version (`wait=resident`). Meanwhile, streams on other adapters run. Rounds with
and without pushes alternate. The run prints the time of a push by stage, and the gaps between the streams' tokens. A
round without pushes sends all other requests of a round with pushes, whose prompts delay the streams too.

The trainer has a process of its own with the lowest priority, because a trainer on another machine would take no
processor time from the server. The clients that read the streams have another process.

Before a push, during it and after it, the same prompt is sent to the adapter's name, so a prefix cache that is keyed by
names would answer with the K/V of an older version. Every answer must have the log-probabilities that peft computes in
float32 for the version in the answer's `x-loramux-adapter`. After a push has returned, that must be the new version.
"""

from __future__ import annotations

import argparse
import itertools
import multiprocessing
import random
import re
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import torch
from peft import get_peft_model_state_dict
from rich.table import Table
from safetensors.torch import save_file

from benchmarks.answers import CheckError
from benchmarks.harness import Run, begin, exit_on_sigterm, new_parser, percentile, reports_failure
from benchmarks.peers.child_server import HOST, NO_DRAFTS, child_server, free_port, own_environment
from benchmarks.peers.vocabulary import FIRST_WORD, write_tokenizer
from benchmarks.random_model import SHAPES, Shape, load_peft, make_base
from benchmarks.serving.push_processes import Pushed, Trainer, TrainerOptions, stream_gaps
from loramux.admin.bench.asks import Ask
from loramux.admin.client.client import AdminClient
from loramux.admin.client.named_adapter import find_named
from loramux.admin.client.openai_server import OpenAIServer
from loramux.engine.device.machine_limits import num_cpus

BASE_NAME, TENANT = "base", "bench"
START_S = 300.0
NUM_VARIANTS = 6
"""Number of different sets of weights. Each pushed version has one of these, with two elements of its own."""
PROMPT_TOKENS = 80
"""Tokens of the prompt that is sent to every version: five pages."""
NUM_KEPT = 3
"""Number of versions of an adapter that are kept. After a push, the one before them is purged to save disk space."""
NUM_TOP = 5
TOLERANCES = {"float32": 1e-3, "bfloat16": 0.25}
"""Largest accepted difference from peft's log-probabilities in float32."""
TINY = Shape(64, 2, 4, 2, 96, vocab_size=512)
ALL_SHAPES = {**SHAPES, "tiny": TINY}
STAGES = ("client", "receive", "wait", "validate", "store", "ready", "load", "alias", "first token")
_VERSION = re.compile(r".*@([0-9]+)")

Logprobs = Mapping[int, float]


@dataclass(frozen=True, slots=True)
class Variant:
    """Weights in bfloat16, and peft's log-probabilities of every token after the prompt."""

    tensors: Mapping[str, torch.Tensor]
    logprobs: Sequence[float]


@dataclass(slots=True)
class Policy:
    """An adapter that is trained, and the variant of each of its versions."""

    name: str
    variants: dict[int, int] = field(default_factory=dict)
    newest: int = 0


@dataclass(slots=True)
class Figures:
    stages_ms: dict[str, list[float]] = field(default_factory=lambda: {stage: [] for stage in STAGES})
    totals_s: list[float] = field(default_factory=list)
    num_answers: int = 0
    worst: float = 0.0


class World:
    """The server, its adapters, and what is expected of each version."""

    def __init__(
        self,
        arguments: argparse.Namespace,
        variants: Sequence[Variant],
        trainer: Trainer,
        api: OpenAIServer,
        admin: AdminClient,
    ) -> None:
        self.arguments = arguments
        self.variants = variants
        self.trainer = trainer
        self.api = api
        self.admin = admin
        self.figures = Figures()
        self.policies: list[Policy] = []
        """The adapters that are pushed in turn."""
        self._numbers = itertools.count()
        self._seeds = itertools.count(2)
        self._lock = threading.Lock()
        self._http = httpx.Client(base_url=f"{api.url}/", headers=api.headers, timeout=120.0, trust_env=False)
        self._prompt = prompt(arguments.shape)
        self._last_s = 0.0

    def close(self) -> None:
        self._http.close()

    def push(self, policy: Policy) -> None:
        """Push the next version, and check every answer before, during and after. Raises CheckError."""
        with self._asked(policy, is_moving=True):
            pushed = self._send(policy)
            self._last_s = taken_s = pushed.ended_s - pushed.began_s
        policy.newest = pushed.version
        first_s = self._first_token(policy, self._prompt)
        self.check(policy)
        stages = {name: float(ms) for name, ms in re.findall(r"([a-z]+);dur=([0-9.]+)", pushed.stages)}
        stages["client"] = taken_s * 1e3 - sum(stages.values())
        stages["first token"] = first_s * 1e3
        for stage, ms in stages.items():
            self.figures.stages_ms[stage].append(ms)
        self.figures.totals_s.append(taken_s + first_s)
        self._purge_before(policy)

    def only_push(self, policy: Policy) -> None:
        """Push the next version without any other request. Raises CheckError."""
        policy.newest = self._send(policy).version

    def only_ask(self, policy: Policy) -> None:
        """Send the requests of a push, for as long as the last push took, without the push. Raises CheckError."""
        with self._asked(policy, is_moving=False):
            time.sleep(self._last_s)
        # After a push, the prompt is in no prefix cache either.
        self._first_token(policy, random_prompt(self.arguments.shape, next(self._seeds)))
        self.check(policy)

    def check(self, policy: Policy, is_moving: bool = False) -> None:
        """Ask an adapter by its name. Raises CheckError if a wrong version answers, or a version answers wrongly.

        While the alias `is_moving`, the version before is right too.
        """
        allowed = {policy.newest, policy.newest + 1} if is_moving else {policy.newest}
        answer = self._http.post("completions", json=self._body(policy, self._prompt))
        number = self._version(policy, answer)
        if number not in allowed:
            raise CheckError(f"version {number} of {policy.name} answered instead of {sorted(allowed)}")
        top = answer.json()["choices"][0]["logprobs"]["top_logprobs"][0]
        expected = self.variants[policy.variants[number]].logprobs
        found = {int(token.removeprefix("token_id:")): logprob for token, logprob in top.items()}
        worst = max(abs(logprob - expected[token]) for token, logprob in found.items())
        with self._lock:
            self.figures.num_answers += 1
            self.figures.worst = max(self.figures.worst, worst)
        if not worst <= TOLERANCES[self.arguments.dtype]:
            raise CheckError(
                f"version {number} of {policy.name} answers with a log-probability that is {worst:.3f} off"
            )

    def _send(self, policy: Policy) -> Pushed:
        number = next(self._numbers)
        variant = number % len(self.variants)
        # The next number, unless the push fails.
        policy.variants[policy.newest + 1] = variant
        pushed = self.trainer.push(f"{TENANT}/{policy.name}", variant, number)
        if pushed.version != policy.newest + 1:
            raise CheckError(f"the push became version {pushed.version} instead of {policy.newest + 1}")
        return pushed

    def _purge_before(self, policy: Policy) -> None:
        if policy.newest > NUM_KEPT:
            name = f"{TENANT}/{policy.name}@{policy.newest - NUM_KEPT}"
            self.admin.post(f"{find_named(self.admin, name).version_path()}/purge", {"confirm": name})

    @contextmanager
    def _asked(self, policy: Policy, is_moving: bool) -> Iterator[None]:
        """Check the answers before the block, and again and again while it runs. Raises CheckError."""
        if not policy.newest:
            yield
            return
        self.check(policy)
        has_ended = threading.Event()

        def keep_asking() -> None:
            while not has_ended.wait(0.05):
                self.check(policy, is_moving)

        with ThreadPoolExecutor(1) as pool:
            during = pool.submit(keep_asking)
            try:
                yield
            finally:
                has_ended.set()
            during.result()

    def _first_token(self, policy: Policy, prompt: Sequence[int]) -> float:
        began_s = time.perf_counter()
        body = self._body(policy, prompt) | {"stream": True}
        with self._http.stream("POST", "completions", json=body) as response:
            if self._version(policy, response) != policy.newest:
                raise CheckError(f"an older version of {policy.name} answered after the push")
            for line in response.iter_lines():
                if line.startswith("data: {"):
                    return time.perf_counter() - began_s
        raise CheckError("a stream has no token")

    def _version(self, policy: Policy, response: httpx.Response) -> int:
        if response.status_code != 200:
            response.read()
            raise CheckError(f"{policy.name} answers {response.status_code}: {response.text[:500]}")
        found = _VERSION.fullmatch(response.headers["x-loramux-adapter"])
        assert found is not None
        return int(found[1])

    def _body(self, policy: Policy, prompt: Sequence[int]) -> dict[str, Any]:
        ask = Ask(model=f"{TENANT}/{policy.name}", prompt=tuple(prompt), num_tokens=1)
        more = {"logprobs": NUM_TOP, "return_tokens_as_token_ids": True, "ignore_eos": True}
        return ask.body("completions") | more


def random_prompt(shape: str, seed: int) -> tuple[int, ...]:
    dice = random.Random(seed)
    return tuple(dice.randrange(FIRST_WORD, ALL_SHAPES[shape].vocab_size) for _ in range(PROMPT_TOKENS))


def prompt(shape: str) -> tuple[int, ...]:
    return random_prompt(shape, seed=1)


def marked(names: Iterable[str]) -> str:
    """The tensor in which versions differ: one B of the last layer."""
    return max(name for name in names if name.endswith("lora_B.weight"))


@torch.no_grad()
def make_variants(base: Path, shape: str, rank: int, tolerance: float) -> tuple[list[Variant], dict[str, Any]]:
    """Draw the variants, and ask peft about each. Raises CheckError if two variants could be confused."""
    model = load_peft(base, NUM_VARIANTS, rank, torch.float32)
    variants = []
    for number in range(NUM_VARIANTS):
        model.set_adapter(f"a{number}")
        # These tensors are the model's own. `own` writes small numbers over these zeros.
        state = get_peft_model_state_dict(model, adapter_name=f"a{number}")
        state[marked(state)][0, :2] = 0.0
        tensors = {name: tensor.to(torch.bfloat16) for name, tensor in state.items()}
        logits = model(torch.tensor([prompt(shape)])).logits[0, -1]
        variants.append(Variant(tensors, torch.log_softmax(logits, -1).tolist()))
    for one, other in itertools.permutations(variants, 2):
        top = sorted(range(len(one.logprobs)), key=one.logprobs.__getitem__)[-NUM_TOP:]
        if max(abs(one.logprobs[token] - other.logprobs[token]) for token in top) < 2 * tolerance:
            raise CheckError("two variants of the weights have nearly the same log-probabilities")
    return variants, model.peft_config["a0"].to_dict()


def gaps_beside(
    world: World, readers: ProcessPoolExecutor, models: Sequence[str], seconds: float, work: Callable[[], None]
) -> list[float]:
    """Run `work` beside the streams for `seconds`, and return the gaps between their tokens."""
    arguments = world.arguments
    running = readers.submit(
        stream_gaps,
        world.api,
        models,
        num_open=arguments.streams,
        answer_tokens=arguments.answer,
        vocab_size=ALL_SHAPES[arguments.shape].vocab_size,
        warm_s=arguments.warm,
        seconds=seconds,
    )
    time.sleep(arguments.warm)
    work()
    return running.result()


def measure(world: World, readers: ProcessPoolExecutor, streamed: Sequence[str], run: Run) -> dict[str, Any]:
    arguments = world.arguments
    due = itertools.cycle(world.policies)
    per_round = max(1, arguments.pushes // arguments.rounds)
    num_due = {"pushes": per_round, "quiet": arguments.quiet or per_round}
    p99s: dict[str, list[float]] = {"quiet": [], "pushes": []}

    def each_due(count: int, work: Callable[[Policy], None]) -> None:
        began_s = time.perf_counter()
        for number in range(count):
            time.sleep(max(0.0, began_s + number * arguments.every - time.perf_counter()))
            work(next(due))

    for policy in world.policies:
        world.push(policy)
    # Start the process that reads the streams.
    gaps_beside(world, readers, streamed, arguments.warm, lambda: None)
    world.figures = Figures(num_answers=world.figures.num_answers, worst=world.figures.worst)
    for number in range(arguments.rounds):
        for way in ("quiet", "pushes") if number % 2 == 0 else ("pushes", "quiet"):
            work = partial(each_due, num_due[way], world.push if way == "pushes" else world.only_ask)
            gaps = gaps_beside(world, readers, streamed, num_due[way] * arguments.every, work)
            p99s[way].append(percentile(gaps, 99))
            shown = ", ".join(f"p{at} {percentile(gaps, at) * 1e3:.1f} ms" for at in (50, 90, 99))
            run.console.print(f"round {number + 1}, {way}: gaps {shown}")
    began_s, began_cpu = time.perf_counter(), cpu_s()
    for _ in range(arguments.saturating):
        world.only_push(next(due))
    taken_s, used_s = time.perf_counter() - began_s, cpu_s() - began_cpu
    for policy in world.policies:
        world.check(policy)
    figures = world.figures
    ratios = [after / before for after, before in zip(p99s["pushes"], p99s["quiet"], strict=True)]
    return {
        "pushes": len(figures.totals_s),
        "push_to_first_token_s": {f"p{at}": round(percentile(figures.totals_s, at), 3) for at in (50, 90, 99, 100)},
        "stages_ms": {
            stage: {f"p{at}": round(percentile(found, at), 1) for at in (50, 99)}
            for stage, found in figures.stages_ms.items()
            if found
        },
        "gap_p99_ms": {way: [round(one * 1e3, 2) for one in found] for way, found in p99s.items()},
        "gap_p99_ratio": {"median": round(statistics.median(ratios), 3), "rounds": [round(one, 3) for one in ratios]},
        "back_to_back": {
            "pushes_s": round(arguments.saturating / taken_s, 2),
            "cpu_s_per_push": round(used_s / max(1, arguments.saturating), 3),
        },
        "answers": figures.num_answers,
        "stale_tokens": 0,
        "largest_difference_from_peft": round(figures.worst, 6),
    }


def cpu_s() -> float:
    """Seconds of processor time that all processes of the machine have used."""
    fields = [int(value) for value in Path("/proc/stat").read_text().splitlines()[0].split()[1:]]
    return (sum(fields) - fields[3] - fields[4]) / 100


def stage_table(figures: Mapping[str, Any]) -> Table:
    table = Table(title="time of a push by stage")
    for heading in ("stage", "p50", "p99"):
        table.add_column(heading, justify="left" if heading == "stage" else "right")
    for stage, found in figures["stages_ms"].items():
        table.add_row(stage, *(f"{found[at]:.1f} ms" for at in ("p50", "p99")))
    total = figures["push_to_first_token_s"]
    table.add_row("push to first token", *(f"{total[at] * 1e3:.1f} ms" for at in ("p50", "p99")))
    return table


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = new_parser("serving.push", __doc__)
    add = parser.add_argument
    add("--shape", choices=ALL_SHAPES, default="small", help="the base's shape (%(default)s)")
    add("--threads", type=int, help="threads of the engine (by default, one per core)")
    add("--rank", type=int, default=128, help="rank of the adapters (%(default)s, 22.5 MB for the shape small)")
    add("--dtype", choices=TOLERANCES, default="bfloat16")
    add("--adapters", type=int, default=20, help="number of adapters that are pushed in turn (%(default)s)")
    add("--pushes", type=int, default=1000, help="number of pushes, beside the first of each adapter (%(default)s)")
    add("--every", type=float, default=5.0, help="seconds from a push to the next (%(default)s)")
    add("--quiet", type=int, help="left-out pushes in a round without pushes (by default, as many as in the others)")
    add("--rounds", type=int, default=7, help="rounds with and without pushes (%(default)s)")
    add("--streams", type=int, default=4, help="number of concurrent streams (%(default)s)")
    add("--answer", type=int, default=128, help="tokens of a stream's answer (%(default)s)")
    add("--warm", type=float, default=2.0, help="seconds of streams before each round (%(default)s)")
    add("--saturating", type=int, default=20, help="number of pushes back to back at the end, alone (%(default)s)")
    return parser.parse_args(argv)


@reports_failure
def main(argv: Sequence[str] | None = None) -> int:
    exit_on_sigterm()
    arguments = parse(argv)
    run = begin(arguments)
    with tempfile.TemporaryDirectory() as files:
        base = Path(files) / BASE_NAME
        base.mkdir()
        make_base(ALL_SHAPES[arguments.shape], base)
        write_tokenizer(base, ALL_SHAPES[arguments.shape].vocab_size)
        variants, config = make_variants(base, arguments.shape, arguments.rank, TOLERANCES[arguments.dtype])
        weights = [Path(files) / f"variant-{number}.safetensors" for number in range(len(variants))]
        for file, variant in zip(weights, variants, strict=True):
            save_file(dict(variant.tensors), file)
        size = sum(tensor.nbytes for tensor in variants[0].tensors.values())
        run.say(
            {
                "adapter": f"rank {arguments.rank}, {size / 1e6:.1f} MB",
                "dtype": arguments.dtype,
                "threads": arguments.threads or num_cpus(),
                "speculate": NO_DRAFTS[1],
            }
        )
        port, admin_port, admin_key = free_port(), free_port(), "push-benchmark-" + "0" * 32
        command = [sys.executable, "-m", "loramux.admin.cli", "serve", "--model", str(base)]
        command += ["--data-dir", str(Path(files) / "data"), "--host", HOST, "--served-name", BASE_NAME, *NO_DRAFTS]
        command += ["--port", str(port), "--admin-port", str(admin_port), "--dtype", arguments.dtype, "--device", "cpu"]
        threads = {} if arguments.threads is None else {"LORAMUX_NUM_THREADS": str(arguments.threads)}
        environment = own_environment({"LORAMUX_ADMIN_KEY": admin_key, **threads})
        with child_server("loramux", command, environment, Path(files) / "server.log") as child:
            url = f"http://{HOST}:{admin_port}"
            child.wait_until_ready(f"{url}/health/ready", START_S)
            options = TrainerOptions(url, admin_key, weights, marked(variants[0].tensors), config)
            with (
                AdminClient(url, admin_key) as admin,
                Trainer(options) as trainer,
                ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as readers,
            ):
                admin.post("tenants", {"slug": TENANT})
                key = admin.post("api_keys", {"tenant": TENANT, "name": "bench"})["secret"]
                api = OpenAIServer(url=f"http://{HOST}:{port}/v1", key=key)
                world = World(arguments, variants, trainer, api, admin)
                try:
                    world.policies = [Policy(f"policy-{one}") for one in range(arguments.adapters)]
                    streamed = [Policy(f"stream-{one}") for one in range(arguments.streams)]
                    for policy in streamed:
                        world.push(policy)
                    figures = measure(world, readers, [f"{TENANT}/{one.name}" for one in streamed], run)
                finally:
                    world.close()
    run.console.print(stage_table(figures))
    for name, value in figures.items():
        if name != "stages_ms":
            run.console.print(f"{name}: {value}", highlight=False)
    run.write(figures)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
