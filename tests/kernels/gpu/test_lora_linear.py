from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch

from loramux.kernels.layout import AFFINE, NO_AFFINE, LinearShape
from loramux.kernels.tables import LoraCall, Segments
from tests.kernels.gpu.interpreted import DEVICE, FOR_GPUS, import_kernels, run_interpreted
from tests.kernels.gpu.test_lora import NUM_SLOTS, TOLERANCE, geometry_of, group_of, on_device, padded_segments

LAYER = 1
MIXED = [-1, 0, 2, 2, -1, 4, 0, 0, 1, -1, 3, 2, 2]
SLOTS = {
    "one-row": [2],
    "one-base-row": [-1],
    "mixed": MIXED,
    "one-adapter-40-rows": [1] * 40,
    "most-rows": [slot for slot in (3, -1, 4, 0, 1) for _ in range(13)] + [2] * 3,
    "all-rows": [slot for slot in (3, -1, 4, 0, 1) for _ in range(25)] + [2] * 3,
}


@pytest.fixture(scope="module")
def modules() -> dict[str, ModuleType]:
    names = ("shrink", "lora_linear")
    return dict(zip(names, import_kernels(*names), strict=True))


@pytest.fixture
def multiply(modules: dict[str, ModuleType], monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., torch.Tensor]]:
    """The kernel, over planes that are NaN outside of what the shrink writes. Other scratch memory is NaN too."""
    run_interpreted(monkeypatch)
    shrink, linear = modules["shrink"], modules["lora_linear"]
    counters = torch.zeros(linear.MAX_COUNTERS, dtype=torch.int32, device=DEVICE)

    def run(
        adapters: Any, call: LoraCall, slots: Sequence[int], x: torch.Tensor, weight: torch.Tensor,
        bias: torch.Tensor | None, num_planes: int, num_splits: int, **changes: int,
    ) -> torch.Tensor:  # fmt: skip
        planes = torch.full(
            (num_planes, len(slots) + 3, len(call.group.modules), call.segments.max_rank), torch.nan, device=DEVICE
        )
        E = adapters.pool.geometry.adapter_elements
        plan = linear.linear_plan(call.group, E, len(slots), x.element_size(), 1, num_splits)
        shrink.lora_shrink(adapters.pool, x, call, planes)
        y = linear.lora_linear(
            adapters.pool, x, weight, bias, planes, call, torch.tensor(slots, dtype=torch.int32).to(DEVICE),
            replace(plan, **changes), counters,
        )  # fmt: skip
        assert not counters.any(), "the next launch counts from 0"
        return y

    torch.use_deterministic_algorithms(True)
    yield run
    torch.use_deterministic_algorithms(False)


def segments_of(slots: Sequence[int], max_rows: int, max_rank: int) -> Segments:
    """The batch's segments and adapters, both padded as in a captured graph. Adapters are in descending order."""
    adapters = sorted({slot for slot in slots if slot >= 0}, reverse=True)
    padded = torch.tensor(adapters + [-1] * 3, dtype=torch.int32).to(DEVICE)
    segments = padded_segments(slots, len(slots) + 1, max_rows)
    return replace(segments, max_rank=max_rank, adapters=padded)


def run_case(
    multiply: Callable[..., torch.Tensor],
    make_adapter_pool: Callable[..., Any],
    dtype: torch.dtype,
    slots: Sequence[int],
    ranks: Sequence[int],
    in_features: int,
    out_features: Sequence[int],
    *,
    num_splits: int = 1,
    num_planes: int = 2,
    max_rows: int = 16,
    has_bias: bool = False,
    has_affines: bool = True,
    pool_dtype: torch.dtype | None = None,
) -> None:
    """`pool_dtype` is the dtype of the adapters, `dtype` unless it is given."""
    pool_dtype = pool_dtype or dtype
    rng = np.random.default_rng(in_features + len(slots))
    group = group_of(in_features, out_features)
    shapes = [LinearShape("other", 72, 72), *(LinearShape("m", in_features, out) for out in out_features)]
    table = rng.choice(ranks, (NUM_SLOTS, 2, len(shapes))).astype(np.int32)
    adapters = make_adapter_pool(shapes, table, geometry_of(pool_dtype), pool_dtype)
    if not has_affines:
        adapters.tables.off[..., AFFINE] = NO_AFFINE
    # The scale of a module without ranks is undefined.
    adapters.tables.scale[adapters.tables.rank == 0] = torch.inf
    adapters = on_device(adapters)
    x = torch.full((len(slots), in_features + 5), torch.nan)
    x[:, 2:-3] = torch.randn(len(slots), in_features)
    x = x.to(DEVICE, dtype)[:, 2:-3]
    weight = torch.randn(group.total_out, in_features).to(DEVICE, dtype)
    bias = torch.randn(group.total_out).to(DEVICE, dtype) if has_bias else None
    call = LoraCall(LAYER, group, adapters.tables, segments_of(slots, max_rows, max(*ranks, 1)))
    y = multiply(adapters, call, slots, x, weight, bias, num_planes, num_splits).cpu().double()

    expected = x.double().cpu() @ weight.double().cpu().T
    if bias is not None:
        expected += bias.double().cpu()
    scales = adapters.tables.scale.cpu().double()
    for t, slot in enumerate(slots):
        for i, module in enumerate(group.modules if slot >= 0 else ()):
            a, b = adapters.a[slot, LAYER, module].double(), adapters.b[slot, LAYER, module].double()
            if a.shape[0]:
                columns = slice(group.out_offsets[i], group.out_offsets[i] + group.out_features[i])
                total = expected[t, columns] + scales[slot, LAYER, module] * (a @ x[t].cpu().double() @ b)
                expected[t, columns] = adapters.output(slot, LAYER, module, total) if has_affines else total
    tolerance = TOLERANCE[dtype]
    torch.testing.assert_close(y, expected, rtol=tolerance, atol=2 * tolerance * float(expected.abs().max()) + 1e-3)


@pytest.mark.parametrize("num_splits", [1, 3])
@pytest.mark.parametrize(
    "slots",
    [pytest.param(slots, id=name, marks=FOR_GPUS if name == "all-rows" else ()) for name, slots in SLOTS.items()],
)
def test_equals_dense_matrices(
    slots: list[int], num_splits: int, multiply: Callable[..., torch.Tensor], make_adapter_pool: Callable[..., Any]
) -> None:
    run_case(
        multiply, make_adapter_pool, torch.float32, slots, (0, 1, 3, 16), 300, (64, 63, 200), num_splits=num_splits,
        has_bias=num_splits == 3, max_rows=16 if num_splits == 1 else 1,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("dtype", "slots", "ranks", "in_features", "num_splits", "num_planes"),
    [
        pytest.param(torch.float32, MIXED, (0, 1, 31, 64), 129, 2, 1, id="ranks-to-64"),
        pytest.param(torch.float16, MIXED, (0, 2, 16, 40), 500, 1, 3, id="float16"),
        pytest.param(torch.float32, MIXED, (5, 128, 256), 128, 1, 2, id="rank-256"),
    ],
)
def test_ranks_and_inputs_that_fill_no_tile(
    dtype: torch.dtype, slots: list[int], ranks: tuple[int, ...], in_features: int, num_splits: int, num_planes: int,
    multiply: Callable[..., torch.Tensor], make_adapter_pool: Callable[..., Any],
) -> None:  # fmt: skip
    run_case(
        multiply, make_adapter_pool, dtype, slots, ranks, in_features, (64, 63), num_splits=num_splits,
        num_planes=num_planes, has_affines=dtype is torch.float32,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("dtype", "ranks"),
    [
        pytest.param(torch.float32, (0, 1, 31, 64), id="float32"),
        pytest.param(torch.bfloat16, (0, 3, 16), id="bfloat16"),
    ],
)
def test_adapters_in_fp8(
    dtype: torch.dtype, ranks: tuple[int, ...], multiply: Callable[..., torch.Tensor],
    make_adapter_pool: Callable[..., Any],
) -> None:  # fmt: skip
    run_case(
        multiply, make_adapter_pool, dtype, MIXED, ranks, 129, (64, 63), num_splits=2, has_affines=False,
        pool_dtype=torch.uint8,
    )  # fmt: skip


# The interpreter multiplies matrices with numpy, which emits warnings.
@pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")
def test_row_without_a_finite_output_affects_only_itself(
    multiply: Callable[..., torch.Tensor], make_adapter_pool: Callable[..., Any]
) -> None:
    shapes, group = [LinearShape("other", 72, 72), LinearShape("m", 128, 96)], group_of(128, (96,))
    adapters = on_device(make_adapter_pool(shapes, np.full((2, 2, 2), 4, np.int32), geometry_of(torch.float32),
                                           torch.float32))  # fmt: skip
    x, weight = torch.randn(4, 128).to(DEVICE), torch.randn(96, 128).to(DEVICE)
    x[1, 7] = torch.inf
    slots = [0, 0, 1, -1]
    call = LoraCall(LAYER, group, adapters.tables, segments_of(slots, 16, 4))
    y = multiply(adapters, call, slots, x, weight, None, 2, 2)
    assert y[[0, 2, 3]].isfinite().all()
    assert not y[1].isfinite().any()
