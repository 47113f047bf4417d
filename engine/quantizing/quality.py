"""Measures how much a quantised model's predictions differ from the float model's."""

from __future__ import annotations

import math
from array import array
from pathlib import Path

import msgspec
import numpy as np
import torch

from loramux.adapter_store.formats.packed.packing import PackedAdapter
from loramux.engine.adapters.slot_tables import SlotTables
from loramux.engine.architectures.model_config import ModelConfig
from loramux.engine.device.backend import Backend, open_backend
from loramux.engine.device.machine_limits import num_cpus
from loramux.engine.execution.direct_executor import DirectExecutor
from loramux.engine.loop.config import EngineConfig, activation_bits, pack_target
from loramux.engine.loop.loaded_base import load_decoder, pool_dtypes
from loramux.engine.pages.pool_memory import allocate_pool
from loramux.engine.protocol.messages import Add, SamplingParams
from loramux.engine.quantizing.messages import Quality
from loramux.engine.sequences.batch import ScheduledSequence, build_batch
from loramux.engine.sequences.cache_groups import CacheLayout
from loramux.engine.sequences.sequence import PageTable, block_list
from loramux.engine.sequences.sequence import Sequence as EngineSequence

MAX_LOGITS = 1 << 26
"""Maximum number of logits of the float model that are kept in memory, 256 MiB. A text is cut off to fit."""


def measure_quality(config: EngineConfig, method: str, text: tuple[int, ...]) -> Quality | None:
    """Compare how the quantised model and the float model predict each token of a text, on a CPU.

    The two models are loaded one after the other. Inputs are rounded as configured, but K and V are not, because the
    float model's would be, too. Returns None if the text has fewer than two tokens, or if a prediction is not finite.
    """
    model = ModelConfig.load(Path(config.model_dir))
    bits = activation_bits(config, model)
    # The number of threads may be meant for several engines, on other machines.
    config = msgspec.structs.replace(
        config, kv_dtype="auto", activations=None, num_threads=min(config.num_threads, num_cpus())
    )
    text = text[: longest_text(model)]
    if len(text) < 2:
        return None
    floats = log_probabilities(msgspec.structs.replace(config, quantized_dir=None), text)
    quantized = log_probabilities(config, text, backend=open_backend("cpu", activation_bits=bits))
    figures = (divergence(floats, quantized), perplexity(quantized, text), perplexity(floats, text))
    if not all(map(math.isfinite, figures)):
        return None
    return Quality(
        method=method,
        divergence=figures[0],
        perplexity=figures[1],
        float_perplexity=figures[2],
        activations="int8" if bits == 8 else None,
    )


def longest_text(model: ModelConfig) -> int:
    """Number of tokens of a text that are read. All their logits are in memory at the same time."""
    return min(max(2, MAX_LOGITS // model.vocab_size), model.max_model_len)


def divergence(floats: torch.Tensor, quantized: torch.Tensor) -> float:
    """Mean KL divergence of the second log-probabilities from the first, in nats."""
    # Row by row, because the temporary tensors of all rows would need several times the memory.
    rows = [float((p.exp() * (p - q)).nansum()) for p, q in zip(floats, quantized, strict=True)]
    return math.fsum(rows) / len(rows)


def perplexity(log_probabilities: torch.Tensor, text: tuple[int, ...]) -> float:
    found = log_probabilities[:-1].gather(1, torch.tensor(text[1:])[:, None])
    return float((-found.double().mean()).exp())


@torch.inference_mode()
def log_probabilities(
    config: EngineConfig,
    text: tuple[int, ...],
    adapter: PackedAdapter | None = None,
    backend: Backend | None = None,
    activation: int = 0,
) -> torch.Tensor:
    """The log-probabilities of all tokens after each token of the text, float32 `[num_tokens, vocab_size]`.

    `adapter` is packed for `config.adapter_dtype` and `config.kv_dtype`. None means the base alone. `backend` computes
    on a CPU. The adapter applies from the position `activation` on.
    """
    backend = backend or open_backend("cpu")
    backend.set_num_threads(config.num_threads)
    model = ModelConfig.load(Path(config.model_dir))
    target = pack_target(model, config.dtype, config.adapter_dtype, config.kv_dtype)
    # Drafts change no predictions.
    config = msgspec.structs.replace(config, speculate="off")
    decoder, _ = load_decoder(config, model, config.dtype, len(text), None, backend)
    cache = decoder.cache_layout
    tables, state_pages, num_pages = _pages(cache, len(text))
    adapter_pages = list(range(num_pages, num_pages + (0 if adapter is None else adapter.num_pages)))
    views = allocate_pool(
        target.geometry,
        (num_pages + len(adapter_pages)) * target.geometry.pool_page_bytes,
        *pool_dtypes(config, config.dtype),
        backend.device,
        has_cache_groups=cache.has_pages_of_blocks,
    )
    slots = SlotTables(target, 1, backend.accelerator, decoder.outer_factors)
    executor = DirectExecutor(decoder, backend.make_kernels(views, decoder.shapes), slots, model.eos_token_ids)
    if adapter is not None:
        views.raw[num_pages:] = torch.from_numpy(adapter.payload)
        slots.write(0, adapter_pages, adapter)
    add = Add(sequence_id="", prompt=text, max_tokens=1, sampling=SamplingParams(), activation=activation)
    slot = -1 if adapter is None else 0
    sequence = EngineSequence(add=add, owner=b"", arrival=0, seed=0, slot=slot, tables=tables)
    sequence.state_pages = state_pages
    batch = build_batch([ScheduledSequence(sequence, len(text))], cache.block_tokens)
    every_row = msgspec.structs.replace(batch, sample_rows=np.arange(len(text), dtype=np.int32))
    return executor.logits(every_row).float().log_softmax(1)


def _pages(cache: CacheLayout, num_tokens: int) -> tuple[list[PageTable], array[int], int]:
    """Tables that place a sequence in a pool's first pages, the pages of its state, and the number of pages used."""
    tables: list[PageTable] = []
    page = 0
    for group in cache.groups:
        end = page - (-num_tokens // group.page_tokens)
        tables.append(PageTable(block_list(block for one in range(page, end) for block in cache.blocks(group, one))))
        page = end
    return tables, block_list(range(page, page + cache.num_state_pages)), page + cache.num_state_pages
