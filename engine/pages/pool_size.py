"""The default size of the page pool, and host memory for its pages. This module does not import torch."""

from __future__ import annotations

from loramux.engine.protocol.errors import ConfigNotUsable

DEFAULT_BYTES = 1 << 30
"""Default size of a pool in host memory, in bytes."""


def in_gib(num_bytes: int) -> str:
    return f"{num_bytes / (1 << 30):.1f} GiB"


def num_host_pages(kv_host_bytes: int, page_bytes: int) -> int:
    """Return how many whole pages fit into the host memory for evicted pages. Raises ConfigNotUsable if none does."""
    if kv_host_bytes < page_bytes:
        raise ConfigNotUsable(
            f"kv_host_bytes is {kv_host_bytes} bytes, but a page of keys and values takes {page_bytes}: set it to at "
            f"least {page_bytes}, or to 0"
        )
    return kv_host_bytes // page_bytes
