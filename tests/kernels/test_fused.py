from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.nn import functional

from loramux.kernels.cpu.fused import SERIAL_WORK
from loramux.kernels.cpu.kernels import CpuKernels
from loramux.kernels.layout import PageGeometry
from loramux.kernels.tables import PoolViews


@pytest.fixture
def kernels(make_kernels: Callable[..., Any], make_poisoned_pool: Callable[..., PoolViews]) -> Any:
    return make_kernels(make_poisoned_pool(1, PageGeometry(1, 1, 8, 4, 4), torch.float32))


SHAPES = {"no-rows": (0, 64), "one-row": (1, 63), "odd": (7, 1000), "on-all-threads": (50, 1027)}


@pytest.mark.parametrize(("num_rows", "size"), SHAPES.values(), ids=SHAPES.keys())
def test_rms_norm_equals_torch(kernels: Any, num_rows: int, size: int) -> None:
    x, weight = torch.randn(num_rows, size + 9)[:, 4 : size + 4] * 3, torch.randn(size)
    out = kernels.rms_norm(x, weight, 1e-5)
    torch.testing.assert_close(out, functional.rms_norm(x, (size,), weight, 1e-5), rtol=1e-5, atol=1e-5)


def test_rms_norm_of_heads_inside_wider_rows_equals_torch(kernels: Any) -> None:
    heads = torch.randn(5, 100)[:, 10:90].unflatten(1, (5, 16))
    weight = torch.randn(16)
    out = kernels.rms_norm(heads, weight, 1e-6)
    torch.testing.assert_close(out, functional.rms_norm(heads, (16,), weight, 1e-6), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("num_rows", "size"), SHAPES.values(), ids=SHAPES.keys())
def test_add_rms_norm_equals_add_then_norm_bitwise(kernels: Any, num_rows: int, size: int) -> None:
    x, weight = torch.randn(num_rows, size + 9)[:, 4 : size + 4] * 3, torch.randn(size)
    residual = torch.randn(num_rows, size)
    expected = residual + x
    out = kernels.add_rms_norm(x, residual, weight, 1e-5)
    assert torch.equal(residual, expected)
    # On a GPU, alignment can change the order in which a row's squares are summed.
    tolerance = 0 if torch.get_default_device().type == "cpu" else 1e-6
    torch.testing.assert_close(out, kernels.rms_norm(expected, weight, 1e-5), rtol=tolerance, atol=tolerance)


ROW_KERNELS: dict[str, Callable[[CpuKernels, torch.Tensor], torch.Tensor]] = {
    "rms_norm": lambda kernels, x: kernels.rms_norm(x, torch.ones(x.shape[1]), 1e-5),
    "add_rms_norm": lambda kernels, x: kernels.add_rms_norm(x, x.flip(1), torch.ones(x.shape[1]), 1e-5),
    "silu_and_mul": lambda kernels, x: kernels.silu_and_mul(x),
    "gelu_and_mul": lambda kernels, x: kernels.gelu_and_mul(x),
    "clamped_silu_and_mul": lambda kernels, x: kernels.clamped_silu_and_mul(x, 1.7, 7.0),
}


@pytest.mark.parametrize("size", [30, 80, 126, 1000])
@pytest.mark.parametrize("apply", ROW_KERNELS.values(), ids=ROW_KERNELS)
def test_row_is_bitwise_independent_of_the_number_of_rows(
    apply: Callable[[CpuKernels, torch.Tensor], torch.Tensor], size: int, make_poisoned_pool: Callable[..., PoolViews]
) -> None:
    """All threads share many rows, and one thread computes a single row."""
    kernels = CpuKernels(make_poisoned_pool(1, PageGeometry(1, 1, 8, 4, 4), torch.float32))
    x = torch.randn(2 * SERIAL_WORK // size + 1, size)
    assert torch.equal(apply(kernels, x), torch.cat([apply(kernels, row) for row in x.split(1)]))


@pytest.mark.parametrize(("num_rows", "size"), SHAPES.values(), ids=SHAPES.keys())
@pytest.mark.parametrize(
    ("name", "activation"),
    [
        pytest.param("silu_and_mul", functional.silu, id="silu"),
        pytest.param("gelu_and_mul", lambda x: functional.gelu(x, approximate="tanh"), id="gelu"),
    ],
)
def test_gated_activations_equal_torch(
    kernels: Any, name: str, activation: Callable[[torch.Tensor], torch.Tensor], num_rows: int, size: int
) -> None:
    gate_up = torch.randn(num_rows, 2 * size) * 8
    gate_up[:, 1] = 200
    gate_up[:, 2] = -200
    # In float32, torch's own tanh form loses the tail of a negative gate, because it subtracts numbers near 1.
    expected = activation(gate_up[:, :size].double()) * gate_up[:, size:].double()
    torch.testing.assert_close(getattr(kernels, name)(gate_up).double(), expected, rtol=1e-5, atol=4e-6)


@pytest.mark.parametrize(("num_rows", "size"), SHAPES.values(), ids=SHAPES.keys())
def test_a_clamped_gate_equals_torch(kernels: Any, num_rows: int, size: int) -> None:
    gate_up = torch.randn(num_rows, 2 * size + 3)[:, : 2 * size] * 6
    gate, up = gate_up.double().chunk(2, -1)
    gate, up = gate.clamp(max=4.0), up.clamp(-4.0, 4.0)
    expected = gate * torch.sigmoid(1.702 * gate) * (up + 1)
    found = kernels.clamped_silu_and_mul(gate_up, 1.702, 4.0)
    torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=4e-6)


@pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")
def test_a_clamp_keeps_nan(kernels: Any) -> None:
    gate_up = torch.ones(1, 16)
    gate_up[0, [2, 13]] = torch.nan
    assert kernels.clamped_silu_and_mul(gate_up, 1.0, 7.0).isnan().nonzero()[:, 1].tolist() == [2, 5]


@pytest.mark.parametrize("rotated", [32, 12], ids=["whole-head", "part-of-head"])
@pytest.mark.parametrize("num_rows", [0, 1, 9, 500], ids=lambda n: f"{n}-rows")
def test_rotary_rotates_each_pair_in_place(
    num_rows: int,
    rotated: int,
    make_cpu_kernels: Callable[..., Any],
    make_poisoned_pool: Callable[..., PoolViews],
) -> None:
    """GPU kernels rotate while they store K and V. `gpu/test_attention.py` tests them."""
    kernels = make_cpu_kernels(make_poisoned_pool(1, PageGeometry(1, 1, 8, 4, 4), torch.float32))
    qkv = torch.randn(num_rows, 8 * 32)
    before = qkv.clone()
    q, k = qkv[:, : 4 * 32].unflatten(1, (4, 32)), qkv[:, 4 * 32 : 6 * 32].unflatten(1, (2, 32))
    angle = torch.randn(num_rows, rotated // 2)
    kernels.rotary(q, k, angle.cos(), angle.sin())

    heads = before[:, : 6 * 32].unflatten(1, (6, 32))
    pairs = torch.complex(heads[..., : rotated // 2], heads[..., rotated // 2 : rotated])
    turned = pairs * torch.polar(torch.ones_like(angle), angle)[:, None]
    expected = torch.cat([turned.real, turned.imag, heads[..., rotated:]], -1)
    torch.testing.assert_close(qkv[:, : 6 * 32].unflatten(1, (6, 32)), expected, rtol=1e-5, atol=1e-5)
    assert torch.equal(qkv[:, 6 * 32 :], before[:, 6 * 32 :])


@pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")
@pytest.mark.parametrize("name", ["rms_norm", "add_rms_norm", "silu_and_mul", "gelu_and_mul"])
@pytest.mark.parametrize("bad", [torch.nan, torch.inf], ids=["nan", "inf"])
def test_non_finite_row_does_not_affect_others(kernels: Any, name: str, bad: float) -> None:
    x = torch.randn(3, 64)
    x[1, 3] = bad
    out = {
        "rms_norm": lambda: kernels.rms_norm(x, torch.ones(64), 1e-6),
        "add_rms_norm": lambda: kernels.add_rms_norm(x, torch.ones(3, 64), torch.ones(64), 1e-6),
        "silu_and_mul": lambda: kernels.silu_and_mul(x),
        "gelu_and_mul": lambda: kernels.gelu_and_mul(x),
    }[name]()
    assert out[[0, 2]].isfinite().all()
    assert not out[1].isfinite().all()
