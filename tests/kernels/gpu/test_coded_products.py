"""Products with quantised weights on a GPU, compared with products with the dequantised weights."""

from __future__ import annotations

from dataclasses import replace
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch

from loramux.kernels.gpu.linear.code_layout import placed_bytes
from loramux.kernels.gpu.linear.coded_weights import place_codes
from loramux.kernels.quantized import INT4, INT8, UINT4, UINT8, QuantizedWeight
from loramux.kernels.reference.quantized import multiply_codes
from tests.kernels.cpu.codebooks import FP8, MXFP4, NF4, Shift, random_weight
from tests.kernels.gpu.interpreted import DEVICE, FOR_GPUS, HAS_GPU, import_kernels, run_interpreted

CODEBOOKS: dict[str, tuple[np.ndarray, Shift | None]] = {
    "int8": (INT8, None),
    "int8-zeros": (INT8, "zeros"),
    "uint8-zeros": (UINT8, "zeros"),
    "uint8-minima": (UINT8, "minima"),
    "fp8": (FP8, None),
    "int4": (INT4, None),
    "uint4-zeros": (UINT4, "zeros"),
    "uint4-minima": (UINT4, "minima"),
    "uint4-halves": (UINT4, "halves"),
    "nf4": (NF4, None),
    "mxfp4": (MXFP4, None),
}
HALVES = [torch.float16, torch.bfloat16] if HAS_GPU else [torch.float16]
SHAPES = [(33, 192, 64), (70, 130, 130), (40, 96, 32), (130, 48, 16), (40, 512, 256)]
"""Outputs, inputs and inputs per group. Some do not fill whole tiles, or have an odd number of groups. All have so few
outputs that several programs share the inputs.
"""


def in_turn(*cases: tuple[Any, ...]) -> list[Any]:
    """Parameters of each codebook with each case. If the interpreter runs them, each codebook has one case in turn, and
    the campaign has the others.
    """
    return [
        pytest.param(
            name,
            *case,
            id="-".join(map(str, (name, *case))),
            marks=() if place == number % len(cases) else FOR_GPUS,
        )
        for number, name in enumerate(CODEBOOKS)
        for place, case in enumerate(cases)
    ]


@pytest.fixture
def module(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    if not HAS_GPU:
        run_interpreted(monkeypatch)
    return import_kernels("coded_linear")[0]


def check(module: ModuleType, weight: QuantizedWeight, x: torch.Tensor, bias: torch.Tensor | None = None) -> None:
    linear = module.make_coded_linear(weight, None if bias is None else bias.to(DEVICE), DEVICE)
    assert linear is not None
    y = linear(x.to(DEVICE))
    assert y.dtype == x.dtype
    expected = multiply_codes(x, weight, bias)
    # Sums are float32. Results, values of 16-entry tables and dequantised weights are rounded to the dtype of `x`.
    largest = np.abs(np.nan_to_num(weight.codebook)) + np.float32(0 if weight.zeros is None else 300)
    magnitudes = replace(
        weight,
        codebook=largest,
        scales=np.abs(weight.scales),
        zeros=None,
        minima=None if weight.minima is None else np.abs(weight.minima),
    )
    sizes = multiply_codes(x.abs(), magnitudes)
    precision = {torch.float32: 3e-6, torch.float16: 1e-3, torch.bfloat16: 8e-3}[x.dtype]
    assert ((y.double().cpu() - expected).abs() <= precision * (sizes + expected.abs() + 1e-3)).all()


@pytest.mark.parametrize(("name", "out_features", "in_features", "group"), in_turn(*SHAPES))
def test_equals_the_dequantized_product(
    name: str, out_features: int, in_features: int, group: int, module: ModuleType
) -> None:
    weight = random_weight(*CODEBOOKS[name], out_features, in_features, group)
    check(module, weight, torch.randn(17, in_features + 3)[:, 1:-2], torch.randn(out_features))


@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("name", CODEBOOKS)
def test_equals_the_dequantized_product_in_half_precision(name: str, dtype: torch.dtype, module: ModuleType) -> None:
    check(module, random_weight(*CODEBOOKS[name], 33, 128, 32), torch.randn(3, 128).to(dtype))


@pytest.mark.parametrize(
    ("name", "out_features", "in_features", "group", "dtype"),
    in_turn(*((*shape, dtype) for shape in SHAPES[:3] for dtype in (torch.float32, *HALVES))),
)
def test_large_steps_dequantize_a_weight_in_parts(
    name: str,
    out_features: int,
    in_features: int,
    group: int,
    dtype: torch.dtype,
    module: ModuleType,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "MIN_DEQUANTIZED_ROWS", 3)
    monkeypatch.setattr(import_kernels("dequantized_products")[0], "MAX_BYTES", 1)
    weight = random_weight(*CODEBOOKS[name], out_features, in_features, group)
    x = torch.randn(3, in_features + 3)[:, 1:-2].to(dtype)
    check(module, weight, x, torch.randn(out_features).to(dtype) if group == in_features else None)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_large_steps_can_add_the_product(
    dtype: torch.dtype, module: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "MIN_DEQUANTIZED_ROWS", 3)
    monkeypatch.setattr(import_kernels("dequantized_products")[0], "MAX_BYTES", 1)
    weight = random_weight(*CODEBOOKS["uint4-zeros"], 140, 128, 64)
    linear = module.make_coded_linear(weight, None, DEVICE)
    x, before = torch.randn(3, 128).to(DEVICE, dtype), torch.randn(3, 140).to(DEVICE, dtype)
    y = before.clone()
    linear.add_to(x, y)
    tolerance = {torch.float32: 1e-5, torch.float16: 2e-3}[dtype]
    torch.testing.assert_close(y, before + linear(x), rtol=tolerance, atol=tolerance * 10)


@pytest.mark.parametrize("name", ["fp8", "uint4-zeros", "uint4-halves"])
def test_many_outputs_are_not_split(name: str, module: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(import_kernels("coded_products")[0], "TARGET_PROGRAMS", 8)
    weight = random_weight(*CODEBOOKS[name], 64 * 8, 32, 32)
    check(module, weight, torch.randn(2, 32), torch.randn(weight.out_features))


@pytest.mark.parametrize(
    "num_rows", [0, 1, 40, 150, 520], ids=["no-rows", "one-row", "medium-tiles", "large-tiles", "dequantized"]
)
@pytest.mark.parametrize("shift", ["zeros", "minima"])
def test_any_number_of_rows(num_rows: int, shift: Shift, module: ModuleType) -> None:
    check(module, random_weight(UINT4, shift, 140, 128, 64), torch.randn(num_rows, 128))


def test_codes_are_kept_in_their_bytes() -> None:
    """Scales that 16 bits can express exactly take 16 bits."""
    weight = random_weight(INT4, None, 64, 256, 64)
    placed = place_codes([weight], 1, None, DEVICE)
    assert placed is not None
    assert placed.codes.nbytes == weight.codes.nbytes
    assert placed.scales.dtype is torch.float32
    for dtype in (torch.bfloat16, torch.float16):
        scales = torch.from_numpy(weight.scales).to(dtype).float().numpy()
        narrow = QuantizedWeight(codes=weight.codes, codebook=INT4, scales=scales)
        placed = place_codes([narrow], 1, None, DEVICE)
        assert placed is not None
        assert placed.scales.dtype is dtype
        assert np.array_equal(placed.scales[0].float().cpu().numpy(), scales)
    halves = random_weight(UINT4, "halves", 64, 256, 32)
    placed = place_codes([halves], 1, None, DEVICE)
    assert placed is not None
    assert placed.minima is not None
    kept = placed.codes.nbytes + placed.scales.nbytes + placed.minima.nbytes
    assert 8 * kept == 5 * 64 * 256
    assert kept == placed_bytes(halves)


@pytest.mark.parametrize(
    "weight",
    [
        random_weight(FP8 * np.float32(2), None, 4, 64, 32),
        random_weight(INT4, None, 4, 48, 24),
        random_weight(NF4, "zeros", 4, 64, 32),
        *(
            QuantizedWeight(
                codes=np.zeros((1, 16), np.uint8), codebook=codebook, scales=np.ones((1, 1), np.float32),
                zeros=np.full((1, 1), zero, np.int16),
            )
            for codebook, zero in ((UINT4, 129), (UINT8, -32768))
        ),
    ],
    ids=["other-codebook", "odd-group", "fractional-zeros", "large-zeros-of-4-bits", "large-zeros-of-8-bits"],
)  # fmt: skip
def test_other_weights_are_not_placed(weight: QuantizedWeight) -> None:
    assert place_codes([weight], 1, None, DEVICE) is None


def test_experts_that_differ_are_not_placed() -> None:
    first = random_weight(INT4, None, 4, 64, 32)
    others = [random_weight(UINT4, None, 4, 64, 32), random_weight(INT4, None, 4, 64, 16), torch.zeros(4, 64)]
    for other in others:
        assert place_codes([first, other], 2, None, DEVICE) is None
