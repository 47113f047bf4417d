"""The kernel interface, and the choice of implementation for a device."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch

from loramux.kernels.delta_spec import DeltaSpec
from loramux.kernels.gpu.capability import capability_problem
from loramux.kernels.routing import ExpertWeights, Routing
from loramux.kernels.routing_spec import RoutingSpec
from loramux.kernels.tables import AttentionBatch, AttentionSpec, LoraCall, ModuleGroup, PoolViews, Segments


class LoraKernels(Protocol):
    """One device's LoRA kernels. `reference.lora.ReferenceLora` specifies every method.

    Activations `[T, ...]` are float32 on a CPU and have the compute dtype on a GPU. Their last axis is contiguous. Rows
    may be views into wider rows. On a GPU, no method waits for the device or reads a tensor on the host, so a captured
    graph can be replayed after the tensors of its batch, segments and tables are overwritten in place.
    """

    @property
    def segment_rows(self) -> int:
        """Maximum number of rows in a segment on this device."""
        ...

    def lora_planes(self, call: LoraCall, num_tokens: int) -> torch.Tensor:
        """Scratch memory that `lora_shrink` or `lora_gather` fills for the following `lora_expand`.

        The next call may return the same memory, and `lora_add` may overwrite it.
        """
        ...

    def lora_shrink(self, x: torch.Tensor, call: LoraCall, planes: torch.Tensor) -> None:
        """`planes[t, i, :rank] = x[t] @ A[slot, modules[i]]ᵀ`."""
        ...

    def lora_expand(self, planes: torch.Tensor, call: LoraCall, y: torch.Tensor) -> None:
        """`y[t, columns of i] += scale * planes[t, i, :rank] @ B[slot, modules[i]]ᵀ`, then the adapter's affines."""
        ...

    def lora_add(self, x: torch.Tensor, call: LoraCall, y: torch.Tensor) -> None:
        """`y[t, columns of i] += scale * (x[t] @ Aᵀ) @ Bᵀ`: `lora_shrink`, then `lora_expand`, on planes of its own."""
        ...

    def lora_delta(self, x: torch.Tensor, call: LoraCall, slots: torch.Tensor, y: torch.Tensor) -> None:
        """`lora_add` on zeros: `y` may be uninitialised, and its rows without an adapter become 0.

        `slots` int32 `[T]` is the slot of each row, or -1 for rows that no segment lists. No listed adapter has affines
        of these modules, whose columns cover `y`. The group is not one of experts.
        """
        ...

    def lora_affine(self, call: LoraCall, y: torch.Tensor) -> None:
        """`y[t] = y[t] + gain * y[t] + shift`: only the affine of the group's single module, without A and B."""
        ...

    def lora_gather(self, tokens: torch.Tensor, call: LoraCall, planes: torch.Tensor) -> None:
        """`planes[t, 0, :rank] = A[slot, modules[0]][:, tokens[t]]`: the shrink of an embedding, whose x is one-hot."""
        ...

    def replace_rows(self, tokens: torch.Tensor, call: LoraCall, y: torch.Tensor) -> None:
        """`y[t] = row of tokens[t]` where the adapter replaces the embedding's row; `y` has the dtype of the pool.

        `call.tables` is `AdapterTables.trained_rows`; `y` is contiguous. An adapter can also have rows for token ids
        beyond the end of the embedding.
        """
        ...

    def replace_columns(self, x: torch.Tensor, call: LoraCall, y: torch.Tensor) -> None:
        """`y[t, id] = x[t] · row of id` for each token id whose row of the head is replaced by the adapter.

        `call.tables` is `AdapterTables.trained_rows`. No adapter of a segment replaces more rows than
        `call.segments.max_rank`. `y` has a column for each id, including ids beyond the head's own.
        """
        ...


class Kernels(LoraKernels, Protocol):
    """One device's kernels over one page pool. `reference.kernels.ReferenceKernels` specifies every method."""

    @property
    def outer(self) -> LoraKernels:
        """The LoRA kernels for modules outside the layers."""
        ...

    def rotate_and_store(
        self,
        q: torch.Tensor,
        k: torch.Tensor | None,
        v: torch.Tensor | None,
        cos: torch.Tensor,
        sin: torch.Tensor,
        layer: int,
        batch: AttentionBatch,
    ) -> None:
        """Rotate q and k by the angles of each row's position, and store the rotated k and v in the pool.

        Without `k` and `v`, only rotate q, for a layer that reads the K and V of another layer. The rotation acts on
        the two halves of each head. q is changed in place. Afterwards, the contents of k and of q's padding rows are
        undefined, but `paged_attention` can read k.
        """
        ...

    def max_gathered_pages(self, spec: AttentionSpec) -> int:
        """Maximum number of pages that `ContiguousKeys` may list for layers with this attention.

        If it is 0, the kernels do not read `AttentionBatch.contiguous` for these layers.
        """
        ...

    def paged_attention(
        self,
        q: torch.Tensor,
        layer: int,
        batch: AttentionBatch,
        spec: AttentionSpec,
        out: torch.Tensor,
        sinks: torch.Tensor | None = None,
        kv: tuple[torch.Tensor, torch.Tensor] | None = None,
    ) -> None:
        """`out = softmax(soft_cap(q kᵀ * scale) + mask) v` over the pages of each sequence.

        `sinks`, float32 `[num_heads]`, contains for each head the score of an additional key that has no value. `kv`
        is the k and v that `rotate_and_store` has just stored in this layer, if it did. Kernels may read them instead
        of the pages.
        """
        ...

    def multiply(self, linear: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor) -> torch.Tensor:
        """`linear(x)`. A recorder of kernels records the product instead."""
        ...

    @property
    def max_fused_rows(self) -> int:
        """Maximum number of rows of `lora_linear`; 0 if the engine should multiply and then call `lora_add`."""
        ...

    def lora_linear(
        self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, call: LoraCall, slots: torch.Tensor
    ) -> torch.Tensor:
        """`x @ weightᵀ + bias`, then `lora_add`, in one pass over the output `[T, out_features]`.

        `weight` is `[out_features, in_features]`. Its columns are those of the group's modules, which are not experts.
        `slots` int32 `[T]` is the slot of each row, or -1 for rows that no segment lists. `call.segments.adapters` is
        not None.
        """
        ...

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        """`x / sqrt(mean(x²) + eps) * weight` over the last axis."""
        ...

    def add_rms_norm(self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        """Add `x` to `residual` in place, and return `rms_norm` of the sum. `residual` is contiguous."""
        ...

    def silu_and_mul(self, gate_up: torch.Tensor) -> torch.Tensor:
        """`silu(gate) * up`, where each row contains gate, then up."""
        ...

    def gelu_and_mul(self, gate_up: torch.Tensor) -> torch.Tensor:
        """`gelu(gate) * up`, with gelu in its tanh form. Each row contains gate, then up."""
        ...

    def clamped_silu_and_mul(self, gate_up: torch.Tensor, alpha: float, limit: float) -> torch.Tensor:
        """`gate * sigmoid(alpha * gate) * (up + 1)`, where each row contains gate, then up.

        Beforehand, gate is clamped to `(-inf, limit]` and up is clamped to `[-limit, limit]`.
        """
        ...

    def route(
        self,
        logits: torch.Tensor,
        spec: RoutingSpec,
        bias: torch.Tensor | None = None,
        expert_scales: torch.Tensor | None = None,
    ) -> Routing:
        """Choose each token's experts from its logits `[T, num_experts]`.

        Ties are broken in favour of the lower index. `bias` and `expert_scales` are float32 `[num_experts]` and finite;
        the weight of each chosen expert is multiplied by the expert's scale. A token whose logits have no softmax (see
        `reference.routing.route`) gets experts `[0, top_k)`, with NaN weights.
        """
        ...

    def adapter_pairs(self, routing: Routing, slots: torch.Tensor, segments: Segments) -> Segments:
        """Group the routing's pairs by adapter and expert, for module groups of experts.

        `slots`, int32 `[T]`, contains the adapter slot of each row, or -1. `segments` groups the same rows by slot.
        Only rows of the base may lie between two rows of the same adapter.
        """
        ...

    def multiply_experts(self, x: torch.Tensor, experts: ExpertWeights, routing: Routing) -> torch.Tensor:
        """`y[p] = x[row of p] @ weight[e]ᵀ + bias[e]`, `[T * top_k, out_features]`, where `e` is pair `p`'s expert.

        `x` has a row for each token or for each pair.
        """
        ...

    def sum_experts(
        self, y: torch.Tensor, routing: Routing, shared: torch.Tensor | None, shared_gate: torch.Tensor | None
    ) -> torch.Tensor:
        """`sum over j of weights[t, j] * y[t * top_k + j]`, plus `sigmoid(shared_gate[t]) * shared[t]` if given.

        `y` is contiguous, `[T * top_k, n]`; `shared` `[T, n]` is the output of the shared expert. `shared_gate` is
        `[T, 1]`, or None for a factor of 1.
        """
        ...

    def convolve(
        self, x: torch.Tensor, weight: torch.Tensor, layer: int, batch: AttentionBatch, spec: DeltaSpec
    ) -> torch.Tensor:
        """`silu` of the causal convolution of `x` `[T, channels]` with `weight` float32 `[conv_len, channels]`.

        Reads and updates the tail of each sequence's state, whose pages `batch` lists. `layer` is an index into the
        layers of `spec`.
        """
        ...

    def delta_rule(
        self,
        qkv: torch.Tensor,
        gates: torch.Tensor,
        rates: torch.Tensor,
        layer: int,
        batch: AttentionBatch,
        spec: DeltaSpec,
    ) -> torch.Tensor:
        """Outputs `[T, num_v_heads * v_dim]` of the gated delta rule: see `reference.delta.delta_rule`.

        Reads and updates the matrices of each sequence's state.
        """
        ...


@dataclass(frozen=True, slots=True)
class KernelShapes:
    """The shapes that a model needs. Unsupported shapes are rejected before the first step."""

    groups: tuple[ModuleGroup, ...]
    attention: tuple[AttentionSpec, ...]
    outer_groups: tuple[ModuleGroup, ...] = ()
    delta: DeltaSpec | None = None


def select_kernels(
    device: torch.device, pool: PoolViews, shapes: KernelShapes, pdl: bool = False, fuses: bool = False
) -> Kernels:
    """Kernels for `device` that read and write `pool` and support all of `shapes`.

    `pdl` lets kernels start before the previous one has ended, on GPUs that support it (compute capability 9 or later).
    With `fuses`, kernels for a GPU multiply linear layers and their adapters together (`Kernels.lora_linear`).
    Raises ValueError, naming the limit, if the device has no kernels or its kernels do not support the pool or a shape.
    """
    if device.type == "cpu":
        # Import the numba kernels only here: an engine on a GPU does not need numba, which rejects numpy versions that
        # are newer than it supports.
        from loramux.kernels.cpu.kernels import CpuKernels

        return CpuKernels(pool)
    if device.type != "cuda":
        raise ValueError(f"there are no kernels for device {device.type!r}; use --device cpu or cuda")
    if not torch.cuda.is_available():
        raise ValueError("this machine has no CUDA device that torch can use; use --device cpu")
    problem = capability_problem(torch.cuda.get_device_capability(device), device.index or 0)
    if problem is not None:
        raise ValueError(problem)
    # Import the Triton kernels only here: a machine without Triton can still serve on its CPU.
    try:
        from loramux.kernels.gpu.kernels import GpuKernels, check_shapes
    except ImportError as error:
        raise ValueError(f"the GPU kernels need triton, which cannot be imported: {error}") from error
    check_shapes(pool, shapes.groups, shapes.attention, shapes.outer_groups, shapes.delta)
    return GpuKernels(pool, pdl=pdl, fuses=fuses)
