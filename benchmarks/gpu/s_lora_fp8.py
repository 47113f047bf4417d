"""Measures S-LoRA's setting S1 with adapters that the pool has as FP8 codes (`adapter_dtype`)."""

from __future__ import annotations

from collections.abc import Iterator

from benchmarks.gpu import s_lora
from benchmarks.gpu.bench import Bench, Row


def run(bench: Bench) -> Iterator[Row]:
    yield from s_lora.run(bench, "fp8")


def warm(bench: Bench, shard: int, num_shards: int) -> None:
    s_lora.warm(bench, shard, num_shards, "fp8")
