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
    ("out_features", "in_features"), [(64, 64), (63, 100), (1000, 257)], ids=["even", "odd", "wide"]
)
def test_equals_linear(out_features: int, in_features: int, has_bias: bool, num_rows: int) -> None:
    weight = torch.randn(out_features, in_features)
    bias = torch.randn(out_features) if has_bias else None
    x = torch.randn(num_rows, in_features)
    y = PackedLinear(weight, bias)(x)
    torch.testing.assert_close(y, functional.linear(x, weight, bias), rtol=1e-4, atol=1e-4)


def test_a_bfloat16_weight_takes_and_gives_float32() -> None:
    weight, bias = torch.randn(96, 128).bfloat16(), torch.randn(96).bfloat16()
    x = torch.randn(7, 128)
    y = PackedLinear(weight, bias)(x)
    assert y.dtype == torch.float32
    # Where the CPU multiplies bfloat16, input and output are rounded to it as well.
    torch.testing.assert_close(y, functional.linear(x, weight.float(), bias.float()), rtol=2e-2, atol=0.3)


def test_rows_of_a_wider_buffer() -> None:
    weight, x = torch.randn(64, 48), torch.randn(5, 100)[:, 3:51]
    torch.testing.assert_close(PackedLinear(weight)(x), x @ weight.T, rtol=1e-4, atol=1e-4)


def test_keeps_the_weight_once() -> None:
    weight = torch.randn(64, 64).bfloat16()
    original = weakref.ref(weight)
    linear = PackedLinear(weight)
    del weight
    assert original() is None
    assert (linear.out_features, linear.in_features) == (64, 64)
