"""Puts an engine together from its configuration: weights, pool, tables, tiers."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from loramux.adapter_store.blob_url import open_blob_store
from loramux.adapter_store.target import PackTarget
from loramux.adapter_store.tiers import TieredStore
from loramux.engine.adapter_pool import AdapterPool
from loramux.engine.batch import Batch, ScheduledSequence, build_batch
from loramux.engine.config import EngineConfig, pack_target, resolve_dtype, resolve_max_model_len
from loramux.engine.engine import Engine, EngineLimits
from loramux.engine.messages import Add, EngineReady, SamplingParams
from loramux.engine.model import Decoder
from loramux.engine.model_config import ModelConfig
from loramux.engine.page_pool import PagePool
from loramux.engine.pool_memory import allocate_pool, allocate_tables
from loramux.engine.scheduler import Scheduler
from loramux.engine.sequence import Sequence
from loramux.engine.tier_loader import AdapterSource, TierLoader
from loramux.kernels.dispatch import Kernels, select_kernels
from loramux.kernels.tables import AdapterTables, PoolViews
from loramux.kernels.threads import set_num_threads

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


class ModelExecutor:
    """Runs batches through a decoder over one pool."""

    def __init__(self, decoder: Decoder, kernels: Kernels, tables: AdapterTables) -> None:
        self._decoder = decoder
        self._kernels = kernels
        self._tables = tables

    def execute(self, batch: Batch) -> torch.Tensor:
        return self._decoder.forward(batch, self._kernels, self._tables)

    def warm_up(self, page_tokens: int) -> None:
        """Run a prompt and a decode row of an empty adapter once, so that no request waits for kernels to load.

        Writes K and V to page 0, which has no owner yet.
        """
        for num_prompt in (2, 1):
            add = Add(sequence_id="", prompt=(0,) * num_prompt, max_tokens=1, sampling=SamplingParams())
            sequence = Sequence(add=add, owner=b"", arrival=0, seed=0, slot=0, pages=[0])
            self.execute(build_batch([ScheduledSequence(sequence, num_prompt)], page_tokens))


@dataclass(frozen=True, slots=True, eq=False)
class AssembledEngine:
    """An engine and what its process must close or announce."""

    engine: Engine
    loader: TierLoader
    views: PoolViews
    ready: EngineReady


def open_source(config: EngineConfig, target: PackTarget) -> TieredStore:
    """The store's tiers as the configuration places them."""
    return TieredStore(
        open_blob_store(config.blob_url),
        target,
        Path(config.cache_dir),
        config.disk_tier_bytes,
        config.host_tier_bytes,
    )


def assemble_engine(
    config: EngineConfig, wake: Callable[[], None], source: AdapterSource | None = None
) -> AssembledEngine:
    """Load the model and allocate the pool; raises EngineError with the remedy.

    `wake` is called from other threads when an idle engine should look again. Tests may bring their own `source`.
    """
    device = torch.device(config.device)
    set_num_threads(config.num_threads)
    model_dir = Path(config.model_dir)
    model = ModelConfig.load(model_dir)
    dtype = resolve_dtype(config.dtype, model, config.device)
    max_model_len = resolve_max_model_len(config, model)
    target = pack_target(model, dtype)
    views = allocate_pool(target.geometry, config.pool_bytes, DTYPES[dtype], DTYPES[dtype], device)
    tables = allocate_tables(target.geometry, model.modules, config.max_resident_adapters, device)
    decoder = Decoder.load(model_dir, model, DTYPES[dtype], max_model_len)
    pages = PagePool(views.raw.shape[0])
    loader = TierLoader(source or open_source(config, target), views, tables, config.num_loaders, wake)
    adapters = AdapterPool(pages, config.max_resident_adapters, loader)
    page_tokens = target.geometry.page_tokens
    executor = ModelExecutor(decoder, select_kernels(device, views), tables)
    executor.warm_up(page_tokens)
    engine = Engine(
        limits=EngineLimits(model.vocab_size, max_model_len, model.eos_token_ids, page_tokens),
        pages=pages,
        adapters=adapters,
        scheduler=Scheduler(pages, adapters, page_tokens, config.max_batch_tokens, config.max_sequences),
        executor=executor,
        seeds=random.Random(config.seed),
    )
    ready = EngineReady(
        max_model_len=max_model_len,
        num_pages=pages.num_pages,
        page_tokens=page_tokens,
        device=config.device,
        dtype=dtype,
    )
    return AssembledEngine(engine, loader, views, ready)
