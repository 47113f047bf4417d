"""Measures the cost of schemas, and compares structured output with vLLM.

It measures three figures in one run over HTTP, with sixteen adapters on a random model:

    every row      the throughput of sixteen requests with distinct adapters and a schema, relative to the same
                   requests without a schema, and relative to vLLM with the same schema
    first use      the additional time to first token of a request whose schema of 20 kB the server has never seen,
                   compared with a request without a schema
    neighbour      the additional time to first token of a request without a schema that arrives together with a first
                   use, compared with one that arrives together with another request without a schema

Every answer has the requested length, which is too short for a complete document. Every answer from loramux must be the
beginning of a valid document. Invalid answers from vLLM are counted. LORAMUX_PEER_VLLM is the path of a Python
interpreter with vLLM, as in `benchmarks/peers`.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
from llguidance import LLMatcher, LLTokenizer
from rich.console import Console
from rich.progress import track

from benchmarks.harness import SCRATCH, begin, new_parser, reports_failure
from benchmarks.peers.child_server import NO_DRAFTS
from benchmarks.peers.http_questions import Document
from benchmarks.peers.loramux_server import LoramuxServer, open_loramux
from benchmarks.peers.model_files import ModelFiles, make_model_files
from benchmarks.peers.system import LORAMUX, SystemFailed
from benchmarks.peers.vllm_server import VllmServer, find_vllm, open_vllm
from benchmarks.peers.workload import DISTINCT, Load, draw_work
from benchmarks.random_model import SHAPES
from benchmarks.sharing.traffic import Sample, stream
from benchmarks.tables import table
from loramux.engine.constraints.vocabulary import load_vocabulary

EOS = 2
"""End-of-sequence token of the random models."""

PLAIN, SCHEMA = "plain", "schema"
GOALS = {"every row": 0.95, "over vLLM": 2.6, "first use": 0.050}
"""Goals: the lowest ratios of throughput, and the longest additional time to first token, in seconds."""

LONG_SCHEMA: Document = {
    "type": "array",
    "minItems": 100,
    "items": {
        "type": "object",
        "properties": {
            "name": {"type": "string", "maxLength": 40},
            "kind": {"enum": ["bread", "cheese", "wine"]},
            "price": {"type": "integer", "minimum": 0, "maximum": 10_000},
        },
        "required": ["name", "kind", "price"],
        "additionalProperties": False,
    },
}
"""A schema whose documents are all longer than any answer of the benchmark."""


def new_schema(number: int, num_bytes: int) -> Document:
    """A schema of about `num_bytes` bytes. Each `number` gives a different schema."""
    dice = random.Random(number)
    properties: Document = {}
    schema: Document = {"type": "object", "properties": properties, "additionalProperties": False}
    while len(json.dumps(schema)) < num_bytes:
        name = f"field_{number}_{len(properties)}"
        properties[name] = dice.choice(
            [
                {"type": "string", "maxLength": dice.randint(5, 60), "description": f"The text of {name}."},
                {"type": "integer", "minimum": 0, "maximum": dice.randint(10, 10**6)},
                {"enum": [f"{name}-{index}" for index in range(dice.randint(2, 8))]},
                {"type": "array", "items": {"type": "number"}, "maxItems": dice.randint(1, 20)},
                {"anyOf": [{"type": "boolean"}, {"type": "null"}], "description": f"Whether {name} applies."},
            ]
        )
        schema["required"] = list(properties)
    return schema


class Checker:
    """Checks that an answer is the beginning of a document that satisfies the schema."""

    def __init__(self, vocabulary: LLTokenizer, schema: Document) -> None:
        options = {"whitespace_pattern": r"[ \n\r\t]*", "whitespace_flexible": True}
        grammar = LLMatcher.grammar_from_json_schema(schema, overrides=options)  # type: ignore[arg-type]
        self._vocabulary = vocabulary
        self._matcher = LLMatcher(vocabulary, grammar)

    def is_beginning(self, text: str) -> bool:
        """Return whether a valid document can begin with `text`."""
        # The last character of an answer may be incomplete, and is then decoded as U+FFFD.
        tokens = self._vocabulary.greedy_tokenize(text.rstrip("\ufffd"))
        return bool(text) and self._matcher.deep_copy().validate_tokens(tokens) == len(tokens)


@dataclass(slots=True)
class Figures:
    seconds: dict[tuple[str, str], list[float]] = field(default_factory=dict)
    """Seconds of each round, by system and kind of request."""
    first_token_s: dict[str, list[float]] = field(default_factory=dict)
    """Times to first token, by kind of request, in seconds."""
    broken: dict[str, list[str]] = field(default_factory=dict)
    """Answers that break the schema, by system."""

    def speed(self, name: str, kind: str, num_tokens: int) -> float:
        return num_tokens / statistics.median(self.seconds[name, kind])

    def extra_s(self, with_schema: str, without: str) -> float:
        """Median difference between the two requests of a pair, in seconds."""
        pairs = zip(self.first_token_s[with_schema], self.first_token_s[without], strict=True)
        return statistics.median(one - other for one, other in pairs)


def answer_all(
    server: LoramuxServer | VllmServer, kind: str, load: Load, files: ModelFiles, seed: str
) -> tuple[float, list[str]]:
    """Seconds that a system takes to answer sixteen requests with distinct adapters, and the answers."""
    work = draw_work(DISTINCT, load, files.num_adapters, files.shape.vocab_size, seed)
    extra: Document = {"structured_outputs": {"json": LONG_SCHEMA}} if kind == SCHEMA else {}
    documents, seconds = server.complete(work, extra)
    return seconds, [document["choices"][0]["text"] for document in documents]


async def first_token(client: httpx.AsyncClient, body: Document) -> float:
    """Seconds from sending a request to its first token. The whole answer is read, so that it does not slow down the
    next request.
    """
    sample = Sample()
    await stream(client, "/v1/completions", body | {"stream": True}, sample)
    return sample.first_token_s[0]


async def measure_first_tokens(
    server: LoramuxServer, files: ModelFiles, num_pairs: int, num_bytes: int, console: Console
) -> dict[str, list[float]]:
    """Times to first token of requests with and without a new schema, and of requests sent together with either."""
    found: dict[str, list[float]] = {
        name: [] for name in ("with", "without", "neighbour of with", "neighbour of without")
    }
    dice = random.Random(0)
    headers = {"authorization": f"Bearer {server.api_key}"}
    numbers: Iterator[int] = iter(range(10**9))
    models = list(server.models.values())

    def body(model: str) -> Document:
        prompt = [dice.randrange(300, files.shape.vocab_size) for _ in range(64)]
        return {"model": model, "prompt": prompt, "max_tokens": 2, "temperature": 0.0, "ignore_eos": True}

    async with httpx.AsyncClient(base_url=server.url, headers=headers, timeout=600.0, trust_env=False) as client:
        for index in track(range(num_pairs), description="first use", console=console):
            # Alternate the order, so that drift in the machine's speed cancels out.
            kinds = ("with", "without") if index % 2 else ("without", "with")
            for kind in kinds:
                fields = [{"structured_outputs": {"json": new_schema(next(numbers), num_bytes)}} for _ in range(2)]
                alone, together = fields if kind == "with" else ({}, {})
                found[kind].append(await first_token(client, body(models[0]) | alone))
                _, neighbour = await asyncio.gather(
                    first_token(client, body(models[1]) | together), first_token(client, body(models[2]))
                )
                found[f"neighbour of {kind}"].append(neighbour)
    return found


def measure(arguments: argparse.Namespace, files: ModelFiles, logs: Path, console: Console) -> Figures:
    figures = Figures()
    check = Checker(load_vocabulary(files.base, files.shape.vocab_size, (EOS,)), LONG_SCHEMA)

    def rounds(server: LoramuxServer | VllmServer, name: str) -> None:
        for kind in (PLAIN, SCHEMA):
            answer_all(server, kind, Load(8, 4), files, f"warm {kind}")
        broken = figures.broken[name] = []
        for number in track(range(arguments.rounds), description=name, console=console):
            for kind in (PLAIN, SCHEMA) if number % 2 else (SCHEMA, PLAIN):
                seconds, texts = answer_all(server, kind, arguments.load, files, f"{number}")
                figures.seconds.setdefault((name, kind), []).append(seconds)
                broken += [text for text in texts if kind == SCHEMA and not check.is_beginning(text)]
        if broken and name == LORAMUX:
            raise SystemFailed(f"{name}'s answer breaks the schema: {broken[0]!r}")

    with open_loramux(arguments.dtype, arguments.threads, logs, files, False) as running:
        assert isinstance(running, LoramuxServer)
        rounds(running, LORAMUX)
        figures.first_token_s = asyncio.run(
            measure_first_tokens(running, files, arguments.pairs, arguments.schema_bytes, console)
        )
    peer = find_vllm(os.environ, arguments.threads, logs)
    if peer.missing is not None:
        console.print(f"{peer.name}: {peer.missing}")
        return figures
    python = Path(os.environ["LORAMUX_PEER_VLLM"]).absolute()
    with open_vllm(python, arguments.dtype, True, arguments.threads, logs, files, False) as running:
        assert isinstance(running, VllmServer)
        rounds(running, peer.name)
    return figures


def report(figures: Figures, num_tokens: int, console: Console) -> dict[str, Any]:
    """Print the tables, and return the figures with their goals."""
    speeds = {key: figures.speed(*key, num_tokens) for key in figures.seconds}
    by_system: dict[str, dict[str, float]] = {}
    for (name, kind), speed in speeds.items():
        by_system.setdefault(name, {})[kind] = round(speed, 2)
    rows = [[name, *(f"{found[kind]:.1f}" for kind in (PLAIN, SCHEMA))] for name, found in by_system.items()]
    title = "sixteen requests with distinct adapters, output tokens/s, median"
    console.print(table(title, ("system", PLAIN, SCHEMA), rows))
    values = {
        "every row": speeds[LORAMUX, SCHEMA] / speeds[LORAMUX, PLAIN],
        "over vLLM": speeds[LORAMUX, SCHEMA] / speeds["vLLM", SCHEMA] if ("vLLM", SCHEMA) in speeds else None,
        "first use": figures.extra_s("with", "without"),
        "neighbour": figures.extra_s("neighbour of with", "neighbour of without"),
    }
    shown = {
        "every row": "throughput with a schema on every row, relative to no schema",
        "over vLLM": "throughput with a schema on every row, relative to vLLM",
        "first use": "additional time to first token of the first use of a schema",
        "neighbour": "additional time to first token of a request that arrives together with a first use",
    }
    rows = []
    for name, value in values.items():
        is_time = name in ("first use", "neighbour")
        goal = GOALS.get(name)
        verdict = "" if value is None or goal is None else ("met" if (value <= goal) == is_time else "missed")
        written = "-" if value is None else (f"{1000 * value:+.0f} ms" if is_time else f"{value:.2f}")
        limit = "" if goal is None else (f"<= {1000 * goal:.0f} ms" if is_time else f">= {goal:.2f}")
        rows.append([shown[name], written, limit, verdict])
    console.print(table("goals", ("figure", "value", "goal", ""), rows))
    for name, broken in figures.broken.items():
        console.print(f"{name}: {len(broken)} answers break the schema")
    medians = {name: statistics.median(times) for name, times in figures.first_token_s.items()}
    console.print("time to first token, median: " + ", ".join(f"{k} {1000 * s:.0f} ms" for k, s in medians.items()))
    return {
        "tokens_per_second": by_system,
        "values": values,
        "goals": GOALS,
        "first_token_s": medians,
        "broken": figures.broken,
    }


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = new_parser("structured_output", __doc__)
    add = parser.add_argument
    add("--size", choices=sorted(SHAPES), default="1b", help="shape of the random model")
    add("--load", type=Load.parse, default=Load(32, 128), help="tokens per prompt and answer, like 32/128")
    add("--adapters", type=int, default=16)
    add("--rank", type=int, default=16)
    add("--rounds", type=int, default=5, help="measured rounds per system and kind of request")
    add("--pairs", type=int, default=15, help="pairs of requests, with and without a new schema")
    add("--schema-bytes", type=int, default=20_000, help="size of each new schema, in bytes")
    add("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    add("--threads", type=int, default=len(os.sched_getaffinity(0)))
    add("--scratch", type=Path, default=SCRATCH / "peers", help="directory for models and logs")
    return parser.parse_args(argv)


@reports_failure
def main(argv: Sequence[str] | None = None) -> int:
    run = begin(parse(argv))
    arguments = run.arguments
    files = make_model_files(arguments.scratch, arguments.size, arguments.adapters, arguments.rank)
    figures = measure(arguments, files, arguments.scratch.absolute() / "logs", run.console)
    found = report(figures, arguments.adapters * arguments.load.num_output, run.console)
    names = ("size", "load", "adapters", "rank", "rounds", "pairs", "schema_bytes", "dtype", "threads")
    workload = {name: str(getattr(arguments, name)) for name in names} | {"speculate": NO_DRAFTS[1]}
    seconds = {f"{name}, {kind}": times for (name, kind), times in figures.seconds.items()}
    run.write({"workload": workload, **found, "seconds": seconds, "first_tokens": figures.first_token_s})
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
