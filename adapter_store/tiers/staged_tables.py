"""The ranks and scales of an adapter's layers as bytes, sent from the staging process to the engine.

The tables of hundreds of experts take 200 KB, which is too much for a packet. They are compressed, which is effective
because they usually repeat a few values.
"""

from __future__ import annotations

import math
import zlib

import numpy as np
import numpy.typing as npt

from loramux.adapter_store.formats.packed.packing import PackedAdapter

_FAST = 1
_ITEM_BYTES = 4


def table_bytes(packed: PackedAdapter) -> bytes:
    """Return the int32 ranks, followed by the float32 scales."""
    return packed.layout.ranks.astype(np.int32).tobytes() + packed.scales.astype(np.float32).tobytes()


def compress(tables: bytes) -> bytes:
    return zlib.compress(tables, _FAST)


def num_table_bytes(shape: tuple[int, int]) -> int:
    """Return the size in bytes of the two tables, each `[num_layers, num_modules]`."""
    return 2 * math.prod(shape) * _ITEM_BYTES


def parse_tables(tables: bytes, shape: tuple[int, int]) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.float32]]:
    """Read the ranks and scales, each of shape `shape`, from the output of `table_bytes`."""
    half = num_table_bytes(shape) // 2
    ranks, scales = np.frombuffer(tables[:half], np.int32), np.frombuffer(tables[half:], np.float32)
    return ranks.reshape(shape), scales.reshape(shape).copy()
