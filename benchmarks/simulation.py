"""Measures how many steps per second the engine can run when the device takes no time.

The scheduler, pools, prefix cache and fair queue run as in a real engine, on a simulated device with a simulated clock
and a seeded random source. A fixed number of sequences runs at any time. Prompts have 16 to 100 tokens and answers have
32 to 128. The sequences belong to 8 accounts and use 24 adapters of 3 pages each, with 16 adapter slots. Steps per
second are computed from CPU time, including that of the simulated device. Every answer is compared with the answer that
the device should generate for its prompt.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import time
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from benchmarks.gpu.bench import CheckError
from benchmarks.machine import add_allow_busy, describe, require_idle
from loramux.engine.adapters.adapter_pool import AdapterPool
from loramux.engine.adapters.stager import MemoryStager
from loramux.engine.constraints.grammars import Grammars
from loramux.engine.execution.simulation import GREEDY, SimulatedExecutor, SimulatedPages, simulated_adapters
from loramux.engine.loop.engine import Engine, EngineParts, Observers
from loramux.engine.loop.engine_stats import EngineStats
from loramux.engine.pages.eviction import LeastRecentlyUsed
from loramux.engine.pages.kv_pages import KvPages
from loramux.engine.pages.page_pool import PagePool
from loramux.engine.pages.prefix_cache import PrefixCache
from loramux.engine.protocol.messages import Add, Finished, StepOutput
from loramux.engine.scheduling.fair_queue import FairQueue
from loramux.engine.scheduling.request_limits import EngineLimits
from loramux.engine.scheduling.scheduler import Scheduler, SchedulerLimits
from loramux.engine.sequences.cache_groups import cache_layout

VOCAB_SIZE = 97
PAGE_TOKENS = 16
NUM_PAGES = 800
MAX_MODEL_LEN = 512
GATEWAY = b"gateway"
ADAPTERS = {f"adapter{number}": 3 for number in range(24)}
CHUNK_STEPS = 200
TARGET_STEPS_S = 2000


class SteadyLoad:
    """An engine in which `num_running` sequences are always running and a few are waiting."""

    def __init__(self, num_running: int, is_ahead: bool) -> None:
        self._rng = random.Random(1)
        self._num_wanted = num_running + num_running // 8
        pages = PagePool(NUM_PAGES)
        policy, queue = LeastRecentlyUsed(), FairQueue()
        stager, adapter_pages = MemoryStager(simulated_adapters(ADAPTERS)), SimulatedPages()
        adapters = AdapterPool(pages, 16, stager, adapter_pages, adapter_pages, policy, on_residency=queue.set_resident)
        prefixes = PrefixCache(pages, policy, PAGE_TOKENS)
        cache = cache_layout((None,), MAX_MODEL_LEN)
        kv = KvPages(pages, adapters.reclaimer, prefixes, cache, max_step_tokens=256)
        self._scheduler = Scheduler(queue, kv, adapters, SchedulerLimits(256, num_running, look_ahead=num_running))
        self._executor = SimulatedExecutor(VOCAB_SIZE, cache, NUM_PAGES, adapter_pages)
        limits = EngineLimits(VOCAB_SIZE, MAX_MODEL_LEN, (), PAGE_TOKENS)
        grammars = Grammars((), {}, VOCAB_SIZE)
        self._engine = Engine(
            limits,
            EngineParts(pages, adapters, prefixes, self._scheduler, self._executor, grammars),
            Observers(EngineStats(pages, adapters, prefixes, self._scheduler)),
            random.Random(0),
            lambda: 0.0,
            is_ahead,
        )
        self._adds: dict[str, Add] = {}
        self._tokens: defaultdict[str, list[int]] = defaultdict(list)
        self._num_asked = 0
        self.num_checked = 0
        self.num_running = 0

    def run(self, num_steps: int) -> float:
        """Run `num_steps` steps. Return their CPU seconds, which exclude creating requests and checking answers."""
        seconds = 0.0
        for _ in range(num_steps):
            while len(self._adds) < self._num_wanted:
                self._ask()
            started_s = time.process_time()
            self._engine.step()
            outbox = self._engine.take_outbox()
            seconds += time.process_time() - started_s
            self.num_running += len(self._scheduler.running)
            for outbound in outbox:
                match outbound.message:
                    case StepOutput(outputs=outputs):
                        for output in outputs:
                            self._tokens[output.sequence_id].extend(output.token_ids)
                    case Finished() as finished:
                        self._check(finished)
            self._executor.batches.clear()
        return seconds

    def _ask(self) -> None:
        self._num_asked += 1
        add = Add(
            sequence_id=f"sequence{self._num_asked}",
            prompt=tuple(self._rng.randrange(VOCAB_SIZE) for _ in range(self._rng.randint(16, 100))),
            max_tokens=self._rng.randint(32, 128),
            sampling=GREEDY,
            digest=self._rng.choice(list(ADAPTERS)),
            share_key=f"share{self._rng.randrange(8)}",
            isolation_key=b"one",
        )
        self._adds[add.sequence_id] = add
        self._engine.add(GATEWAY, add)

    def _check(self, finished: Finished) -> None:
        add = self._adds.pop(finished.sequence_id)
        received = self._tokens.pop(finished.sequence_id)
        if received != self._executor.generate(add.prompt, add.max_tokens, add.digest):
            raise CheckError(f"{finished.sequence_id} received tokens that the device did not generate")
        self.num_checked += 1


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.simulation", description=__doc__)
    parser.add_argument("--running", type=int, default=32, help="sequences running at any time")
    parser.add_argument(
        "--steps", type=int, default=10_000, help="steps in each mode, rounded down to a multiple of 200"
    )
    parser.add_argument("--out", type=Path, help="write the figures to this JSON file")
    add_allow_busy(parser)
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> None:
    arguments = parse(argv)
    require_idle(arguments.allow_busy)
    console = Console()
    results = {}
    for name, is_ahead in (("at once", False), ("one step ahead", True)):
        load = SteadyLoad(arguments.running, is_ahead)
        load.run(CHUNK_STEPS)
        load.num_running = 0
        num_chunks = max(1, arguments.steps // CHUNK_STEPS)
        rates = [CHUNK_STEPS / load.run(CHUNK_STEPS) for _ in range(num_chunks)]
        if not load.num_checked:
            raise CheckError("no sequence finished: use more --steps")
        results[name] = {
            "steps": num_chunks * CHUNK_STEPS,
            "steps_per_s_median": round(statistics.median(rates)),
            "steps_per_s_best": round(max(rates)),
            "running_on_average": round(load.num_running / (num_chunks * CHUNK_STEPS), 1),
            "answers_checked": load.num_checked,
        }
        console.print(f"{name}: {results[name]}")
    if arguments.out:
        document = {"machine": describe(), "target_steps_per_s": TARGET_STEPS_S, "results": results}
        arguments.out.write_text(json.dumps(document, indent=2) + "\n")


if __name__ == "__main__":
    main()
