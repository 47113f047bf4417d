"""The kernels' interface, and which implementation serves a device."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch

from loramux.kernels.gpu.capability import capability_problem
from loramux.kernels.tables import AttentionBatch, AttentionSpec, LoraCall, ModuleGroup, PoolViews


class LoraKernels(Protocol):
    """What adapters add to a batch; `reference.lora.ReferenceLora` specifies every method.

    Activations `[T, ...]` are float32 on CPU and of the compute dtype on a GPU; their last axes are contiguous, their
    rows may be views of wider rows. On a GPU no method waits for the device or looks at what a tensor holds: a captured
    graph may be replayed after the tensors of its batch, segments and tables were overwritten in place.
    """

    @property
    def segment_rows(self) -> int:
        """The most rows of a segment on this device."""
        ...

    def lora_planes(self, call: LoraCall, num_tokens: int) -> torch.Tensor:
        """Scratch that one `lora_shrink` or `lora_gather` fills for the `lora_expand` after it.

        The next call may return it again, and `lora_add` may overwrite it.
        """
        ...

    def lora_shrink(self, x: torch.Tensor, call: LoraCall, planes: torch.Tensor) -> None:
        """`planes[t, i, :rank] = x[t] @ A[slot, modules[i]]ᵀ`."""
        ...

    def lora_expand(self, planes: torch.Tensor, call: LoraCall, y: torch.Tensor) -> None:
        """`y[t, columns of i] += scale * planes[t, i, :rank] @ B[slot, modules[i]]ᵀ`."""
        ...

    def lora_add(self, x: torch.Tensor, call: LoraCall, y: torch.Tensor) -> None:
        """`y[t, columns of i] += scale * (x[t] @ Aᵀ) @ Bᵀ`: `lora_shrink`, then `lora_expand`, over planes of its own.

        On a CPU, tables that were rewritten come with new segments.
        """
        ...

    def lora_gather(self, tokens: torch.Tensor, call: LoraCall, planes: torch.Tensor) -> None:
        """`planes[t, 0, :rank] = A[slot, modules[0]][:, tokens[t]]`: the shrink of an embedding, whose x is one-hot."""
        ...


class Kernels(LoraKernels, Protocol):
    """The mathematics of one device over one page pool; `reference.kernels.ReferenceKernels` specifies every method."""

    @property
    def outer(self) -> LoraKernels:
        """The same for modules outside the layers."""
        ...

    def rotate_and_store(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        cos: torch.Tensor,
        sin: torch.Tensor,
        layer: int,
        batch: AttentionBatch,
    ) -> None:
        """Rotate the two halves of each head of q and k by its position's angles, and store k and v of each row in its
        place of the pool.

        q is changed in place; afterwards k, and q of a row that only pads the batch, may hold anything.
        """
        ...

    def paged_attention(
        self, q: torch.Tensor, layer: int, batch: AttentionBatch, spec: AttentionSpec, out: torch.Tensor
    ) -> None:
        """`out = softmax(soft_cap(q kᵀ * scale) + mask) v` over the pages of each sequence."""
        ...

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        """`x / sqrt(mean(x²) + eps) * weight` over the last axis."""
        ...

    def add_rms_norm(self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        """`residual += x` in place, then `rms_norm` of the sum; `residual` is contiguous."""
        ...

    def silu_and_mul(self, gate_up: torch.Tensor) -> torch.Tensor:
        """`silu(gate) * up` of rows that hold gate, then up."""
        ...

    def gelu_and_mul(self, gate_up: torch.Tensor) -> torch.Tensor:
        """`gelu(gate) * up` of rows that hold gate, then up; gelu in its tanh form."""
        ...


@dataclass(frozen=True, slots=True)
class KernelShapes:
    """What a model will ask of its kernels, so that all they cannot do is refused before the first step."""

    groups: tuple[ModuleGroup, ...]
    attention: tuple[AttentionSpec, ...]
    outer_groups: tuple[ModuleGroup, ...] = ()


def select_kernels(device: torch.device, pool: PoolViews, shapes: KernelShapes, pdl: bool = False) -> Kernels:
    """The kernels for `device` over `pool`, which serve every one of `shapes`.

    `pdl` lets an expand begin before its shrink has ended, on GPUs that can (compute capability 9).
    Raises ValueError, naming the limit, for a device that has no kernels and for what its kernels do not take.
    """
    if device.type == "cpu":
        # A GPU needs no numba, which refuses a numpy that is newer than it knows.
        from loramux.kernels.cpu.kernels import CpuKernels

        return CpuKernels(pool)
    if device.type != "cuda":
        raise ValueError(f"there are no kernels for device {device.type!r}; use --device cpu or cuda")
    if not torch.cuda.is_available():
        raise ValueError("this machine has no CUDA device that torch can use; use --device cpu")
    problem = capability_problem(torch.cuda.get_device_capability(device))
    if problem is not None:
        raise ValueError(problem)
    # A machine without triton serves on its CPU.
    try:
        from loramux.kernels.gpu.kernels import GpuKernels, check_shapes
    except ImportError as error:
        raise ValueError(f"the GPU's kernels need triton, which cannot be imported: {error}") from error
    check_shapes(pool, shapes.groups, shapes.attention, shapes.outer_groups)
    return GpuKernels(pool, pdl=pdl)
