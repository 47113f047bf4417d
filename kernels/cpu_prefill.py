"""Attention of sequences with many query rows: pages gathered once, then torch's attention over tiles of queries."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch
from torch.nn import functional

from loramux.kernels import cpu_kv
from loramux.kernels.tables import AttentionSpec

TILE_ROWS = 256
"""Rows of a tile, query rows times heads of a group: bounds the mask, and skips keys that no row of a tile sees."""


class GatheredAttention:
    """Attention over dense float32 copies of a sequence's K and V; owns the buffers that it gathers into."""

    def __init__(self, pool: npt.NDArray[np.float32] | npt.NDArray[np.uint16]) -> None:
        self._pool = pool
        self._keys = torch.empty(0)
        self._values = torch.empty(0)

    def attend(
        self,
        q: torch.Tensor,
        layer: int,
        pages: npt.NDArray[np.int32],
        length: int,
        spec: AttentionSpec,
        out: torch.Tensor,
    ) -> None:
        """Attend `q` `[rows, num_heads, head_dim]`, the last rows of a context of `length` tokens, into `out`."""
        k, v = self._gather(layer, pages, length, spec)  # [num_kv_heads, length, head_dim]
        num_rows, group_size = q.shape[0], spec.num_heads // spec.num_kv_heads
        tile = max(1, TILE_ROWS // group_size)
        for begin in range(0, num_rows, tile):
            end = min(begin + tile, num_rows)
            # Keys [first_key, last_key) are all that the queries of this tile may see.
            last_key = length - num_rows + end
            first_key = 0
            if spec.sliding_window is not None:
                first_key = max(0, length - num_rows + begin - spec.sliding_window + 1)
            # The heads of a group become query rows of their KV head, so K and V are not repeated.
            grouped = q[begin:end].unflatten(1, (spec.num_kv_heads, group_size)).permute(1, 2, 0, 3)
            mask = _visible(end - begin, last_key - first_key, spec.sliding_window).repeat(group_size, 1)
            attended = _attend_tile(
                grouped.flatten(1, 2), k[:, first_key:last_key], v[:, first_key:last_key], mask, spec
            )
            attended = attended.unflatten(1, (group_size, end - begin)).permute(2, 0, 1, 3)
            out[begin:end].unflatten(1, (spec.num_kv_heads, group_size)).copy_(attended)

    def _gather(
        self, layer: int, pages: npt.NDArray[np.int32], length: int, spec: AttentionSpec
    ) -> tuple[torch.Tensor, torch.Tensor]:
        shape = (spec.num_kv_heads, length, spec.head_dim)
        size = spec.num_kv_heads * length * spec.head_dim
        if self._keys.shape[0] < size:
            self._keys, self._values = torch.empty(size), torch.empty(size)
        cpu_kv.gather(self._pool, layer, pages, length, self._keys.data_ptr(), self._values.data_ptr(), *shape[::2])
        return self._keys[:size].view(shape), self._values[:size].view(shape)


def _visible(num_rows: int, num_keys: int, sliding_window: int | None) -> torch.Tensor:
    """Which of the last `num_rows` positions sees which of `num_keys` keys: bool `[num_rows, num_keys]`."""
    position = torch.arange(num_keys - num_rows, num_keys)[:, None]
    key = torch.arange(num_keys)
    is_visible = key <= position
    if sliding_window is not None:
        is_visible &= key > position - sliding_window
    return is_visible


def _attend_tile(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor, spec: AttentionSpec
) -> torch.Tensor:
    """Attention of each KV head: q `[num_kv_heads, rows, head_dim]`, k and v `[num_kv_heads, keys, head_dim]`."""
    if spec.soft_cap is None:
        return functional.scaled_dot_product_attention(q[None], k[None], v[None], attn_mask=mask, scale=spec.scale)[0]
    scores = torch.bmm(q, k.transpose(1, 2)).mul_(spec.scale / spec.soft_cap).tanh_().mul_(spec.soft_cap)
    return torch.bmm(scores.masked_fill_(~mask, -torch.inf).softmax(-1), v)
