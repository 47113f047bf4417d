"""Measures cold adapters on a card: their first tokens by rank and by tier, and other streams while many are loaded.

A staging process loads adapters as in a server. For each rank, an idle engine answers one prompt with one adapter four
times: from the object store (a directory), from the pool (warm), from host memory, and from the disk after the
operating system has dropped its cached copy. `added_ms` is the time to first token minus the warm one. The engine's
counts must show that the adapter came from that tier, and each answer must equal the warm one.

The storm is that of `benchmarks.tenants.cold_storm`, with its traffic, on this engine and with adapters of rank 16.
"""

from __future__ import annotations

import hashlib
import statistics
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.answers import Answer, CheckError, compare
from benchmarks.gpu import check as gpu_check
from benchmarks.gpu.bench import Bench, Goal, Row
from benchmarks.gpu.engine import ObservedEngine, engine_dtype, open_engine
from benchmarks.gpu.model import Model, model_of
from benchmarks.gpu.random_models import ALL_MODULES, RandomAdapters, model_config, random_prompt
from benchmarks.gpu.warm import WarmStep, warm_steps
from benchmarks.harness import percentile
from benchmarks.hot_load_files import drop_cached
from benchmarks.running_engine import greedy_adds
from benchmarks.s_lora.adapters import AdapterFiles
from benchmarks.tenants import cold_storm
from benchmarks.tenants.figures import compare as compare_ways
from benchmarks.tenants.figures import pooled
from loramux.adapter_store.blobs.blob_url import open_blob_store
from loramux.adapter_store.blobs.interface import packed_key
from loramux.adapter_store.formats.packed.packed_file import write_packed
from loramux.adapter_store.tiers.disk_tier import DiskTier
from loramux.engine.protocol.messages import SamplingParams, Unload

PAGE_TOKENS = 16
BATCH_TOKENS = 2048
STORM_RANK = 16
UNTIMED_ROUNDS = 1
"""Rounds of the storm before the measured ones, in which kernels are compiled and steps captured."""

NUM_WRITERS = 8
DISK_BYTES = 1 << 40
OBJECT_STORE, HOST, DISK = "object store", "host memory", "disk"
COUNTED = {OBJECT_STORE: "blobs", HOST: "host", DISK: "disk"}
"""The tiers from which a cold adapter is loaded, and their names in the engine's counts."""

TOLERANCES = {"bfloat16": 0.05, "float32": 1e-3}
"""Largest accepted difference between an adapter's log-probabilities after two loads."""

STORM = (
    *("--residents", "32", "--resident-adapters", "8", "--seats", "32", "--loads", "8", "--seconds", "2"),
    *("--repeats", "3", "--pool-adapters", "24", "--spare-adapters", "4", "--host-adapters", "24"),
    *("--input", "32-128", "--output", "64-128", "--rank", str(STORM_RANK)),
)
TINY_STORM = (
    *("--residents", "2", "--resident-adapters", "1", "--seats", "2", "--loads", "1", "--seconds", "0.5"),
    *("--repeats", "1", "--pool-adapters", "4", "--spare-adapters", "1", "--host-adapters", "4"),
    *("--input", "2-4", "--output", "2-4", "--storm-output", "1-3", "--rank", str(STORM_RANK)),
)


@dataclass(frozen=True, slots=True)
class Cold:
    """The adapters whose first tokens are measured: `num_timed` of each rank after one untimed one. `num_warm` is the
    number of warm first tokens for each of them.
    """

    ranks: tuple[int, ...]
    num_timed: int
    num_warm: int
    num_prompt: int

    @property
    def all_ranks(self) -> list[int]:
        """The ranks of all adapters."""
        return [rank for rank in self.ranks for _ in range(1 + self.num_timed)]


def cold_of(bench: Bench) -> Cold:
    return Cold((4, 20), 1, 1, 5) if bench.is_tiny else Cold((8, 16, 32, 64), 3, 3, 128)


def storm_of(bench: Bench, files: AdapterFiles) -> cold_storm.Measurement:
    return cold_storm.Measurement(cold_storm.parse(TINY_STORM if bench.is_tiny else STORM), files)


def num_fresh(measurement: cold_storm.Measurement) -> int:
    """Number of adapters that the storm loads for the first time."""
    arguments = measurement.arguments
    rounds = UNTIMED_ROUNDS + arguments.repeats
    return len(cold_storm.COLD_WAYS) * int(arguments.loads) * int(rounds)


def run(bench: Bench) -> Iterator[Row]:
    yield gpu_check.require_right_engine(bench)
    yield from bench.each(cold_of(bench).ranks, "first tokens", lambda rank: _run_rank(bench, rank))
    if bench.is_timed:
        yield from bench.each(["storm"], "cold adapters", lambda _: _run_storm(bench))


def warm(bench: Bench, shard: int, num_shards: int) -> None:
    """Compile a share of the steps. The storm's other shapes are compiled in its untimed round."""
    if shard == 0:
        gpu_check.warm(bench)
    model, cold = model_of(bench), cold_of(bench)
    prompts = [WarmStep(1, cold.num_prompt, rank) for rank in (0, *cold.ranks)]
    warm_steps(bench, model, ALL_MODULES, prompts[shard::num_shards], **settings_of(cold))
    measurement = storm_of(bench, files_of(bench, Path(), ()))
    residents = measurement.arguments.residents
    decodes = [WarmStep(residents + more, 1, STORM_RANK) for more in range(min(8, measurement.arguments.seats))]
    warm_steps(bench, model, ALL_MODULES, decodes[shard::num_shards], **storm_settings(measurement))


def settings_of(cold: Cold) -> dict[str, Any]:
    return {
        "max_len": cold.num_prompt + 1,
        "max_batch_tokens": cold.num_prompt,
        "max_sequences": 1,
        "max_resident_adapters": 1 + cold.num_timed,
    }


def pages_of(cold: Cold, adapter_pages: int) -> int:
    """Pages of the pool for the adapters of one rank and one sequence."""
    return (1 + cold.num_timed) * adapter_pages + cold.num_prompt // PAGE_TOKENS + 2


def storm_settings(measurement: cold_storm.Measurement) -> dict[str, Any]:
    plan = measurement.plan
    return {
        "max_len": plan.prompts.end + plan.outputs.end + 1,
        "max_batch_tokens": BATCH_TOKENS,
        "max_sequences": plan.num_sequences,
        "max_resident_adapters": plan.num_adapters,
    }


def storm_pages(measurement: cold_storm.Measurement, adapter_pages: int) -> int:
    plan = measurement.plan
    return int(plan.kv_pages + plan.num_adapters * adapter_pages + 1)


def files_of(bench: Bench, directory: Path, digests: Sequence[str]) -> AdapterFiles:
    return AdapterFiles(directory, model_config(model_of(bench), 1), STORM_RANK, tuple(digests))


def digests_of(label: str, count: int) -> list[str]:
    return [hashlib.sha256(f"{label} {number}".encode()).hexdigest() for number in range(count)]


def store(adapters: RandomAdapters, files: AdapterFiles, tier: str) -> None:
    """Write the packed files of all of `files` to the object store or to the disk tier."""
    blobs, disk = open_blob_store(files.blob_url), DiskTier(files.cache_dir, DISK_BYTES, adapters.target.pack_key)

    def write(digest: str) -> None:
        file = disk.new_file()
        # Files on disk are flushed, so that the operating system can drop its cached copies.
        write_packed(file, adapters.packed[digest], adapters.target, is_flushed=tier == DISK)
        if tier == DISK:
            disk.add(digest, file)
        else:
            blobs.put(packed_key(digest, adapters.target.pack_key), file)
            file.unlink()

    with ThreadPoolExecutor(NUM_WRITERS) as pool:
        list(pool.map(write, files.digests))


def _run_rank(bench: Bench, rank: int) -> Iterator[Row]:
    model, cold, dtype = model_of(bench), cold_of(bench), engine_dtype(bench)
    adapters = RandomAdapters(bench, model, dtype)
    digests = adapters.make(digests_of(f"rank {rank}", 1 + cold.num_timed), rank)
    num_bytes = adapters.num_pages(digests[0]) * adapters.page_bytes
    with tempfile.TemporaryDirectory() as directory:
        files = files_of(bench, Path(directory), digests)
        store(adapters, files, OBJECT_STORE)
        pool_bytes = pages_of(cold, adapters.num_pages(digests[0])) * adapters.page_bytes
        settings = settings_of(cold) | {"host_tier_bytes": 2 * len(digests) * num_bytes, "disk_tier_bytes": DISK_BYTES}
        with open_engine(bench, model, adapters, stored=files, pool_bytes=pool_bytes, **settings) as engine:
            found = [FirstTokens(bench, engine, model, files, digest) for digest in digests]
            for one in found:
                one.measure(cold)
    timed = found[1:]
    warm_s = statistics.median(second for one in timed for second in one.warm_s)
    for tier in COUNTED:
        cold_s = statistics.median(one.cold_s[tier] for one in timed)
        figures = {
            "first_token_ms": cold_s * 1e3,
            "warm_ms": warm_s * 1e3,
            "added_ms": (cold_s - warm_s) * 1e3,
            "adapter_mb": num_bytes / 1e6,
            "error": max(one.error for one in timed),
        }
        bench.say(f"  rank {rank}, {tier}: {figures['added_ms']:.1f} ms more than {figures['warm_ms']:.1f} ms")
        yield Row(f"rank {rank}, prompt of {cold.num_prompt}", tier, figures)


class FirstTokens:
    """The first tokens of one adapter. Times are in seconds."""

    def __init__(self, bench: Bench, engine: ObservedEngine, model: Model, files: AdapterFiles, digest: str) -> None:
        self._bench, self._engine, self._model = bench, engine, model
        self._files, self._digest = files, digest
        self.cold_s: dict[str, float] = {}
        self.warm_s: list[float] = []
        self.error = 0.0

    def measure(self, cold: Cold) -> None:
        """Load the adapter from each tier. Raises CheckError if an answer is wrong or it came from another tier."""
        tolerance = TOLERANCES[engine_dtype(self._bench)]
        prompt = random_prompt(self._model, cold.num_prompt, 0)
        _, base = self._answer(prompt, ())
        answers = [self._cold(OBJECT_STORE, prompt)]
        for _ in range(cold.num_warm):
            seconds, warm = self._answer(prompt, (self._digest,))
            self.warm_s.append(seconds)
        self._engine.unload([self._digest])
        answers.append(self._cold(HOST, prompt))
        self._purge()
        answers.append(self._cold(DISK, prompt))
        for answer in answers:
            error, _ = compare({"0": answer}, {"0": warm}, tolerance)
            self.error = max(self.error, error)
        if gpu_check.changed_by(warm, base) <= tolerance:
            raise CheckError(f"the adapter {self._digest[:12]} does not change the base's answer")

    def _answer(self, prompt: tuple[int, ...], digests: Sequence[str]) -> tuple[float, Answer]:
        """Seconds until the first token, and the token."""
        sampling = SamplingParams(temperature=0.0, ignore_eos=True, num_logprobs=2)
        started = time.perf_counter()
        answers = self._engine.answer(greedy_adds([prompt], 1, digests, sampling))
        return time.perf_counter() - started, answers["0"]

    def _cold(self, tier: str, prompt: tuple[int, ...]) -> Answer:
        before = self._hits()
        self.cold_s[tier], answer = self._answer(prompt, (self._digest,))
        after = self._hits()
        found = [name for name in after if after[name] > before.get(name, 0)]
        if found != [COUNTED[tier]]:
            raise CheckError(f"the adapter was found in {found} instead of {COUNTED[tier]}")
        return answer

    def _hits(self) -> dict[str, int]:
        return {one.tier: one.num_hits for one in self._engine.stats().loading.tiers}

    def _purge(self) -> None:
        """Remove the adapter from the pool and from host memory, and drop the operating system's copy of its file."""
        call = Unload(call_id=self._digest, digest=self._digest, is_purge=True)
        self._engine.assembled.engine.unload(b"", call)
        self._engine.finish()
        for path in self._files.cache_dir.glob(f"*/{self._digest}.packed"):
            drop_cached(path)


def _run_storm(bench: Bench) -> Iterator[Row]:
    model = model_of(bench)
    adapters = RandomAdapters(bench, model, engine_dtype(bench))
    with tempfile.TemporaryDirectory() as directory:
        sizes = storm_of(bench, files_of(bench, Path(directory), ()))
        digests = adapters.make(digests_of("storm", sizes.arguments.pool_adapters + num_fresh(sizes)), STORM_RANK)
        files = files_of(bench, Path(directory), digests)
        store(adapters, files, DISK)
        measurement = storm_of(bench, files)
        pages = adapters.num_pages(digests[0])
        settings = storm_settings(measurement) | {
            "host_tier_bytes": measurement.plan.num_host_adapters * pages * adapters.page_bytes,
            "disk_tier_bytes": DISK_BYTES,
        }
        pool_bytes = storm_pages(measurement, pages) * adapters.page_bytes
        with open_engine(bench, model, adapters, stored=files, pool_bytes=pool_bytes, **settings) as engine:
            found = cold_storm.measure(engine, measurement, None, UNTIMED_ROUNDS)
    arguments = measurement.arguments
    mb = pages * adapters.page_bytes / 1e6
    case = f"{arguments.residents} streams, {arguments.loads} adapters of {mb:.0f} MB in {arguments.seconds:g} s"
    gaps = {way: [one.load_gaps_s for one in rounds] for way, rounds in found.items()}
    compared = [compare_ways(gaps, target) for target in cold_storm.TARGETS]
    for way, rounds in found.items():
        figures = _percentiles("gap", pooled(gaps[way]))
        figures |= _percentiles("ttft", [second for one in rounds for second in one.first_tokens_s])
        figures |= _percentiles("load", [second for one in rounds for second in one.loads_s])
        figures["steps_s"] = statistics.median(one.counted("num_steps") / one.seconds for one in rounds)
        own = [one for one in compared if one.target.way == way]
        figures |= {f"p99_over_{one.target.reference}": one.ratio for one in own}
        goals = tuple(Goal(f"p99_over_{one.target.reference}", one.target.limit) for one in own)
        yield Row(case, way, figures, goals)


def _percentiles(name: str, seconds: Sequence[float]) -> dict[str, float]:
    if not seconds:
        return {}
    return {f"{name}_p{percent}_ms": percentile(seconds, percent) * 1e3 for percent in (50, 99)}
