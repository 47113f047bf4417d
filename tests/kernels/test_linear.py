"""The packed linear layer against torch's own, and its rows against each other."""

from __future__ import annotations

import weakref

import pytest
import torch
from torch.nn import functional

from loramux.kernels import cpu_linear
from loramux.kernels.cpu_linear import BLOCK_INPUTS, PackedLinear


@pytest.mark.parametrize("num_rows", [*range(14), 16, 100], ids=lambda n: f"{n}-rows")
@pytest.mark.parametrize("has_bias", [False, True], ids=["no-bias", "bias"])
@pytest.mark.parametrize(
    ("out_features", "in_features"),
    [(64, 64), (63, 100), (1, 1), (512, 512), (1000, 257)],
    ids=["small", "odd", "one", "blocks", "odd-blocks"],
)
def test_equals_linear(out_features: int, in_features: int, has_bias: bool, num_rows: int) -> None:
    weight = torch.randn(out_features, in_features)
    bias = torch.randn(out_features) if has_bias else None
    x = torch.randn(num_rows, in_features)
    y = PackedLinear(weight, bias)(x)
    torch.testing.assert_close(y, functional.linear(x, weight, bias), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("out_features", [40, 2048], ids=["serial", "parallel"])
def test_the_bits_of_a_row_do_not_depend_on_its_neighbours(
    out_features: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    # oneDNN, where it multiplies, promises nothing of the kind.
    monkeypatch.setattr(cpu_linear, "multiplies_bfloat16", lambda: False)
    linear = PackedLinear(torch.randn(out_features, BLOCK_INPUTS + 50).to(dtype), torch.randn(out_features))
    x = torch.randn(23, linear.in_features)
    y = linear(x)
    for begin in range(len(x)):
        for end in range(begin + 1, len(x) + 1):
            assert torch.equal(linear(x[begin:end]), y[begin:end])


def test_what_is_not_finite_stays_in_its_row() -> None:
    linear = PackedLinear(torch.randn(64, 48))
    x = torch.randn(9, 48)
    expected = linear(x)
    x[4, 7], x[6, 1] = torch.nan, torch.inf
    y = linear(x)
    assert not y[[4, 6]].isfinite().any()
    others = [0, 1, 2, 3, 5, 7, 8]
    assert torch.equal(y[others], expected[others])


@pytest.mark.parametrize("out_features", [96, 2048], ids=["small", "large"])
def test_a_bfloat16_weight_takes_and_gives_float32(out_features: int) -> None:
    weight, bias = torch.randn(out_features, 128).bfloat16(), torch.randn(out_features).bfloat16()
    x = torch.randn(7, 128)
    y = PackedLinear(weight, bias)(x)
    assert y.dtype == torch.float32
    # Where the CPU multiplies bfloat16, input and output are rounded to it as well.
    torch.testing.assert_close(y, functional.linear(x, weight.float(), bias.float()), rtol=2e-2, atol=0.3)


@pytest.mark.parametrize("out_features", [64, 4096], ids=["small", "large"])
def test_rows_of_a_wider_buffer(out_features: int) -> None:
    weight, x = torch.randn(out_features, 48), torch.randn(5, 100)[:, 3:51]
    torch.testing.assert_close(PackedLinear(weight)(x), x @ weight.T, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("out_features", [64, 4096], ids=["small", "large"])
def test_keeps_the_weight_once(out_features: int) -> None:
    weight = torch.randn(out_features, 64).bfloat16()
    original = weakref.ref(weight)
    linear = PackedLinear(weight)
    del weight
    assert original() is None
    assert (linear.out_features, linear.in_features) == (out_features, 64)
