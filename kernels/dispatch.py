"""The kernels' interface, and which implementation serves a device."""

from __future__ import annotations

from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch

from loramux.kernels.cpu import CpuKernels
from loramux.kernels.tables import AdapterTables, AttentionBatch, AttentionSpec, ModuleGroup, PoolViews, Segments


class Kernels(Protocol):
    """The mathematics of one device over one page pool; `reference.ReferenceKernels` specifies every method.

    Activations are float32 `[T, ...]` on CPU; their last axes are contiguous, their rows may be views of wider rows.
    """

    def build_segments(self, slots: npt.NDArray[np.int32]) -> Segments:
        """Group rows by adapter slot, in segments of a size that suits the device."""
        ...

    def lora_shrink(
        self,
        x: torch.Tensor,
        layer: int,
        group: ModuleGroup,
        tables: AdapterTables,
        segments: Segments,
        planes: torch.Tensor,
    ) -> None:
        """`planes[t, i, :rank] = x[t] @ A[slot, modules[i]]ᵀ`."""
        ...

    def lora_expand(
        self,
        planes: torch.Tensor,
        layer: int,
        group: ModuleGroup,
        tables: AdapterTables,
        segments: Segments,
        y: torch.Tensor,
    ) -> None:
        """`y[t, columns of i] += scale * planes[t, i, :rank] @ B[slot, modules[i]]ᵀ`."""
        ...

    def kv_write(self, k: torch.Tensor, v: torch.Tensor, layer: int, batch: AttentionBatch) -> None:
        """Store K and V of each row in its place of the pool."""
        ...

    def paged_attention(
        self, q: torch.Tensor, layer: int, batch: AttentionBatch, spec: AttentionSpec, out: torch.Tensor
    ) -> None:
        """`out = softmax(soft_cap(q kᵀ * scale) + mask) v` over the pages of each sequence."""
        ...

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        """`x / sqrt(mean(x²) + eps) * weight` over the last axis."""
        ...

    def rotary(self, q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> None:
        """Rotate the two halves of each head by its position's angles, in place."""
        ...

    def silu_and_mul(self, gate_up: torch.Tensor) -> torch.Tensor:
        """`silu(gate) * up` of rows that hold gate, then up."""
        ...


def select_kernels(device: torch.device, pool: PoolViews) -> Kernels:
    """The kernels for `device` over `pool`.

    Raises ValueError for a device that has none.
    """
    if device.type == "cpu":
        return CpuKernels(pool)
    raise ValueError(f"there are no kernels for device {device.type!r}; use --device cpu")
