"""Products with FP8 weights and inputs, compared with the same products in float64."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from loramux.engine.device.backend import AddingLinear
from loramux.kernels.gpu.linear.coded_weights import place_codes
from loramux.kernels.quantized import INT8, QuantizedWeight
from loramux.kernels.reference.quantized import multiply_codes, round_to_fp8
from tests.engine.device.gpu_backend import has_fp8_products
from tests.kernels.cpu.codebooks import FP8, random_weight
from tests.kernels.gpu.interpreted import DEVICE, HAS_GPU, import_kernels, run_interpreted

scaled_products, coded_linear = import_kernels("scaled_products", "coded_linear")

needs_products = pytest.mark.skipif(
    not has_fp8_products(DEVICE), reason="torch multiplies FP8 on newer GPUs and, in newer versions, on CPUs"
)
DTYPES = [torch.float32, torch.float16, torch.bfloat16]
PRECISION = {torch.float32: 1e-5, torch.bfloat16: 8e-3}


@pytest.fixture(autouse=True)
def device(monkeypatch: pytest.MonkeyPatch) -> None:
    if not HAS_GPU:
        run_interpreted(monkeypatch)


@pytest.fixture
def poisoned(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fill all new tensors with NaN, which is 0xff in E4M3."""

    def poisoning(make: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        return lambda *sizes, **named: (made := make(*sizes, **named)).fill_(
            255 if made.dtype is torch.uint8 else torch.nan
        )

    for name in ("empty", "empty_strided"):
        monkeypatch.setattr(torch, name, poisoning(getattr(torch, name)))


def rounded(x: torch.Tensor, num_groups: int) -> torch.Tensor:
    codes, scales = scaled_products.round_rows(x.to(DEVICE), num_groups)
    assert codes.shape[0] % 16 == 0
    assert scales.stride() == (1, 1 if num_groups == 1 else codes.shape[0])
    values = codes.double().unflatten(1, (num_groups, -1)) * scales.double()[:, :, None]
    return values.flatten(1)[: x.shape[0]].cpu()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("num_rows", "size", "num_groups"),
    [(0, 64, 1), (1, 63, 1), (17, 1000, 1), (2, 5000, 1), (3, 9216, 1), (5, 384, 3), (33, 512, 4)],
    ids=["no-rows", "one-row", "odd", "two-blocks", "three-blocks", "groups", "groups-of-several-programs"],
)
@pytest.mark.usefixtures("poisoned")
def test_rows_are_rounded_to_their_own_scale(num_rows: int, size: int, num_groups: int, dtype: torch.dtype) -> None:
    magnitudes = 10.0 ** torch.linspace(-6, 4, num_rows)[:, None]
    x = (torch.randn(num_rows, size + 9) * magnitudes).to(dtype)[:, 4 : size + 4]
    expected = round_to_fp8(x, num_groups)
    if HAS_GPU:
        # Quotients that are close to a tie may be rounded to the other side.
        errors = (rounded(x, num_groups) - x.double()).abs()
        assert (errors <= x.double().abs() / 15 + expected.abs().amax(1, keepdim=True) / 2**17).all()
    else:
        assert torch.equal(rounded(x, num_groups), expected)


def test_every_number_is_rounded_as_torch_rounds_it() -> None:
    """With 448 in the row, its scale is 1. Half of the 16-bit numbers and of the sums of neighbours are ties."""
    codes = torch.arange(256, dtype=torch.uint8)
    numbers = codes[codes & 127 != 127].view(torch.float8_e4m3fn).float().sort().values
    between = (numbers[1:] + numbers[:-1]) / 2
    halves = torch.arange(-(1 << 15), 1 << 15, dtype=torch.int16).view(torch.float16).float()
    halves = halves[halves.abs() <= 448]
    for x in (torch.cat([numbers, between, between.nextafter(numbers[1:]), between.nextafter(numbers[:-1])]), halves):
        found, scales = scaled_products.round_rows(x[None].to(DEVICE), 1)
        assert scales[0].item() == 1
        assert torch.equal(found[0].float().cpu(), x.to(torch.float8_e4m3fn).float())


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_a_row_that_is_not_finite_stays_so_and_changes_no_other_row(bad: float) -> None:
    x = torch.randn(20, 100)
    x[3, 7] = bad
    # NumPy warns of infinity divided by infinity.
    with np.errstate(invalid="ignore"):
        found = rounded(x, 1)
    assert not found[3].isfinite().all()
    others = [row for row in range(20) if row != 3]
    assert torch.equal(found[others], rounded(x[others], 1))


def test_rows_of_zeros_and_of_the_smallest_numbers_become_zeros() -> None:
    x = torch.zeros(3, 64)
    x[1] = 1e-38
    x[2] = 1e-45
    assert torch.equal(rounded(x, 1), torch.zeros(3, 64, dtype=torch.float64))


def products(weight: QuantizedWeight, bias: torch.Tensor | None = None) -> tuple[Any, Any]:
    """The layer that rounds its inputs, and the layer that does not."""
    bias = None if bias is None else bias.to(DEVICE)
    rounding = coded_linear.make_coded_linear(weight, bias, DEVICE, rounds_inputs=True)
    return rounding, coded_linear.make_coded_linear(weight, bias, DEVICE)


@needs_products
@pytest.mark.parametrize("has_bias", [False, True], ids=["no-bias", "bias"])
@pytest.mark.parametrize("num_rows", [1, 17, 33])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_equals_the_product_of_rounded_inputs(
    dtype: torch.dtype, num_rows: int, has_bias: bool, poisoned: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    if HAS_GPU and dtype is torch.float32:
        pytest.skip("a GPU's engine rounds only bfloat16")
    monkeypatch.setattr(coded_linear, "MIN_DEQUANTIZED_ROWS", 1)
    weight = random_weight(FP8, None, 48, 208, 208)
    x = torch.randn(num_rows, 217).to(dtype)[:, 4:-5]
    bias = torch.randn(48).to(dtype) if has_bias else None
    linear, _ = products(weight, bias)
    y = linear(x.to(DEVICE))
    assert y.dtype is dtype
    assert y.is_contiguous()
    expected = multiply_codes(round_to_fp8(x, 1), weight, bias)
    sizes = multiply_codes(x.abs(), replace(weight, codebook=np.abs(np.nan_to_num(weight.codebook))))
    # On a GPU, quotients that are close to a tie may be rounded to the other side.
    precision = PRECISION[dtype] + (2**-6 if HAS_GPU else 0)
    assert ((y.double().cpu() - expected).abs() <= precision * (sizes + expected.abs())).all()


@needs_products
def test_only_large_steps_round_their_inputs() -> None:
    linear, plain = products(random_weight(FP8, None, 32, 64, 64))
    x = torch.randn(coded_linear.MIN_DEQUANTIZED_ROWS, 64).to(DEVICE, torch.float32 if not HAS_GPU else torch.bfloat16)
    small = x[:-1]
    assert not torch.equal(linear(x), plain(x))
    assert torch.equal(linear(small), plain(small))


@needs_products
def test_a_layer_that_rounds_its_inputs_cannot_add_its_product() -> None:
    """The engine then adds the adapters' outputs, which are computed from inputs that are not rounded, afterwards."""
    linear, plain = products(random_weight(FP8, None, 32, 64, 64))
    assert linear.x_bits == 8
    assert isinstance(plain, AddingLinear)
    assert not isinstance(linear, AddingLinear)


def refuse(*arguments: Any, **named: Any) -> torch.Tensor:
    raise RuntimeError("CUBLAS_STATUS_NOT_SUPPORTED")


def blocked(out_features: int, in_features: int) -> QuantizedWeight:
    """An FP8 weight with one scale per block of 128 x 128."""
    weight = random_weight(FP8, None, out_features, in_features, 128)
    return replace(weight, scales=np.repeat(weight.scales[::128], 128, axis=0)[:out_features])


@pytest.mark.parametrize(
    "weight",
    [
        random_weight(INT8, None, 32, 64, 64),
        random_weight(FP8, None, 128, 512, 128),
        blocked(192, 512),
        blocked(128, 640),
        replace(blocked(128, 512), scales=np.ones((128, 8), np.float32)),
    ],
    ids=["int8", "scales-of-single-outputs", "outputs-outside-blocks", "scales-outside-lines", "groups-of-64"],
)
def test_weights_that_torch_cannot_scale_are_dequantised(weight: QuantizedWeight) -> None:
    assert isinstance(products(weight)[0], coded_linear.CodedLinear)


def test_a_device_without_such_products_dequantises(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "_scaled_mm", refuse)
    assert isinstance(products(random_weight(FP8, None, 32, 64, 64))[0], coded_linear.CodedLinear)


def test_too_little_memory_is_not_taken_for_a_device_without_such_products(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*arguments: Any, **named: Any) -> torch.Tensor:
        raise torch.OutOfMemoryError

    monkeypatch.setattr(torch, "_scaled_mm", fail)
    with pytest.raises(torch.OutOfMemoryError):
        products(random_weight(FP8, None, 32, 64, 64))


def block_product(
    a: torch.Tensor, b: torch.Tensor, scale_a: torch.Tensor, scale_b: torch.Tensor, *, bias: Any, out_dtype: torch.dtype
) -> torch.Tensor:
    """torch's product with scales per 128 inputs of `a` and per block of `b`, in the layouts that cuBLAS requires."""
    num_groups = a.shape[1] // 128
    assert scale_a.shape == (len(a), num_groups)
    assert scale_a.stride() == (1, len(a))
    assert scale_b.shape == (num_groups, b.shape[1] // 128)
    assert scale_b.stride() == (1, num_groups)
    assert num_groups % 4 == 0
    rows = a.double() * scale_a.double().repeat_interleave(128, 1)
    columns = b.double() * scale_b.double().repeat_interleave(128, 0).repeat_interleave(128, 1)
    y = rows @ columns
    return (y if bias is None else y + bias.double()).to(out_dtype)


@pytest.mark.usefixtures("poisoned")
def test_blocks_use_a_scale_per_128_inputs(monkeypatch: pytest.MonkeyPatch) -> None:
    if not HAS_GPU:
        monkeypatch.setattr(torch, "_scaled_mm", block_product)
    monkeypatch.setattr(coded_linear, "MIN_DEQUANTIZED_ROWS", 1)
    dtype, tolerance = (torch.bfloat16, 2e-2) if HAS_GPU else (torch.float32, 1e-5)
    weight, x = blocked(256, 512), torch.randn(19, 512).to(dtype)
    linear, _ = products(weight)
    if HAS_GPU and not isinstance(linear, coded_linear.RoundingLinear):
        pytest.skip("torch cannot multiply FP8 weights in blocks on this GPU")
    assert isinstance(linear, coded_linear.RoundingLinear)
    expected = multiply_codes(round_to_fp8(x, 4), weight)
    torch.testing.assert_close(linear(x.to(DEVICE)).double().cpu(), expected, rtol=tolerance, atol=tolerance)


@needs_products
def test_small_and_large_steps_read_the_same_codes() -> None:
    weight = random_weight(FP8, None, 32, 64, 64)
    placed = place_codes([weight], 1, None, DEVICE)
    assert placed is not None
    scaled = scaled_products.scaled_weight(weight, placed)
    assert scaled.codes.data_ptr() == placed.codes.data_ptr()
