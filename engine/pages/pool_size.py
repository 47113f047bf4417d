"""The default size of the page pool, and the sizes of the tiers behind it. This module does not import torch."""

from __future__ import annotations

from loramux.engine.protocol.errors import ConfigNotUsable

DEFAULT_BYTES = 1 << 30
"""Default size of a pool in host memory, in bytes."""


def in_gib(num_bytes: int) -> str:
    return f"{num_bytes / (1 << 30):.1f} GiB"


def num_pages_in(num_bytes: int, page_bytes: int, setting: str = "kv_host_bytes") -> int:
    """Return how many whole pages fit into the tier for evicted pages whose size is this setting. Raises
    ConfigNotUsable if none does.
    """
    if num_bytes < page_bytes:
        raise ConfigNotUsable(
            f"{setting} is {num_bytes} bytes, but a page of keys and values takes {page_bytes}: set it to at least "
            f"{page_bytes}, or to 0"
        )
    return num_bytes // page_bytes
