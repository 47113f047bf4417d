"""Simulates prefill and decode on separate replicas, and compares them with replicas that do both.

Four GPUs serve a model with 8 billion parameters and 400 adapters of 84 MB, drawn by Zipf's law. Each replica adds one
token to every running sequence per step, and fills the step with chunks of prompts. The time of a step follows from the
bytes that it reads and the products that it computes. Replicas that only prefill send the K/V of a prompt to a replica
that decodes, which needs the adapter, too. The router is loramux's own code. Time is simulated, so the figures do not
depend on the machine, and equal seeds give equal figures. Each run ends with a check that no token was lost.
"""

from __future__ import annotations

import argparse
import dataclasses
import hashlib
import heapq
import itertools
import math
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from random import Random
from typing import Any

from benchmarks.answers import CheckError
from benchmarks.harness import begin, new_parser, reports_failure
from benchmarks.tables import table
from loramux.platform.routing.router import Router
from loramux.platform.routing.views import ReplicaView, RoutingRequest, digest_prefix

NUM_REPLICAS = 4
NUM_ADAPTERS = 400
POOL_ADAPTERS = 200
ZIPF = 1.0
MAX_SEQUENCES = 256
LOAD_S = (0.2, 1.0)
"""Bounds of the time to load an adapter from the disk or the blob store, which is uniformly distributed."""
REPORT_S = 1.0
SETTLE_S, MEASURE_S = 10.0, 20.0
SPREAD = (0.5, 1.5)
"""Lengths are uniformly distributed between these multiples of their mean."""

BANDWIDTH = 4.3e12
"""Bytes that the device reads per second, as measured on an H200."""
PRODUCTS = 4e14
"""Floating point operations per second, 40 % of an H200's peak in bfloat16."""
BASE_BYTES = 15.0e9
OPERATIONS_PER_TOKEN = 15.0e9
OPERATIONS_PER_PAIR = 5.2e5
"""Operations of the attention for one token and one token before it, over all layers."""
KV_BYTES = 131_072
"""Bytes of K and V of one token in all layers."""
ADAPTER_BYTES = 84e6
STEP_S = 0.3e-3
"""Time of a step besides reading and computing, in seconds."""
LINK_BANDWIDTH = 40e9
"""Bytes that move between two replicas per second: 80 % of 400 Gbit/s."""
LINK_S = 2e-3

MAX_SECOND_TOKEN_S = 2.0
"""Goal for the p99 of the time to the second token, in seconds. Until then, a request can have waited twice."""
GAPS_S = (0.1, 0.03, 0.01)
"""Goals for the p99 of the time between two tokens of a stream, in seconds."""
CHUNKS = (2048, 512, 128)
"""Tokens of one step on replicas that do both. 2,048 is the default of `max_batch_tokens` on a GPU."""


@dataclasses.dataclass(frozen=True, slots=True)
class Workload:
    name: str
    prompt_tokens: int
    answer_tokens: int

    @property
    def requests_per_s(self) -> float:
        """Roughly what the replicas can serve, if every step has 64 sequences."""
        decode_s = (BASE_BYTES / BANDWIDTH + STEP_S) / 64 + KV_BYTES * self.prompt_tokens / BANDWIDTH
        prefill_s = OPERATIONS_PER_TOKEN / PRODUCTS
        return NUM_REPLICAS / (self.prompt_tokens * prefill_s + self.answer_tokens * decode_s)


WORKLOADS = (Workload("chat", 400, 300), Workload("long prompts", 4000, 300), Workload("long answers", 400, 2000))
PARTS = (0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0, 1.1, 1.2, 1.3, 1.4, 1.6, 1.8)
"""Offered load, as parts of `Workload.requests_per_s`."""


@dataclasses.dataclass(frozen=True, slots=True)
class Layout:
    """`num_prefill` of the replicas only prefill; 0 means that every replica does both. `chunk` is a step's tokens."""

    num_prefill: int
    chunk: int

    @property
    def name(self) -> str:
        split = f"{self.num_prefill} prefill, {NUM_REPLICAS - self.num_prefill} decode"
        return split if self.num_prefill else f"both, {self.chunk} tokens"


LAYOUTS = (*(Layout(0, chunk) for chunk in CHUNKS), *(Layout(number, 4096) for number in range(1, NUM_REPLICAS)))


@dataclasses.dataclass(slots=True, eq=False)
class Job:
    adapter: int
    prompt: int
    answer: int
    arrived_s: float
    routing: RoutingRequest
    num_prefilled: int = 0
    num_answered: int = 0
    last_s: float = 0.0
    second_s: float | None = None
    was_resident: bool = True


class Replica:
    """Sequences in continuous batches, and a pool of adapters from which the least recently used idle one is evicted.

    `done` is called for a job whose prompt is computed on a replica that only prefills, and for one that has ended.
    """

    def __init__(self, name: str, fleet: Fleet, chunk: int, only_prefills: bool, done: Callable[[Job], None]) -> None:
        self.id = name
        self._fleet = fleet
        self._chunk = chunk
        self._only_prefills = only_prefills
        self._done = done
        self._pool: OrderedDict[int, int] = OrderedDict()
        self._loading: dict[int, list[Job]] = {}
        self._ready: deque[Job] = deque()
        self._running: list[Job] = []
        self._is_stepping = False
        self.num_loads = 0

    def put(self, adapter: int) -> None:
        """Place an adapter in the pool before the simulation begins."""
        if len(self._pool) == POOL_ADAPTERS:
            self._pool.popitem(last=False)
        self._pool[adapter] = 0

    def add(self, job: Job) -> None:
        if job.adapter in self._pool:
            self._pool[job.adapter] += 1
            self._pool.move_to_end(job.adapter)
            self._ready.append(job)
            self._step()
            return
        job.was_resident = False
        waiting = self._loading.setdefault(job.adapter, [])
        waiting.append(job)
        if len(waiting) == 1:
            self.num_loads += 1
            self._fleet.after(self._fleet.random.uniform(*LOAD_S), lambda: self._loaded(job.adapter))

    def view(self, now_s: float) -> ReplicaView:
        num_waiting = len(self._ready) + sum(map(len, self._loading.values()))
        return ReplicaView(
            id=self.id,
            is_local=False,
            num_running=len(self._running),
            num_waiting=num_waiting,
            capacity=MAX_SEQUENCES,
            pages_free_fraction=1.0,
            is_draining=False,
            holds=frozenset(self._fleet.prefixes[one] for one in (*self._pool, *self._loading)),
            since_s=now_s,
        )

    def _loaded(self, adapter: int) -> None:
        if len(self._pool) >= POOL_ADAPTERS:
            idle = next((one for one, num_users in self._pool.items() if not num_users), None)
            if idle is None:
                self._fleet.after(0.05, lambda: self._loaded(adapter))
                return
            del self._pool[idle]
        jobs = self._loading.pop(adapter)
        self._pool[adapter] = len(jobs)
        self._ready.extend(jobs)
        self._step()

    def _step(self) -> None:
        """Begin a step, unless one runs or there is nothing to do."""
        if self._is_stepping:
            return
        while self._ready and len(self._running) < MAX_SEQUENCES:
            self._running.append(self._ready.popleft())
        if not self._running:
            return
        decoding = [job for job in self._running if job.num_prefilled == job.prompt]
        room, operations, context = self._chunk - len(decoding), 0.0, 0
        chunks: list[tuple[Job, int]] = []
        for job in self._running:
            if job.num_prefilled < job.prompt and room > 0:
                size = min(room, job.prompt - job.num_prefilled)
                room -= size
                chunks.append((job, size))
                operations += size * (OPERATIONS_PER_TOKEN + OPERATIONS_PER_PAIR * (job.num_prefilled + size / 2))
        context = sum(job.prompt + job.num_answered for job in decoding)
        operations += len(decoding) * OPERATIONS_PER_TOKEN
        adapters = len({job.adapter for job in decoding} | {job.adapter for job, _ in chunks})
        read_s = (context * KV_BYTES + adapters * ADAPTER_BYTES) / BANDWIDTH
        seconds = STEP_S + max(BASE_BYTES / BANDWIDTH, operations / PRODUCTS) + read_s
        self._is_stepping = True
        self._fleet.after(seconds, lambda: self._stepped(decoding, chunks))

    def _stepped(self, decoding: list[Job], chunks: list[tuple[Job, int]]) -> None:
        now_s = self._fleet.now_s
        for job, size in chunks:
            job.num_prefilled += size
            if job.num_prefilled == job.prompt:
                # The last chunk of a prompt gives the first token.
                self._emit(job, now_s)
        for job in decoding:
            self._emit(job, now_s)
        ended = [job for job in self._running if self._is_done(job)]
        self._running = [job for job in self._running if not self._is_done(job)]
        for job in ended:
            self._pool[job.adapter] -= 1
            self._done(job)
        self._is_stepping = False
        self._step()

    def _is_done(self, job: Job) -> bool:
        return job.num_answered == job.answer or (self._only_prefills and job.num_answered > 0)

    def _emit(self, job: Job, now_s: float) -> None:
        job.num_answered += 1
        if job.num_answered > 1:
            self._fleet.gaps.append(now_s - job.last_s)
        if job.num_answered == 2:
            job.second_s = now_s
        job.last_s = now_s


class Fleet:
    def __init__(self, workload: Workload, layout: Layout, requests_per_s: float, seed: int = 1) -> None:
        self.now_s = 0.0
        self.random = Random(seed)
        self.gaps: list[float] = []
        self.moved_bytes = 0
        self._workload = workload
        self._rate = requests_per_s
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = itertools.count()
        self._jobs: list[Job] = []
        self._num_ended = 0
        digests = [hashlib.sha256(b"%d" % adapter).hexdigest() for adapter in range(NUM_ADAPTERS)]
        self.prefixes = [digest_prefix(digest) for digest in digests]
        self._routing = [
            RoutingRequest(digest=one, prefix_key=None, share_key="", weight=1, num_prompt_tokens=0, max_tokens=1)
            for one in digests
        ]
        weights = [1 / (rank + 1) ** ZIPF for rank in range(NUM_ADAPTERS)]
        self._cumulative = list(itertools.accumulate(weights))
        split = layout.num_prefill
        first = [Replica(f"p{one}", self, layout.chunk, True, self._prefilled) for one in range(split)]
        last = [Replica(f"d{one}", self, layout.chunk, False, self._ended) for one in range(NUM_REPLICAS - split)]
        self.groups = [group for group in (first, last) if group]
        self._routers = [Router(clock=lambda: self.now_s, random=Random(seed + 1)) for _ in self.groups]
        self._places: dict[Job, list[str]] = {}
        self._report(is_again=False)
        for router, group in zip(self._routers, self.groups, strict=True):
            by_name = {one.id: one for one in group}
            for adapter in reversed(range(NUM_ADAPTERS)):
                by_name[router.choose(self._routing[adapter])].put(adapter)
        self._report()
        self._arrive()

    def run(self, until_s: float) -> None:
        while self._events[0][0] <= until_s:
            self.now_s, _, event = heapq.heappop(self._events)
            event()
        self.now_s = until_s

    def after(self, seconds: float, event: Callable[[], None]) -> None:
        heapq.heappush(self._events, (self.now_s + seconds, next(self._numbers), event))

    def figures(self) -> dict[str, Any]:
        """Run, and return the figures of the requests that arrived while the fleet was measured."""
        self.run(SETTLE_S)
        self.gaps.clear()
        self.moved_bytes = 0
        num_loads = self.num_loads
        self.run(SETTLE_S + MEASURE_S)
        found = [job for job in self._jobs if job.arrived_s >= SETTLE_S]
        waits = sorted((self.now_s if job.second_s is None else job.second_s) - job.arrived_s for job in found)
        self._check()
        return {
            "requests": len(found),
            "p99_second_token_s": round(waits[len(waits) * 99 // 100], 3),
            "p99_gap_s": round(sorted(self.gaps)[len(self.gaps) * 99 // 100], 4) if self.gaps else math.inf,
            "hit_rate": round(sum(job.was_resident for job in found) / len(found), 4),
            "loads_per_s": round((self.num_loads - num_loads) / MEASURE_S, 1),
            "moved_gb_per_s": round(self.moved_bytes / MEASURE_S / 1e9, 2),
        }

    @property
    def num_loads(self) -> int:
        return sum(replica.num_loads for group in self.groups for replica in group)

    def _check(self) -> None:
        """Raise CheckError unless each job is finished or has a place, and no answer is too long."""
        num_present = len(self._places)
        if self._num_ended + num_present != len(self._jobs):
            raise CheckError(f"{len(self._jobs)} requests, {self._num_ended} ended, {num_present} present")
        if any(job.num_answered > job.answer or job.num_prefilled > job.prompt for job in self._jobs):
            raise CheckError("a request has more tokens than it asked for")

    def _report(self, is_again: bool = True) -> None:
        for router, group in zip(self._routers, self.groups, strict=True):
            router.update([replica.view(self.now_s) for replica in group])
        if is_again:
            self.after(REPORT_S, self._report)

    def _arrive(self) -> None:
        self.after(self.random.expovariate(self._rate), self._arrive)
        adapter = self.random.choices(range(NUM_ADAPTERS), cum_weights=self._cumulative)[0]
        prompt, answer = (
            max(2, round(mean * self.random.uniform(*SPREAD)))
            for mean in (self._workload.prompt_tokens, self._workload.answer_tokens)
        )
        job = Job(adapter, prompt, answer, self.now_s, self._routing[adapter])
        self._jobs.append(job)
        self._places[job] = []
        self._send(job, 0)

    def _send(self, job: Job, number: int) -> None:
        router = self._routers[number]
        chosen = router.choose(job.routing)
        router.note_started(chosen, job.routing)
        self._places[job].append(chosen)
        next(one for one in self.groups[number] if one.id == chosen).add(job)

    def _prefilled(self, job: Job) -> None:
        self._routers[0].note_ended(self._places[job][0], job.routing)
        num_bytes = job.prompt * KV_BYTES
        self.moved_bytes += num_bytes
        self.after(LINK_S + num_bytes / LINK_BANDWIDTH, lambda: self._send(job, 1))

    def _ended(self, job: Job) -> None:
        self._routers[-1].note_ended(self._places.pop(job)[-1], job.routing)
        self._num_ended += 1


def measure(workload: Workload, layout: Layout, part: float, seed: int) -> dict[str, Any]:
    rate = part * workload.requests_per_s
    figures = Fleet(workload, layout, rate, seed).figures()
    return {"workload": workload.name, "layout": layout.name, "requests_per_s": round(rate, 1), **figures}


def best(rows: Sequence[dict[str, Any]], workload: Workload, gap_s: float, is_split: bool) -> dict[str, Any] | None:
    """Return the row with the highest rate that meets the goals, or None."""
    meets = [
        row
        for row in rows
        if row["workload"] == workload.name
        and ("prefill" in row["layout"]) is is_split
        and row["p99_second_token_s"] <= MAX_SECOND_TOKEN_S
        and row["p99_gap_s"] <= gap_s
    ]
    return max(meets, key=lambda row: row["requests_per_s"], default=None)


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = new_parser("routing.disaggregation", __doc__, is_timed=False)
    parser.add_argument("--parts", type=float, nargs="+", default=PARTS, help="offered loads, as parts of the capacity")
    parser.add_argument("--seed", type=int, default=1)
    return parser.parse_args(argv)


@reports_failure
def main(argv: Sequence[str] | None = None) -> None:
    run = begin(parse(argv))
    rows: list[dict[str, Any]] = []
    for workload in WORKLOADS:
        for layout in LAYOUTS:
            for part in sorted(run.arguments.parts):
                rows.append(measure(workload, layout, part, run.arguments.seed))
                if rows[-1]["p99_second_token_s"] > 2 * MAX_SECOND_TOKEN_S:
                    break
    headings = ("workload", "goal", "both: requests/s", "split: requests/s", "split over both", "moved", "loads/s")
    shown = []
    for workload, gap_s in itertools.product(WORKLOADS, GAPS_S):
        both, split = (best(rows, workload, gap_s, is_split) for is_split in (False, True))
        cells = [f"{row['requests_per_s']:.0f} ({row['layout']})" if row else "none" for row in (both, split)]
        ratio = f"{split['requests_per_s'] / both['requests_per_s']:.2f}" if both and split else ""
        moved = f"{split['moved_gb_per_s']:.1f} GB/s" if split else ""
        loads = " / ".join(f"{row['loads_per_s']:.1f}" if row else "-" for row in (both, split))
        shown.append((workload.name, f"{1000 * gap_s:.0f} ms", *cells, ratio, moved, loads))
    run.console.print(table("highest rate within the goals", headings, shown))
    run.write({"goals": {"p99_second_token_s": MAX_SECOND_TOKEN_S, "p99_gap_s": GAPS_S}, "rows": rows})


if __name__ == "__main__":
    raise SystemExit(main())
