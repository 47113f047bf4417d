"""A real engine with a tiny random base, and requests to it."""

from __future__ import annotations

import dataclasses
import hashlib
import random
from collections import defaultdict
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from loramux.adapter_store.formats.packed.packing import PackedAdapter
from loramux.engine.adapters.stager import MemoryStager
from loramux.engine.architectures.model_config import ModelConfig
from loramux.engine.loop.assembly import AssembledEngine, assemble_engine
from loramux.engine.loop.config import EngineConfig
from loramux.engine.protocol.messages import Abort, Add, Finished, SamplingParams, Stats, StatsRequest, StepOutput
from tests.conformance.parity import Subject, make_subject
from tests.conformance.tiny_models import ALL_LINEARS, SMALL_SHAPE, VOCAB_SIZE, AdapterPlan

GREEDY = SamplingParams(temperature=0.0, ignore_eos=True)
ADAPTERS = ("first", "second", "third")
Values = Callable[[np.ndarray], np.ndarray]

HOSTILE: Mapping[str, Values] = {
    "not a number": lambda values: np.full_like(values, np.nan),
    "infinite": lambda values: np.copysign(np.full_like(values, np.inf), values),
    "overflowing": lambda values: np.copysign(np.full_like(values, 1e30), values),
    "huge": lambda values: values * 1e6,
}
"""Weights that no validated adapter has, because damage on the way to the pool must not reach other tenants either."""


def make_tiny(directory: Path) -> Subject:
    plans = [AdapterPlan(name, rank, ALL_LINEARS) for name, rank in zip(ADAPTERS, (4, 8, 3), strict=True)]
    return make_subject("llama", directory, plans, SMALL_SHAPE)


def pool_bytes(subject: Subject, num_pages: int) -> int:
    """The size of a pool with this many pages more than the largest adapter needs."""
    geometry = ModelConfig.load(subject.directory).geometry(4, 4)
    return (max(subject.num_pages.values()) + num_pages) * geometry.total_page_bytes


def damaged(adapter: PackedAdapter, kind: str, number: int) -> PackedAdapter:
    """The adapter with hostile weights and a digest of its own. Padding stays zero."""
    values = adapter.payload.view(np.float32).copy()
    is_weight = values != 0
    values[is_weight] = HOSTILE[kind](values[is_weight])
    digest = hashlib.sha256(f"{kind} {number}".encode()).hexdigest()
    return dataclasses.replace(adapter, digest=digest, payload=values.view(np.uint8))


class TinyEngine:
    """Runs an engine in this thread, and collects the tokens and the ends of its sequences."""

    def __init__(self, subject: Subject, adapters: Mapping[str, PackedAdapter], **settings: Any) -> None:
        config = EngineConfig(
            model_dir=str(subject.directory),
            blob_url="",
            cache_dir="",
            dtype="float32",
            **{"pool_bytes": 32 << 20, "max_batch_tokens": 64, "max_sequences": 8, "num_threads": 1, **settings},
        )
        self.assembled: AssembledEngine = assemble_engine(config, lambda: None, MemoryStager(adapters))
        # Unwritten memory is NaN, so that a read of it is noticed.
        self.assembled.views.raw.fill_(0xFF)
        self.engine = self.assembled.engine
        self.tokens: defaultdict[str, list[int]] = defaultdict(list)
        self.ends: dict[str, Finished] = {}

    def add(self, add: Add) -> None:
        self.engine.add(b"", add)

    def abort(self, sequence_id: str) -> None:
        self.engine.abort(b"", Abort(sequence_id=sequence_id))

    def step(self) -> None:
        self.engine.step()
        for outbound in self.engine.take_outbox():
            match outbound.message:
                case StepOutput(outputs=outputs):
                    for output in outputs:
                        self.tokens[output.sequence_id].extend(output.token_ids)
                case Finished() as finished:
                    self.ends[finished.sequence_id] = finished

    def finish(self) -> None:
        while self.engine.has_work:
            self.step()

    def stats(self) -> Stats:
        return self.engine.stats(StatsRequest(call_id=""))

    def num_unowned_pages(self) -> int:
        """Pages of K and V that neither a sequence nor the prefix cache owns. No sequence may be running."""
        stats = self.stats()
        return stats.num_kv_pages - stats.num_prefix_pages

    def close(self) -> None:
        self.assembled.adapters.close()
        self.assembled.grammars.close()


def draw_tokens(dice: random.Random, count: int) -> tuple[int, ...]:
    return tuple(dice.randrange(2, VOCAB_SIZE) for _ in range(count))
