from __future__ import annotations

import os
import random
import sys
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol

from loramux.engine.adapters.adapter_pool import AdapterPool
from loramux.engine.constraints.grammars import Grammars
from loramux.engine.drafting.speculation import MAX_ROWS, Speculation
from loramux.engine.loop.decode_reads import ReadsPerStep
from loramux.engine.loop.engine import Engine, EngineParts, Observers
from loramux.engine.loop.engine_stats import EngineStats
from loramux.engine.pages.disk_pages import DiskPages
from loramux.engine.pages.eviction import LeastRecentlyUsed
from loramux.engine.pages.host_pages import HostPages
from loramux.engine.pages.kv_pages import KvPages
from loramux.engine.pages.page_pool import PagePool
from loramux.engine.pages.prefix_cache import PrefixCache
from loramux.engine.protocol.messages import (
    AdapterState,
    Add,
    Finished,
    SamplingParams,
    Stats,
    StatsRequest,
    StepOutput,
)
from loramux.engine.protocol.service_tiers import BACKGROUND_RANK
from loramux.engine.scheduling.fair_queue import FairQueue
from loramux.engine.scheduling.request_limits import EngineLimits
from loramux.engine.scheduling.scheduler import Scheduler, SchedulerLimits
from loramux.engine.sequences.cache_groups import CacheLayout, cache_layout
from tests.engine.simulated_device import (
    GREEDY,
    SimulatedDisk,
    SimulatedExecutor,
    SimulatedHostMemory,
    SimulatedPages,
    simulated_adapters,
)
from tests.engine.watched_stager import WatchedStager

VOCAB_SIZE = 1000
GRAMMAR_PROCESS = (sys.executable, "-P", str(Path(__file__).parent / "constraints" / "byte_grammar_process.py"))
"""Command of the process that follows grammars over `byte_vocabulary`."""


class Clock:
    """A clock that advances only when a test says so."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


@dataclass
class Simulation:
    engine: Engine
    pages: PagePool
    adapters: AdapterPool
    prefixes: PrefixCache
    scheduler: Scheduler
    grammars: Grammars
    speculation: Speculation
    executor: SimulatedExecutor
    stager: WatchedStager
    adapter_pages: SimulatedPages
    host_memory: SimulatedHostMemory
    disk: SimulatedDisk
    clock: Clock
    tokens: dict[str, list[int]] = field(default_factory=lambda: defaultdict(list))
    finished: dict[str, Finished] = field(default_factory=dict)
    answers: list[AdapterState] = field(default_factory=list)
    cached: Counter[str] = field(default_factory=Counter)
    """The cached prompt tokens of each sequence, as its outputs say."""

    def add(
        self,
        name: str,
        num_prompt: int = 5,
        max_tokens: int = 4,
        digest: str | None = None,
        sampling: SamplingParams = GREEDY,
        owner: bytes = b"gateway",
        **fields: Any,
    ) -> Add:
        seed = sum(name.encode())
        prompt = tuple((seed + position) % VOCAB_SIZE for position in range(num_prompt))
        add = self.make_add(name, prompt, max_tokens, digest, sampling, **fields)
        self.engine.add(owner, add)
        return add

    def make_add(
        self,
        name: str,
        prompt: tuple[int, ...],
        max_tokens: int,
        digest: str | None = None,
        sampling: SamplingParams = GREEDY,
        **fields: Any,
    ) -> Add:
        return Add(sequence_id=name, prompt=prompt, max_tokens=max_tokens, sampling=sampling, digest=digest, **fields)

    def step(self) -> bool:
        ran = self.engine.step()
        for outbound in self.engine.take_outbox():
            match outbound.message:
                case StepOutput(outputs=outputs):
                    for output in outputs:
                        assert output.sequence_id not in self.finished, "tokens after the end"
                        self.cached[output.sequence_id] += output.cached_tokens
                        self.tokens[output.sequence_id].extend(output.token_ids)
                case Finished():
                    self.finished[outbound.message.sequence_id] = outbound.message
                case AdapterState():
                    self.answers.append(outbound.message)
        running = self.scheduler.running
        ranks = Counter(one.rank for one in running)
        assert self.scheduler.running_by_rank == [ranks[rank] for rank in range(BACKGROUND_RANK + 1)]
        self.pages.check_integrity()
        self.prefixes.host.check_integrity()
        return ran

    def run(self, max_steps: int = 10_000) -> None:
        for _ in range(max_steps):
            if not self.engine.has_work:
                break
            self.step()
        else:
            raise AssertionError("the engine still has work")
        self.step()
        self.engine.check_integrity()

    def hold_loads(self) -> None:
        """Hold requested adapters and started copies until `let_loads_go` is called."""
        self.stager.is_holding = self.adapter_pages.is_holding = True

    def let_loads_go(self) -> None:
        self.stager.let_go()
        self.adapter_pages.let_go()

    def expected(self, add: Add) -> list[int]:
        return self.executor.generate(add.prompt, add.max_tokens, add.digest, add.activation, add.vocab_size)


def simulate_engine(
    num_pages: int = 64,
    num_slots: int = 8,
    adapters: dict[str, int] | None = None,
    max_batch_tokens: int = 64,
    max_sequences: int = 16,
    max_model_len: int = 512,
    eos: tuple[int, ...] = (),
    lookahead: bool = False,
    vocab_size: int = VOCAB_SIZE,
    windows: Sequence[int | None] = (None,),
    grammar_process: Sequence[str] = GRAMMAR_PROCESS,
    grammar_clock: Callable[[], float] | None = None,
    num_state_pages: int = 0,
    cache: CacheLayout | None = None,
    vocab_sizes: dict[str, int] | None = None,
    reads: ReadsPerStep | None = None,
    num_labels: dict[str, int] | None = None,
    speculates: bool = False,
    has_head: bool = False,
    max_draft_rows: int = MAX_ROWS,
    num_host_pages: int = 0,
    num_disk_pages: int = 0,
    disk_chance: random.Random | None = None,
    **waiting: float,
) -> Simulation:
    """`cache` replaces the layout that follows from `windows` and `num_state_pages`.

    `vocab_sizes` are the numbers of tokens of adapters with a vocabulary of their own, and `num_labels` the numbers of
    classes of classifiers, by digest. Steps wait for masks without end unless there is a `grammar_clock`. `speculates`
    guesses drafts from the text, and `has_head` with the base's own head. Steps with drafts have at most
    `max_draft_rows` rows. With `disk_chance`, transfers to and from the disk take long or fail by chance.
    """
    pages = PagePool(num_pages)
    policy, queue = LeastRecentlyUsed(), FairQueue()
    stager = WatchedStager(simulated_adapters(adapters or {}, vocab_sizes, num_labels))
    adapter_pages = SimulatedPages()
    pool = AdapterPool(pages, num_slots, stager, adapter_pages, adapter_pages, policy, on_residency=queue.set_resident)
    if cache is None:
        cache = replace(cache_layout(windows, max_model_len), num_state_pages=num_state_pages)
    executor = SimulatedExecutor(vocab_size, cache, num_pages, adapter_pages, eos)
    clock = Clock()
    host_memory = SimulatedHostMemory(executor, num_host_pages)
    disk = SimulatedDisk(host_memory, num_disk_pages, disk_chance)
    prefixes = PrefixCache(pages, policy, 16, host=HostPages(host_memory, DiskPages(disk, clock)))
    kv = KvPages(pages, pool.reclaimer, prefixes, cache, max_batch_tokens, executor.copy_page)
    scheduler = Scheduler(queue, kv, pool, SchedulerLimits(max_batch_tokens, max_sequences, look_ahead=max_sequences))
    limits = EngineLimits(vocab_size, max_model_len, eos, 16, **waiting)
    grammars = Grammars(grammar_process, os.environ, vocab_size, clock if grammar_clock is None else grammar_clock)
    speculation = Speculation(
        min(max_draft_rows, max_batch_tokens),
        guesses=speculates or has_head,
        lookahead=lookahead,
        has_head=has_head,
        clock=clock,
    )
    parts = EngineParts(pages, pool, prefixes, scheduler, executor, grammars, speculation)
    observers = Observers(EngineStats(pages, pool, prefixes, scheduler, reads=reads, drafts=speculation.counts))
    engine = Engine(limits, parts, observers, random.Random(0), clock, lookahead)
    if not lookahead:
        executor.is_unwanted = engine.is_step_unwanted
    return Simulation(
        engine,
        pages,
        pool,
        prefixes,
        scheduler,
        grammars,
        speculation,
        executor,
        stager,
        adapter_pages,
        host_memory,
        disk,
        clock,
    )


def stats_of(simulation: Simulation) -> Stats:
    return simulation.engine.stats(StatsRequest(call_id="s"))


class Simulate(Protocol):
    def __call__(self, **arguments: Any) -> Simulation: ...


def finishes(simulation: Simulation, max_steps: int = 3000) -> bool:
    """Step until no work is left. Return False if work is left after `max_steps`."""
    for _ in range(max_steps):
        if not simulation.engine.has_work:
            return True
        simulation.step()
    return False
