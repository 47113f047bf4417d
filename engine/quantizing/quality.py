"""Measures how much a quantised model's predictions differ from the float model's."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from pathlib import Path

import msgspec
import torch

from loramux.engine.adapters.slot_tables import SlotTables
from loramux.engine.architectures.model_config import ModelConfig
from loramux.engine.device.backend import open_backend
from loramux.engine.execution.direct_executor import DirectExecutor
from loramux.engine.loop.config import EngineConfig, pack_target
from loramux.engine.loop.loaded_base import DTYPES, load_decoder
from loramux.engine.pages.pool_memory import allocate_pool
from loramux.engine.protocol.messages import Add, SamplingParams
from loramux.engine.sequences.batch import ScheduledSequence, build_batch
from loramux.engine.sequences.cache_groups import CacheLayout
from loramux.engine.sequences.sequence import PageTable, block_list
from loramux.engine.sequences.sequence import Sequence as EngineSequence


def mean_divergence(config: EngineConfig, prompts: Sequence[tuple[int, ...]]) -> float:
    """Mean KL divergence of the quantised model from the float model, in nats, for the token after each prompt. Runs on
    a CPU.

    The two models are loaded one after the other.
    """
    floats = _next_token_logits(msgspec.structs.replace(config, quantized_dir=None), prompts)
    quantized = _next_token_logits(config, prompts)
    p, q = floats.log_softmax(1), quantized.log_softmax(1)
    return float((p.exp() * (p - q)).sum(1).mean())


@torch.inference_mode()
def _next_token_logits(config: EngineConfig, prompts: Sequence[tuple[int, ...]]) -> torch.Tensor:
    """Logits after each prompt, float32 `[num_prompts, vocab_size]`."""
    backend = open_backend("cpu")
    backend.set_num_threads(config.num_threads)
    model = ModelConfig.load(Path(config.model_dir))
    dtype = DTYPES[config.dtype]
    target = pack_target(model, config.dtype)
    longest = max(map(len, prompts))
    decoder = load_decoder(config, model, dtype, longest, None, backend)
    cache = decoder.cache_layout
    tables, state_pages, num_pages = _pages(cache, longest)
    views = allocate_pool(
        target.geometry,
        num_pages * target.geometry.total_page_bytes,
        dtype,
        dtype,
        backend.device,
        has_cache_groups=cache.has_pages_of_blocks,
    )
    slots = SlotTables(target, 1, backend.accelerator, decoder.outer_factors)
    executor = DirectExecutor(decoder, backend.make_kernels(views, decoder.shapes), slots, model.eos_token_ids)
    logits = []
    for prompt in prompts:
        add = Add(sequence_id="", prompt=prompt, max_tokens=1, sampling=SamplingParams())
        sequence = EngineSequence(add=add, owner=b"", arrival=0, seed=0, slot=-1, tables=tables)
        sequence.state_pages = state_pages
        batch = build_batch([ScheduledSequence(sequence, len(prompt))], cache.block_tokens)
        logits.append(executor.logits(batch)[0].float().clone())
    return torch.stack(logits)


def _pages(cache: CacheLayout, num_tokens: int) -> tuple[list[PageTable], array[int], int]:
    """Tables that place a sequence in a pool's first pages, the pages of its state, and the number of pages used."""
    tables: list[PageTable] = []
    page = 0
    for group in cache.groups:
        end = page - (-num_tokens // group.page_tokens)
        tables.append(PageTable(block_list(block for one in range(page, end) for block in cache.blocks(group, one))))
        page = end
    return tables, block_list(range(page, page + cache.num_state_pages)), page + cache.num_state_pages
