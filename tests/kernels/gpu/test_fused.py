"""GPU norms and gates compared with torch in float64."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch.nn import functional

from tests.kernels.gpu.interpreted import import_kernels

(fused,) = import_kernels("fused")
add_rms_norm, rms_norm = fused.add_rms_norm, fused.rms_norm
gelu_and_mul, silu_and_mul = fused.gelu_and_mul, fused.silu_and_mul

SHAPES = {"no-rows": (0, 64), "one-row": (1, 63), "odd": (7, 1000), "one-block-and-more": (3, 1027)}

TOLERANCE = {
    torch.float32: {"rtol": 1e-5, "atol": 1e-5},
    torch.float16: {"rtol": 2e-3, "atol": 1e-4},
    torch.bfloat16: {"rtol": 1.6e-2, "atol": 1e-3},
}


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> torch.device:
    if torch.cuda.is_available():
        return torch.device("cuda")
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    return torch.device("cpu")


@pytest.fixture(params=[torch.float32, torch.float16, torch.bfloat16], ids=["float32", "float16", "bfloat16"])
def dtype(request: pytest.FixtureRequest) -> torch.dtype:
    return request.param


def assert_near(out: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(out.double(), expected, **TOLERANCE[out.dtype])


def plain_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    return functional.rms_norm(x.double(), (x.shape[-1],), weight.double(), eps)


@pytest.mark.parametrize(("num_rows", "size"), SHAPES.values(), ids=SHAPES.keys())
def test_rms_norm_equals_torch(num_rows: int, size: int, dtype: torch.dtype, device: torch.device) -> None:
    x = (torch.randn(num_rows, size + 9) * 3).to(device, dtype)[:, 4 : size + 4]
    weight = torch.randn(size).to(device, dtype)
    out = rms_norm(x, weight, 1e-5)
    assert_near(out, plain_norm(x, weight, 1e-5))
    given = torch.full_like(out, torch.nan)
    assert rms_norm(x, weight, 1e-5, out=given) is given
    assert torch.equal(given, out)


@pytest.mark.parametrize("size", [16, 72])
def test_rms_norm_of_heads_inside_wider_rows_equals_torch(size: int, dtype: torch.dtype, device: torch.device) -> None:
    heads = torch.randn(5, 7 * size + 20).to(device, dtype)[:, 10:-10].unflatten(1, (7, size))
    weight = torch.randn(size).to(device, dtype)
    assert_near(rms_norm(heads, weight, 1e-6), plain_norm(heads, weight, 1e-6))


@pytest.mark.parametrize(("num_rows", "size"), SHAPES.values(), ids=SHAPES.keys())
def test_add_rms_norm_keeps_the_rounded_sum(num_rows: int, size: int, dtype: torch.dtype, device: torch.device) -> None:
    x = torch.randn(num_rows, size + 9).to(device, dtype)[:, 4 : size + 4]
    residual, weight = torch.randn(num_rows, size).to(device, dtype), torch.randn(size).to(device, dtype)
    expected = residual.double() + x.double()
    out = add_rms_norm(x, residual, weight, 1e-5)
    assert_near(residual, expected)
    assert_near(out, plain_norm(residual, weight, 1e-5))


@pytest.mark.parametrize(("num_rows", "size"), SHAPES.values(), ids=SHAPES.keys())
@pytest.mark.parametrize(
    ("gated", "activation"),
    [
        pytest.param(silu_and_mul, functional.silu, id="silu"),
        pytest.param(gelu_and_mul, lambda x: functional.gelu(x, approximate="tanh"), id="gelu"),
    ],
)
def test_gated_activations_equal_torch(
    gated: Callable[..., torch.Tensor],
    activation: Callable[[torch.Tensor], torch.Tensor],
    num_rows: int,
    size: int,
    dtype: torch.dtype,
    device: torch.device,
) -> None:
    gate_up = torch.randn(num_rows, 2 * size + 5) * 8
    gate_up[:, 1] = 200
    gate_up[:, 2] = -200
    gate_up = gate_up.to(device, dtype)[:, : 2 * size]
    out = gated(gate_up)
    assert out.is_contiguous()
    assert_near(out, activation(gate_up[:, :size].double()) * gate_up[:, size:].double())
    given = torch.full_like(out, torch.nan)
    assert gated(gate_up, out=given) is given
    assert torch.equal(given, out)


@pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")
@pytest.mark.parametrize("bad", [torch.nan, torch.inf], ids=["nan", "inf"])
@pytest.mark.parametrize("name", ["rms_norm", "silu_and_mul", "gelu_and_mul"])
def test_non_finite_row_does_not_affect_others(name: str, bad: float, device: torch.device) -> None:
    x = torch.randn(20, 64, device=device)
    x[1, 3] = bad
    out = {
        "rms_norm": lambda: rms_norm(x, torch.ones(64, device=device), 1e-6),
        "silu_and_mul": lambda: silu_and_mul(x),
        "gelu_and_mul": lambda: gelu_and_mul(x),
    }[name]()
    is_finite = out.isfinite().all(1)
    assert not is_finite[1]
    is_finite[1] = True
    assert is_finite.all()


@pytest.mark.campaign
@pytest.mark.parametrize(("num_rows", "hidden", "inner"), [(64, 4096, 14336), (513, 2304, 9216)])
def test_sizes_of_real_models_equal_torch(
    num_rows: int, hidden: int, inner: int, dtype: torch.dtype, device: torch.device
) -> None:
    x, weight = torch.randn(num_rows, hidden).to(device, dtype), torch.randn(hidden).to(device, dtype)
    assert_near(rms_norm(x, weight, 1e-5), plain_norm(x, weight, 1e-5))
    gate_up = torch.randn(num_rows, 2 * inner).to(device, dtype)
    expected = functional.silu(gate_up[:, :inner].double()) * gate_up[:, inner:].double()
    assert_near(silu_and_mul(gate_up), expected)
