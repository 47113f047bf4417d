"""The memory of the page pool, allocated once at a fixed address."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from loramux.engine.device.accelerator import DeviceMemory
from loramux.engine.pages.pool_size import DEFAULT_BYTES, in_gib
from loramux.engine.protocol.errors import ConfigNotUsable, PoolTooSmall
from loramux.kernels.layout import PageGeometry
from loramux.kernels.tables import PoolViews

GPU_RESERVE = 0.08
"""Share of a GPU's memory reserved for other programs and for graphs, including the activations of captured steps.

Without ahead-of-time compilation, the activations of all other steps come out of this share too.
"""

MIN_RESERVE_BYTES = 2 << 30
"""Smallest reserve, in bytes. This is an estimate: `Stats.graphs` reports how much memory graphs actually take."""


def pool_bytes_of(wanted: int | None, memory: DeviceMemory | None, num_devices: int = 1) -> int:
    """The pool's size in bytes: `wanted` if set, otherwise the default, which on GPUs is most of the free memory.

    `memory` is that of each of `num_devices` GPUs, or None on a CPU.

    Raises PoolTooSmall if nothing is left for the pool.
    """
    if wanted is not None:
        return wanted
    if memory is None:
        return DEFAULT_BYTES
    reserve = max(MIN_RESERVE_BYTES, int(GPU_RESERVE * memory.total))
    if memory.free <= reserve:
        raise PoolTooSmall(
            f"the model leaves {in_gib(memory.free)} of the GPU's {in_gib(memory.total)} free, and "
            f"{in_gib(reserve)} are reserved for graphs: use a larger GPU or a smaller model, stop other programs on "
            "the GPU, or set pool_bytes to less than the free memory"
        )
    return num_devices * (memory.free - reserve)


@contextmanager
def room_for_steps(max_batch_tokens: int) -> Iterator[None]:
    """Raise ConfigNotUsable if a GPU lacks memory for a step inside."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        raise ConfigNotUsable(
            f"the model and the page pool leave no GPU memory for a step of {max_batch_tokens} tokens: "
            "set a lower pool_bytes or max_batch_tokens"
        ) from error


def allocate_pool(
    geometry: PageGeometry,
    pool_bytes: int,
    kv_dtype: torch.dtype,
    adapter_dtype: torch.dtype,
    device: torch.device,
    has_cache_groups: bool = False,
) -> PoolViews:
    """Allocate as many whole pages as fit in `pool_bytes`. Raises PoolTooSmall if no page fits or memory runs out.

    With `has_cache_groups`, each group of layers has its own KV pages. If `kv_dtype` is int8, the scales of K and V are
    part of `pool_bytes`, and `geometry.elements_per_scale` is not 0.

    The memory is not cleared, because no page is read before its owner has written it.
    """
    num_pages = pool_bytes // geometry.pool_page_bytes
    if num_pages < 1:
        raise PoolTooSmall(
            f"a pool of {pool_bytes} bytes cannot hold a page of {geometry.pool_page_bytes} bytes: raise pool_bytes"
        )
    try:
        raw = torch.empty(num_pages, geometry.num_layers, geometry.page_bytes, dtype=torch.uint8, device=device)
        scales = None
        if kv_dtype is torch.int8:
            shape = (num_pages, geometry.num_layers, geometry.num_scales)
            scales = torch.empty(shape, dtype=torch.bfloat16, device=device)
    # On a CPU, torch has no class of its own for this error.
    except RuntimeError as error:
        raise PoolTooSmall(
            f"a page pool of {in_gib(pool_bytes)} does not fit next to the model: lower pool_bytes, or leave it out"
        ) from error
    kv = raw.view(kv_dtype)
    if has_cache_groups:
        kv = kv.view(num_pages * geometry.num_layers, 1, -1)
        scales = None if scales is None else scales.view(num_pages * geometry.num_layers, 1, -1)
    return PoolViews(raw=raw, kv=kv, adapter=raw.view(adapter_dtype), geometry=geometry, kv_scales=scales)


def copy_page(views: PoolViews, source: int, target: int) -> None:
    """Copy a page after the steps submitted so far. The scales of 8-bit K and V, which states do not have, are not
    copied.
    """
    raw = views.raw
    if raw.is_cpu:
        # torch would use all threads for each page, and wait for those that a busy machine has delayed.
        pages = raw.numpy()
        pages[target] = pages[source]
    else:
        raw[target].copy_(raw[source])
