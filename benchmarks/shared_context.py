"""Measures the memory and the time to first token of several adapters over one long context.

All adapters get the same context, each with another question at its end. They compute it in three ways: each adapter
its own prompt, with the alias's option `share_base_cache`, and as activated adapters, whose invocation tokens are
before the question. Each way has an engine of its own, in which the requests run one after the other. For each way:
the bytes of the cached prefixes of all requests, compared with those of adapters that share nothing, and the processor
time to the first token of the second and later adapters, compared with the first's. One adapter's answer must be the
same without a prefix cache.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import torch

from benchmarks.answers import CheckError
from benchmarks.harness import SCRATCH, begin, new_parser, reports_failure
from benchmarks.random_model import SHAPES, load_peft, make_base
from benchmarks.running_engine import GREEDY, RunningEngine, start_engine
from benchmarks.tables import table
from loramux.adapter_store.formats.packed.invocation_tokens import INVOCATION_KEY
from loramux.adapter_store.formats.quantization.base_weights import BaseWeights
from loramux.engine.adapters.stager import MemoryStager
from loramux.engine.architectures.model_config import ModelConfig
from loramux.engine.decoder.kv_layout import kv_layout
from loramux.engine.loop.config import ITEMSIZE, EngineConfig, pack_target
from loramux.engine.offline.local_adapter import LocalAdapter, read_adapter
from loramux.engine.protocol.messages import Add

OWN, SHARED, ACTIVATED = "own prefixes", "share_base_cache", "activated"
INVOCATION = (7, 8)
"""The invocation tokens. Contexts and questions do not contain them."""
NUM_ANSWER = 8
BYTES_GOAL, TIME_GOAL = 0.25, 0.1
"""Largest shares of the bytes of separate prefixes, and of the first adapter's processor time."""


def make_adapters(base: Path, directory: Path, count: int, rank: int) -> None:
    """Write random PEFT adapters to `directory`, and activated ones with the same weights beside them."""
    if directory.exists():
        return
    load_peft(base, count, rank, torch.bfloat16).save_pretrained(directory)
    for number in range(count):
        plain, activated = directory / f"a{number}", directory / f"activated-a{number}"
        shutil.copytree(plain, activated)
        config = json.loads((plain / "adapter_config.json").read_text())
        (activated / "adapter_config.json").write_text(json.dumps({**config, INVOCATION_KEY: INVOCATION}))


def make_prompts(num_tokens: int, num_question: int, count: int, vocab_size: int) -> list[tuple[int, ...]]:
    """Prompts of `num_tokens` tokens that differ only in the question at their end."""
    dice = random.Random(1)

    def text(length: int) -> tuple[int, ...]:
        return tuple(dice.randrange(10, vocab_size) for _ in range(length))

    context = text(num_tokens - num_question - len(INVOCATION))
    return [(*context, *INVOCATION, *text(num_question)) for _ in range(count)]


def requests(way: str, prompts: Sequence[tuple[int, ...]], adapters: Sequence[LocalAdapter], num_own: int) -> list[Add]:
    """One request per adapter. They are one tenant's, so equal prefixes are shared."""
    adds = []
    for number, (prompt, adapter) in enumerate(zip(prompts, adapters, strict=True)):
        start = max(0, len(prompt) - num_own) if way == SHARED else adapter.activation(prompt)
        assert start is not None
        adds.append(
            Add(
                sequence_id=f"{way} {number}",
                prompt=prompt,
                max_tokens=NUM_ANSWER,
                sampling=GREEDY,
                digest=adapter.packed.digest,
                activation=start,
                isolation_key=b"tenant",
            )
        )
    return adds


def measure(engine: RunningEngine, adds: Sequence[Add]) -> dict[str, Any]:
    """Run the requests one after the other. Raises CheckError if the second adapter's answer depends on the cache."""
    engine.load(add.digest for add in adds if add.digest is not None)
    # Whatever a process does only once is not part of the first request's time.
    short = adds[0].prompt[-64:]
    engine.answer([msgspec.structs.replace(adds[0], sequence_id="warm", prompt=short, activation=0, isolation_key=b"")])
    seconds = []
    for add in adds:
        begun_s = time.process_time()
        engine.prefill([add])
        seconds.append(time.process_time() - begun_s)
        engine.finish()
    stats = engine.stats()
    again = msgspec.structs.replace(adds[1], sequence_id="cached")
    alone = msgspec.structs.replace(adds[1], sequence_id="alone", isolation_key=b"")
    answers = [engine.answer([one])[one.sequence_id].tokens for one in (again, alone)]
    if answers[0] != answers[1]:
        raise CheckError(f"{adds[1].sequence_id}: the answer depends on the prefix cache")
    return {
        "prefix_bytes": stats.num_prefix_pages * stats.page_bytes,
        "first_s": round(seconds[0], 3),
        "later_s": [round(one, 3) for one in seconds[1:]],
        "largest_share_of_first": round(max(seconds[1:]) / seconds[0], 4),
    }


def compare(arguments: argparse.Namespace, base: Path, directory: Path) -> dict[str, dict[str, Any]]:
    """The figures of each way. `bytes_share` is the share of the bytes that adapters with their own prefixes take."""
    model = ModelConfig.load(base)
    target, weights = pack_target(model, arguments.dtype), BaseWeights(base)
    prompts = make_prompts(arguments.tokens, arguments.question, arguments.adapters, model.vocab_size)
    itemsize = ITEMSIZE[arguments.dtype]
    page_bytes = model.geometry(itemsize, itemsize).pool_page_bytes
    pages = kv_layout(model, model.max_model_len, itemsize).max_pages(arguments.tokens + NUM_ANSWER, 0)
    found: dict[str, dict[str, Any]] = {}
    for way in (OWN, SHARED, ACTIVATED):
        prefix = "activated-a" if way == ACTIVATED else "a"
        names = [f"{prefix}{number}" for number in range(arguments.adapters)]
        adapters = [read_adapter(directory / name, target, weights, None, {}) for name in names]
        adapter_pages = sum(adapter.packed.num_pages for adapter in adapters)
        config = EngineConfig(
            model_dir=str(base),
            blob_url="",
            cache_dir="",
            dtype=arguments.dtype,
            num_threads=arguments.threads,
            # Room for the prefixes of all adapters, and for a request that shares none.
            pool_bytes=((len(names) + 2) * pages + adapter_pages) * page_bytes,
        )
        packed = {adapter.packed.digest: adapter.packed for adapter in adapters}
        with start_engine(config, MemoryStager(packed)) as engine:
            found[way] = measure(engine, requests(way, prompts, adapters, arguments.own))
        found[way]["bytes_share"] = round(found[way]["prefix_bytes"] / found[OWN]["prefix_bytes"], 4)
        print(json.dumps({way: found[way]}), flush=True)
    return found


@reports_failure
def main(argv: Sequence[str] | None = None) -> int:
    parser = new_parser("shared_context", __doc__)
    add = parser.add_argument
    add("--size", choices=sorted(SHAPES), default="tiny", help="shape of the random model")
    add("--adapters", type=int, default=8)
    add("--rank", type=int, default=8)
    add("--tokens", type=int, default=16_384, help="tokens of each prompt")
    add("--question", type=int, default=62, help="tokens of each question")
    add("--own", type=int, default=256, help="the option share_base_cache")
    add("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    add("--threads", type=int, default=len(os.sched_getaffinity(0)))
    run = begin(parser.parse_args(argv))
    arguments = run.arguments
    scratch = SCRATCH / "shared-context" / f"{arguments.size}-{arguments.tokens}"
    base, adapters = scratch / "base", scratch / f"adapters-{arguments.adapters}-{arguments.rank}"
    make_base(SHAPES[arguments.size], base, arguments.tokens + NUM_ANSWER)
    make_adapters(base, adapters, arguments.adapters, arguments.rank)
    found = compare(arguments, base, adapters)
    run.console.print(
        table("prefixes and first tokens", ("", "bytes", "share", "first", "slowest later"), _rows(found))
    )
    goals = {way: found[way] for way in (SHARED, ACTIVATED)}
    for way, figures in goals.items():
        is_met = figures["bytes_share"] <= BYTES_GOAL and figures["largest_share_of_first"] <= TIME_GOAL
        outcome = "met" if is_met else "missed"
        run.console.print(f"{way}: goals {BYTES_GOAL} of the bytes and {TIME_GOAL} of the first's time: {outcome}")
    names = ("size", "adapters", "rank", "tokens", "question", "own", "dtype", "threads")
    run.write({"workload": {name: getattr(arguments, name) for name in names}, "ways": found})
    return 0


def _rows(found: Mapping[str, Mapping[str, Any]]) -> list[list[str]]:
    return [
        [
            way,
            f"{figures['prefix_bytes'] / 2**20:.1f} MiB",
            f"{figures['bytes_share']:.3f}",
            f"{figures['first_s']:.2f} s",
            f"{max(figures['later_s']):.2f} s ({figures['largest_share_of_first']:.1%})",
        ]
        for way, figures in found.items()
    ]


if __name__ == "__main__":
    raise SystemExit(main())
