from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest
import torch

from loramux.engine.device.accelerator import Accelerator, HostAccelerator
from loramux.engine.device.backend import Backend, DenseLinear, open_backend
from loramux.engine.execution import graph_executor
from loramux.kernels.gpu.linear.coded_weights import place_codes
from loramux.kernels.reference.kernels import ReferenceKernels
from tests.kernels.gpu.interpreted import HAS_GPU, import_kernels, run_interpreted


def capture_early(monkeypatch: pytest.MonkeyPatch) -> None:
    """Capture a shape's graph as soon as its kernels are loaded, so that short answers replay graphs."""
    monkeypatch.setattr(graph_executor, "STEPS_BEFORE_CAPTURE", 1)
    monkeypatch.setattr(graph_executor, "STEPS_BEFORE_OWN_GRAPH", 0)


def has_fp8_products(device: torch.device) -> bool:
    """True if torch multiplies FP8 numbers with a scale per row on `device`: on a CPU, only newer versions do."""
    codes = torch.zeros(16, 16, dtype=torch.float8_e4m3fn, device=device)
    scales = torch.ones(16, 1, device=device)
    try:
        torch._scaled_mm(codes, codes.T, scales, scales.T, out_dtype=torch.bfloat16)
    except (RuntimeError, ValueError):
        return False
    return True


def gpu_backend(monkeypatch: pytest.MonkeyPatch, rounds_inputs: bool = False) -> Backend:
    """Open the GPU backend or, without a GPU, its substitute, which interprets the kernels in host memory.

    Neither compiles the kernels of all shapes when an engine starts, which would take most of a test's time. With
    `rounds_inputs`, the inputs of FP8 weights are rounded in large steps.
    """
    capture_early(monkeypatch)
    if HAS_GPU:
        return replace(open_backend("cuda", activation_bits=8 if rounds_inputs else 16), compiles=False)
    run_interpreted(monkeypatch)
    gpu, sampling, coded_linear = import_kernels("kernels", "sampling", "coded_linear")
    accelerator = HostAccelerator()
    return Backend(
        accelerator=accelerator,
        make_kernels=lambda pool, shapes: gpu.GpuKernels(pool),
        make_linear=DenseLinear,
        activation_dtype=None,
        make_quantized_linear=partial(
            coded_linear.make_coded_linear, device=accelerator.device, rounds_inputs=rounds_inputs
        ),
        make_quantized_experts=lambda number, weights, bias: place_codes(weights, number, bias, accelerator.device),
        sample_tokens=sampling.sample_tokens,
    )


def plain_backend(accelerator: Accelerator, compiles: bool = False) -> Backend:
    """The GPU's backend with reference kernels."""
    return Backend(
        accelerator=accelerator,
        make_kernels=lambda pool, shapes: ReferenceKernels(pool),
        make_linear=DenseLinear,
        activation_dtype=None,
        sample_tokens=greedy,
        compiles=compiles,
    )


def greedy(logits: torch.Tensor, *settings: torch.Tensor, all_greedy: bool = False) -> None:
    settings[-1].copy_(logits.argmax(1))
