"""Measures how fast conversations continue if the pool is too small for them, with host memory for K and V and without.
With `--host`, host memory has room for only a part of them, and a third engine keeps the rest on disk.

Each tenant has one conversation, whose first message is long, like a system prompt. In each round, every conversation
gets its next message, in random order and one request at a time, and the time from the request to its first token is
measured. The engines answer each request, one right after the other: one with `kv_host_bytes` and one without. At the
end, all conversations together take `--oversize` times as many pages as the pool has. All answers must be the same. The
first messages of conversations are not in the figures, because nothing is cached for them.
"""

from __future__ import annotations

import os
import random
import statistics
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import msgspec

from benchmarks.answers import CheckError
from benchmarks.harness import SCRATCH, begin, new_parser, percentiles_ms, reports_failure, rotated
from benchmarks.random_model import SHAPES, make_base
from benchmarks.running_engine import GREEDY, RunningEngine, start_engine
from benchmarks.tables import table
from loramux.engine.adapters.stager import MemoryStager
from loramux.engine.architectures.gguf_model import model_directory
from loramux.engine.architectures.model_config import ModelConfig
from loramux.engine.decoder.kv_layout import kv_layout
from loramux.engine.loop.config import ITEMSIZE, EngineConfig
from loramux.engine.protocol.messages import Add, Finished, StepOutput

WITH, WITHOUT, DISK = "with host memory", "without", "with host memory and disk"
GOAL = 0.3
"""Largest ratio of the median times to first token."""


class Conversations:
    """One conversation per tenant. `sizes` are the numbers of tokens of first messages, later messages and answers."""

    def __init__(self, num_tenants: int, vocab_size: int, sizes: tuple[int, int, int]) -> None:
        self._dice = random.Random(1)
        self._vocab_size = vocab_size
        self._num_first, self._num_message, self._num_answer = sizes
        self._contexts: list[tuple[int, ...]] = [()] * num_tenants
        self._num_requests = 0

    def order(self) -> list[int]:
        return self._dice.sample(range(len(self._contexts)), len(self._contexts))

    def request(self, tenant: int) -> Add:
        num_tokens = self._num_message if self._contexts[tenant] else self._num_first
        message = [self._dice.randrange(10, self._vocab_size) for _ in range(num_tokens)]
        self._contexts[tenant] += tuple(message)
        self._num_requests += 1
        return Add(
            sequence_id=str(self._num_requests),
            prompt=self._contexts[tenant],
            max_tokens=self._num_answer,
            sampling=GREEDY,
            isolation_key=f"tenant {tenant}".encode(),
        )

    def note_answer(self, tenant: int, answer: Sequence[int]) -> None:
        self._contexts[tenant] += tuple(answer)


def answer(engine: RunningEngine, add: Add) -> tuple[float, list[int], int]:
    """Seconds to the first token, the answer, and the number of prompt tokens that were cached."""
    started, first = time.perf_counter(), 0.0
    engine.add(add)
    tokens: list[int] = []
    num_cached = 0
    while engine.num_sequences:
        for outbound in engine.step():
            match outbound.message:
                case StepOutput(outputs=outputs):
                    first = first or time.perf_counter() - started
                    for output in outputs:
                        tokens.extend(output.token_ids)
                case Finished(cached_tokens=cached_tokens):
                    num_cached = cached_tokens
    return first, tokens, num_cached


def measure(engines: Mapping[str, RunningEngine], conversations: Conversations, num_turns: int) -> dict[str, Any]:
    seconds: dict[str, list[float]] = {way: [] for way in engines}
    cached: dict[str, int] = dict.fromkeys(engines, 0)
    num_prompt = 0
    for turn in range(num_turns):
        for number, tenant in enumerate(conversations.order()):
            add = conversations.request(tenant)
            answers: dict[str, list[int]] = {}
            for way in rotated(list(engines), number):
                first, answers[way], num_cached = answer(engines[way], add)
                if turn:
                    seconds[way].append(first)
                    cached[way] += num_cached
            if any(one != answers[WITHOUT] for one in answers.values()):
                raise CheckError(f"turn {turn} of tenant {tenant}: the answers differ")
            conversations.note_answer(tenant, answers[WITH])
            num_prompt += len(add.prompt) if turn else 0
    medians = {way: statistics.median(times) for way, times in seconds.items()}
    disk = {}
    if DISK in engines:
        disk = {
            "disk_ratio": round(medians[DISK] / medians[WITHOUT], 3),
            "disk_pages": msgspec.to_builtins(engines[DISK].stats().disk_pages),
        }
    return {
        "ways": {
            way: percentiles_ms(seconds[way], 50, 90) | {"cached_share": round(cached[way] / num_prompt, 3)}
            for way in engines
        },
        "ratio": round(medians[WITH] / medians[WITHOUT], 3),
        "goal": GOAL,
        "host_pages": msgspec.to_builtins(engines[WITH].stats().host_pages),
        **disk,
    }


@reports_failure
def main(argv: Sequence[str] | None = None) -> int:
    parser = new_parser("conversations", __doc__)
    add = parser.add_argument
    add("--base", type=Path, help="directory or GGUF file of a base (default: a random model)")
    add("--size", choices=sorted(SHAPES), default="small", help="shape of the random model")
    add("--tenants", type=int, default=6)
    add("--turns", type=int, default=10)
    add("--first", type=int, default=800, help="tokens of each first message")
    add("--message", type=int, default=80, help="tokens of each later message")
    add("--answer", type=int, default=8, help="tokens of each answer")
    add("--oversize", type=float, default=3.0, help="size of all conversations, in pools")
    add("--host", type=float, help="size of host memory as a part of all conversations (default: all, and no disk)")
    add("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    add("--threads", type=int, default=len(os.sched_getaffinity(0)))
    run = begin(parser.parse_args(argv))
    arguments = run.arguments
    if arguments.base is None:
        arguments.base = SCRATCH / "conversations" / arguments.size
        make_base(SHAPES[arguments.size], arguments.base)
    else:
        arguments.size = None
    directory = model_directory(arguments.base)
    model = ModelConfig.load(directory)
    itemsize = ITEMSIZE[arguments.dtype]
    layout = kv_layout(model, model.max_model_len, itemsize)
    num_tokens = arguments.first + (arguments.turns - 1) * arguments.message + arguments.turns * arguments.answer
    num_pages = arguments.tenants * layout.max_pages(num_tokens, 0)
    page_bytes = model.geometry(itemsize, itemsize).pool_page_bytes
    config = EngineConfig(
        model_dir=str(directory),
        blob_url="",
        cache_dir="",
        dtype=arguments.dtype,
        num_threads=arguments.threads,
        pool_bytes=int(num_pages / arguments.oversize) * page_bytes,
    )
    num_host = num_pages if arguments.host is None else int(arguments.host * num_pages)
    with_host = msgspec.structs.replace(config, kv_host_bytes=num_host * page_bytes)
    configs = {WITHOUT: config, WITH: with_host}
    if arguments.host is not None:
        SCRATCH.mkdir(parents=True, exist_ok=True)
        # Some of the pages are on disk and in host memory.
        size = 2 * num_pages * page_bytes
        configs[DISK] = msgspec.structs.replace(with_host, cache_dir=str(SCRATCH), kv_disk_bytes=size)
    sizes = arguments.first, arguments.message, arguments.answer
    conversations = Conversations(arguments.tenants, model.vocab_size, sizes)
    with ExitStack() as stack:
        engines = {way: stack.enter_context(start_engine(one, MemoryStager({}))) for way, one in configs.items()}
        figures = measure(engines, conversations, arguments.turns)
    rows = [
        [way, f"{one['p50_ms']:.1f} ms", f"{one['p90_ms']:.1f} ms", f"{one['cached_share']:.0%}"]
        for way, one in figures["ways"].items()
    ]
    run.console.print(table("time to first token of later turns", ("", "p50", "p90", "cached"), rows))
    outcome = "met" if figures["ratio"] <= GOAL else "missed"
    run.console.print(f"p50 {figures['ratio']:.3f} of that without, goal {GOAL}: {outcome}")
    if arguments.host is not None:
        run.console.print(f"with disk {figures['disk_ratio']:.3f} of that without")
    names = ("size", "tenants", "turns", "first", "message", "answer", "oversize", "host", "dtype", "threads")
    workload = {name: getattr(arguments, name) for name in names} | {"base": arguments.base.name}
    run.write({"workload": workload, **figures})
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
