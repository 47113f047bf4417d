"""The packed linear layer against torch's own."""

from __future__ import annotations

import weakref

import pytest
import torch
from torch.nn import functional

from loramux.kernels.cpu_linear import PackedLinear


@pytest.mark.parametrize("num_rows", [0, 1, 5, 16, 100], ids=lambda n: f"{n}-rows")
@pytest.mark.parametrize("has_bias", [False, True], ids=["no-bias", "bias"])
@pytest.mark.parametrize(
    ("out_features", "in_features"),
    [(64, 64), (63, 100), (512, 512), (1000, 257)],
    ids=["small", "odd", "packed", "packed-odd"],
)
def test_equals_linear(out_features: int, in_features: int, has_bias: bool, num_rows: int) -> None:
    weight = torch.randn(out_features, in_features)
    bias = torch.randn(out_features) if has_bias else None
    x = torch.randn(num_rows, in_features)
    y = PackedLinear(weight, bias)(x)
    torch.testing.assert_close(y, functional.linear(x, weight, bias), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("out_features", [96, 2048], ids=["small", "packed"])
def test_a_bfloat16_weight_takes_and_gives_float32(out_features: int) -> None:
    weight, bias = torch.randn(out_features, 128).bfloat16(), torch.randn(out_features).bfloat16()
    x = torch.randn(7, 128)
    y = PackedLinear(weight, bias)(x)
    assert y.dtype == torch.float32
    # Where the CPU multiplies bfloat16, input and output are rounded to it as well.
    torch.testing.assert_close(y, functional.linear(x, weight.float(), bias.float()), rtol=2e-2, atol=0.3)


@pytest.mark.parametrize("out_features", [64, 4096], ids=["small", "packed"])
def test_rows_of_a_wider_buffer(out_features: int) -> None:
    weight, x = torch.randn(out_features, 48), torch.randn(5, 100)[:, 3:51]
    torch.testing.assert_close(PackedLinear(weight)(x), x @ weight.T, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("out_features", [64, 4096], ids=["small", "packed"])
def test_keeps_the_weight_once(out_features: int) -> None:
    weight = torch.randn(out_features, 64).bfloat16()
    original = weakref.ref(weight)
    linear = PackedLinear(weight)
    del weight
    assert original() is None
    assert (linear.out_features, linear.in_features) == (out_features, 64)
