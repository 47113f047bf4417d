"""The device-specific parts of an engine."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Protocol, runtime_checkable

import torch
from torch.nn import functional

from loramux.engine.device.accelerator import Accelerator, HostAccelerator
from loramux.engine.device.cuda import CudaAccelerator
from loramux.engine.device.cuda_driver import missing_for_cuda, missing_for_triton
from loramux.engine.device.worker_group import WorkerGroup
from loramux.engine.protocol.errors import DeviceNotUsable
from loramux.kernels.dispatch import Kernels, KernelShapes, select_kernels
from loramux.kernels.quantized import QuantizedWeight
from loramux.kernels.recording import Recorder
from loramux.kernels.routing import ExpertWeights, StackedExperts
from loramux.kernels.tables import AttentionBatch, PoolViews

SWITCH_INTERVAL_S = 0.0005


class CompileAhead(Protocol):
    """The signature of `kernels.gpu.ahead.compile_ahead`."""

    def __call__(self, launch: Callable[[], None], num_processes: int) -> None: ...


class Linear(Protocol):
    """`y = x @ weightᵀ + bias` for `x` `[T, in_features]`."""

    def __call__(self, x: torch.Tensor) -> torch.Tensor: ...


@runtime_checkable
class AddingLinear(Linear, Protocol):
    """A linear layer that can add its product to a tensor, reading the tensor while it multiplies."""

    def add_to(self, x: torch.Tensor, y: torch.Tensor) -> None:
        """`y += x @ weightᵀ`, summed in float32 and rounded once. The layer has no bias.

        `y` `[T, out_features]` is contiguous. A quantised layer needs MIN_EXPANDED_FIRST_ROWS rows or more.
        """
        ...


class DenseLinear:
    """A linear layer computed by cuBLAS. `weight` is `[out_features, in_features]`."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> None:
        self.weight = weight
        self.bias = bias

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return functional.linear(x, self.weight, self.bias)

    def add_to(self, x: torch.Tensor, y: torch.Tensor) -> None:
        assert self.bias is None
        y.addmm_(x, self.weight.T)


class MakeQuantizedLinear(Protocol):
    """Makes a linear layer that keeps its weight quantised, or returns None if the device cannot multiply by the
    weight's codes.
    """

    def __call__(self, weight: QuantizedWeight, bias: torch.Tensor | None) -> Linear | None: ...


class MakeExperts(Protocol):
    """Lays out the weights of one linear layer for all experts. Takes the experts' weights `[out_features,
    in_features]` in order.

    `bias` is `[num_experts, out_features]` or None.
    """

    def __call__(
        self, num_experts: int, weights: Iterator[torch.Tensor], bias: torch.Tensor | None
    ) -> ExpertWeights: ...


def stack_experts(num_experts: int, weights: Iterator[torch.Tensor], bias: torch.Tensor | None) -> StackedExperts:
    """Stack the weights as `[num_experts, out_features, in_features]`, without holding all experts in memory twice."""
    first = next(weights)
    stacked = first.new_empty(num_experts, *first.shape)
    stacked[0] = first
    for expert, weight in enumerate(weights, 1):
        stacked[expert] = weight
    return StackedExperts(stacked, bias)


class MakeQuantizedExperts(Protocol):
    """Like `MakeExperts` for quantised weights. Returns None if the device cannot keep all of them quantised."""

    def __call__(
        self, num_experts: int, weights: Iterator[QuantizedWeight | torch.Tensor], bias: torch.Tensor | None
    ) -> ExpertWeights | None: ...


class SampleTokens(Protocol):
    def __call__(
        self,
        logits: torch.Tensor,
        temperature: torch.Tensor,
        top_k: torch.Tensor,
        top_p: torch.Tensor,
        min_p: torch.Tensor,
        uniform: torch.Tensor,
        out_tokens: torch.Tensor,
        workspace: torch.Tensor | None = None,
        *,
        all_greedy: bool = False,
    ) -> None: ...


@dataclass(frozen=True, slots=True)
class Backend:
    """The device-specific parts of one engine. If `activation_dtype` is None, activations have the weights' dtype.

    Quantised weights are dequantised if `make_quantized_linear` or `make_quantized_experts` is None or returns None.

    `set_num_threads` limits the CPU threads of kernels and torch. A device with `sample_tokens` samples tokens itself:
    its steps are padded, captured as graphs, and submitted before the host has the previous step's tokens. If
    `compiles` is set, the device's kernels are compiled for each shape. `compile_ahead` compiles them in parallel
    before the first launch, and `reported_programs` reports those that it missed. `workers` share the model's linear
    layers with this engine, or is None.
    """

    accelerator: Accelerator
    make_kernels: Callable[[PoolViews, KernelShapes], Kernels]
    make_linear: Callable[[torch.Tensor, torch.Tensor | None], Linear]
    activation_dtype: torch.dtype | None
    make_quantized_linear: MakeQuantizedLinear | None = None
    make_experts: MakeExperts = stack_experts
    make_quantized_experts: MakeQuantizedExperts | None = None
    sample_tokens: SampleTokens | None = None
    compiles: bool = False
    compile_ahead: CompileAhead | None = None
    reported_programs: Callable[[], AbstractContextManager[None]] = nullcontext
    set_num_threads: Callable[[int], None] = torch.set_num_threads
    start_recording: Callable[[Kernels, int, tuple[AttentionBatch, ...]], Recorder] | None = None
    workers: WorkerGroup | None = None

    @property
    def device(self) -> torch.device:
        return self.accelerator.device

    @property
    def runs_ahead(self) -> bool:
        return self.sample_tokens is not None


def open_backend(
    device: str, pdl: bool = False, activation_bits: int = 16, fused_lora: bool = False, gpu: int = 0
) -> Backend:
    """The backend for `cpu` or `cuda`. Raises DeviceNotUsable if the device cannot be used.

    `gpu` is the number of the GPU, among those that this process sees.

    The first backend for a CPU on a machine compiles the kernels, which takes one or two minutes.

    On a CPU, the inputs of linear layers that keep their weights quantised are rounded to `activation_bits`, 16 or 8.
    On a GPU, 8 rounds the inputs of FP8 weights to FP8 in large steps, and 16 rounds nothing.

    `pdl` lets launches of kernels overlap on GPUs of compute capability 9.0 or later. Other GPUs ignore it.
    `fused_lora` makes a GPU multiply float linear layers and their adapters together in small steps.
    """
    # Make other threads release the interpreter lock sooner, so that the thread that submits steps gets it quickly.
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    if device == "cpu":
        # Imported here because an engine on a GPU does not need numba.
        from loramux.kernels.cpu.instructions.threads import set_num_threads
        from loramux.kernels.cpu.linear.coded_experts import make_coded_experts
        from loramux.kernels.cpu.linear.experts import PackedExperts
        from loramux.kernels.cpu.linear.linear import PackedLinear
        from loramux.kernels.cpu.linear.quantized_linear import make_quantized_linear
        from loramux.kernels.cpu.recorder import start_recording
        from loramux.kernels.cpu.warm import compile_missing

        compile_missing()
        return Backend(
            accelerator=HostAccelerator(),
            make_kernels=lambda pool, shapes: select_kernels(torch.device("cpu"), pool, shapes),
            make_linear=PackedLinear,
            activation_dtype=torch.float32,
            make_quantized_linear=partial(make_quantized_linear, x_bits=activation_bits),
            make_experts=lambda num_experts, weights, bias: PackedExperts(weights, bias),
            make_quantized_experts=partial(make_coded_experts, x_bits=activation_bits),
            set_num_threads=set_num_threads,
            start_recording=start_recording,
        )
    missing = missing_for_cuda((gpu,)) or missing_for_triton()
    if missing is not None:
        raise DeviceNotUsable(missing)
    if not torch.cuda.is_available():
        raise DeviceNotUsable("PyTorch cannot use this machine's GPU: update its driver, or use --device cpu")
    # Imported here because an engine on a CPU does not need Triton.
    from loramux.kernels.gpu.linear.coded_linear import make_coded_linear
    from loramux.kernels.gpu.linear.coded_weights import place_codes
    from loramux.kernels.gpu.sampling import sample_tokens

    def compile_ahead(launch: Callable[[], None], num_processes: int) -> None:
        # `ahead` uses private names from Triton. With a Triton version that lacks them, this import fails, and the
        # kernels are compiled one at a time instead.
        from loramux.kernels.gpu import ahead

        ahead.compile_ahead(launch, num_processes)

    def reported_programs() -> AbstractContextManager[None]:
        try:
            from loramux.kernels.gpu.ahead import reported_programs
        except ImportError:
            return nullcontext()
        return reported_programs()

    accelerator = CudaAccelerator(torch.device("cuda", gpu))
    return Backend(
        accelerator=accelerator,
        make_kernels=lambda pool, shapes: select_kernels(accelerator.device, pool, shapes, pdl, fused_lora),
        make_linear=DenseLinear,
        activation_dtype=None,
        make_quantized_linear=partial(make_coded_linear, device=accelerator.device, rounds_inputs=activation_bits == 8),
        make_quantized_experts=lambda number, weights, bias: place_codes(weights, number, bias, accelerator.device),
        sample_tokens=sample_tokens,
        compiles=True,
        compile_ahead=compile_ahead,
        reported_programs=reported_programs,
    )
