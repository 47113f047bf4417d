"""How a model's K and V are laid out in pages. This module does not import torch."""

from __future__ import annotations

from loramux.engine.architectures.model_config import ModelConfig
from loramux.engine.sequences.cache_groups import (
    CacheLayout,
    cache_layout,
    hybrid_layout,
    narrow_windows,
    uneven_layout,
)


def kv_layout(config: ModelConfig, max_len: int, kv_itemsize: int) -> CacheLayout:
    """The layout for contexts of up to `max_len` tokens. An element of K or V has `kv_itemsize` bytes."""
    attention = config.attention
    if config.delta is not None:
        num_state_pages = config.num_state_pages(config.geometry(kv_itemsize, kv_itemsize))
        return hybrid_layout(config.num_layers, config.delta.attention_layers, num_state_pages)
    windows = narrow_windows(attention.windows, max_len)
    if attention.has_uneven_cache:
        widths = [heads.width for heads in attention.layer_heads]
        return uneven_layout(windows, widths, attention.kv_sources)
    return cache_layout(windows, max_len)
