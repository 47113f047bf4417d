from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from loramux.kernels.layout import AFFINE, NO_AFFINE, LinearShape, PageGeometry
from loramux.kernels.segments import build_segments
from loramux.kernels.tables import LoraCall, ModuleGroup, Segments

GEOMETRY = {
    torch.float32: PageGeometry(num_layers=2, num_kv_heads=2, head_dim=16, kv_itemsize=4, adapter_itemsize=4),
    torch.bfloat16: PageGeometry(num_layers=2, num_kv_heads=3, head_dim=40, kv_itemsize=2, adapter_itemsize=2),
    torch.uint8: PageGeometry(num_layers=2, num_kv_heads=3, head_dim=8, kv_itemsize=4, adapter_itemsize=1),
}
"""Pages of 1,024, 3,840 or 3,072 elements. The last two numbers are not powers of two."""

NUM_SLOTS = 5
RANKS = (0, 1, 3, 31, 64, 128)

SLOTS = {
    "empty": [],
    "all-base": [-1] * 6,
    "one-row": [2],
    "one-base-row": [-1],
    "one-adapter-40-rows": [1] * 40,
    "one-adapter-100-rows": [1] * 100,
    "each-its-own": [4, 0, 3, 1, 2],
    "mixed": [-1, 0, 2, 2, -1, 4, 0, 0, 1, -1, 3, 2, 2],
}

OUT_FEATURES = {"one": (96,), "three": (64, 63, 200)}


def group_of(in_features: int, out_features: Sequence[int]) -> ModuleGroup:
    offsets = np.concatenate([[0], np.cumsum(out_features)])[:-1].tolist()
    modules = tuple(range(1, len(out_features) + 1))
    return ModuleGroup(modules, in_features, tuple(out_features), tuple(offsets))


def segments_of(slots: Sequence[int], kernels: Any, max_rank: int) -> Segments:
    segments = build_segments(np.array(slots, np.int32), kernels.segment_rows, max_rank)
    device = torch.get_default_device()
    return Segments(segments.rows.to(device), segments.starts.to(device), segments.slots.to(device), segments.max_rank)


def poisoned_planes(kernels: Any, call: LoraCall, num_tokens: int) -> torch.Tensor:
    return kernels.lora_planes(call, num_tokens).fill_(torch.nan)


def summed(planes: torch.Tensor) -> torch.Tensor:
    """The planes as `[T, modules, max_rank]`. If the device splits the sum, its parts are added."""
    return planes.sum(0) if planes.dim() == 4 else planes


def test_large_activations_yield_finite_products(
    adapter_dtype: torch.dtype, make_cpu_kernels: Callable[..., Any], make_adapter_pool: Callable[..., Any]
) -> None:
    """The outputs beyond a multiple of 16 have code of their own."""
    group = group_of(128, (104,))
    modules = [LinearShape("other", 72, 72), LinearShape("m", 128, 104)]
    ranks = np.full((1, 2, 2), 4, np.int32)
    adapters = make_adapter_pool(modules, ranks, GEOMETRY[adapter_dtype], adapter_dtype)
    kernels = make_cpu_kernels(adapters.pool)
    call = LoraCall(0, group, adapters.tables, segments_of([0] * 5, kernels, max_rank=4))
    x, y = 1e5 * torch.randn(5, 128), torch.zeros(5, 104)
    kernels.lora_add(x, call, y)
    a, b = adapters.a[0, 0, 1].double(), adapters.b[0, 0, 1].double()
    expected = adapters.tables.scale[0, 0, 1].double() * (x.double() @ a.T @ b)
    torch.testing.assert_close(y.double(), expected, rtol=1e-3, atol=1e-4 * expected.abs().max().item())


@pytest.mark.parametrize("slots", SLOTS.values(), ids=SLOTS.keys())
@pytest.mark.parametrize("out_features", OUT_FEATURES.values(), ids=OUT_FEATURES.keys())
@pytest.mark.parametrize("in_features", [63, 128, 1000], ids=lambda n: f"in-{n}")
def test_equals_dense_matrices(
    in_features: int,
    out_features: tuple[int, ...],
    slots: list[int],
    adapter_dtype: torch.dtype,
    make_kernels: Callable[..., Any],
    make_adapter_pool: Callable[..., Any],
) -> None:
    rng = np.random.default_rng(in_features + len(slots))
    group = group_of(in_features, out_features)
    modules = [LinearShape("other", 72, 72), *(LinearShape("m", in_features, out) for out in out_features)]
    ranks = rng.choice(RANKS, (NUM_SLOTS, 2, len(modules))).astype(np.int32)
    adapters = make_adapter_pool(modules, ranks, GEOMETRY[adapter_dtype], adapter_dtype)
    kernels = make_kernels(adapters.pool)
    segments = segments_of(slots, kernels, max_rank=max(RANKS))
    num_rows = len(slots)
    layer = 1

    x = torch.randn(num_rows, in_features + 5)[:, 2 : in_features + 2]
    call = LoraCall(layer, group, adapters.tables, segments)
    planes = poisoned_planes(kernels, call, num_rows)
    kernels.lora_shrink(x, call, planes)
    y_wide = torch.randn(num_rows, group.total_out + 3)
    before = y_wide.clone()
    y = y_wide[:, 1 : 1 + group.total_out]
    kernels.lora_expand(planes, call, y)

    assert planes.shape[-3:] == (num_rows, len(group.modules), max(RANKS))
    v_all = summed(planes)
    for slot in set(slots):
        rows = [row for row, one in enumerate(slots) if one == slot]
        if slot < 0:
            assert planes[..., rows, :, :].isnan().all()
            assert torch.equal(y_wide[rows], before[rows])
            continue
        for i, module in enumerate(group.modules):
            a, b = adapters.a[slot, layer, module], adapters.b[slot, layer, module]
            v = x[rows].double() @ a.double().T
            torch.testing.assert_close(v_all[rows, i, : a.shape[0]].double(), v, rtol=1e-4, atol=1e-4)
            assert planes[..., rows, i, a.shape[0] :].isnan().all()
            columns = slice(1 + group.out_offsets[i], 1 + group.out_offsets[i] + group.out_features[i])
            delta = adapters.tables.scale[slot, layer, module].double() * (v @ b.double())
            expected = adapters.output(slot, layer, module, before[rows][:, columns] + delta)
            torch.testing.assert_close(y_wide[rows][:, columns].double(), expected, rtol=1e-4, atol=1e-3)
            if a.shape[0] == 0:
                assert torch.equal(y_wide[rows][:, columns], before[rows][:, columns])
    assert torch.equal(y_wide[:, [0, -2, -1]], before[:, [0, -2, -1]])


@pytest.mark.parametrize("slots", SLOTS.values(), ids=SLOTS.keys())
def test_lora_add_equals_shrink_then_expand(
    slots: list[int],
    adapter_dtype: torch.dtype,
    make_kernels: Callable[..., Any],
    make_adapter_pool: Callable[..., Any],
) -> None:
    """The results are bitwise equal, even if an adapter changes the group in only one layer."""
    group = group_of(128, OUT_FEATURES["three"])
    modules = [LinearShape("other", 72, 72), *(LinearShape("m", 128, out) for out in OUT_FEATURES["three"])]
    ranks = np.random.default_rng(len(slots)).choice(RANKS, (NUM_SLOTS, 2, len(modules))).astype(np.int32)
    ranks[:3, 0, 1:] = 0
    adapters = make_adapter_pool(modules, ranks, GEOMETRY[adapter_dtype], adapter_dtype)
    kernels = make_kernels(adapters.pool)
    segments = segments_of(slots, kernels, max_rank=max(RANKS))
    x, before = torch.randn(len(slots), 128), torch.randn(len(slots), group.total_out)
    for layer in range(2):
        call = LoraCall(layer, group, adapters.tables, segments)
        planes, expected, found = poisoned_planes(kernels, call, len(slots)), before.clone(), before.clone()
        kernels.lora_shrink(x, call, planes)
        kernels.lora_expand(planes, call, expected)
        poisoned_planes(kernels, call, len(slots))
        kernels.lora_add(x, call, found)
        assert torch.equal(found, expected)


@pytest.mark.parametrize("slots", SLOTS.values(), ids=SLOTS.keys())
def test_delta_equals_lora_add_on_zeros(
    slots: list[int],
    adapter_dtype: torch.dtype,
    make_kernels: Callable[..., Any],
    make_adapter_pool: Callable[..., Any],
) -> None:
    """Rows without an adapter and modules that an adapter does not change become 0, whatever the memory contained."""
    group = group_of(128, OUT_FEATURES["three"])
    modules = [LinearShape("other", 72, 72), *(LinearShape("m", 128, out) for out in OUT_FEATURES["three"])]
    ranks = np.random.default_rng(len(slots)).choice(RANKS, (NUM_SLOTS, 2, len(modules))).astype(np.int32)
    adapters = make_adapter_pool(modules, ranks, GEOMETRY[adapter_dtype], adapter_dtype)
    adapters.tables.off[..., AFFINE] = NO_AFFINE
    kernels = make_kernels(adapters.pool)
    call = LoraCall(1, group, adapters.tables, segments_of(slots, kernels, max_rank=max(RANKS)))
    x = torch.randn(len(slots), 128)
    expected, found = torch.zeros(len(slots), group.total_out), torch.full((len(slots), group.total_out), torch.nan)
    kernels.lora_add(x, call, expected)
    kernels.lora_delta(x, call, torch.tensor(slots, dtype=torch.int32), found)
    assert torch.equal(found, expected)


@pytest.mark.parametrize("slots", [[2], SLOTS["mixed"]], ids=["one-row", "mixed"])
def test_linear_equals_a_product_then_lora_add(
    slots: list[int],
    adapter_dtype: torch.dtype,
    make_kernels: Callable[..., Any],
    make_adapter_pool: Callable[..., Any],
) -> None:
    group = group_of(128, OUT_FEATURES["three"])
    modules = [LinearShape("other", 72, 72), *(LinearShape("m", 128, out) for out in OUT_FEATURES["three"])]
    ranks = np.random.default_rng(len(slots)).choice(RANKS, (NUM_SLOTS, 2, len(modules))).astype(np.int32)
    adapters = make_adapter_pool(modules, ranks, GEOMETRY[adapter_dtype], adapter_dtype)
    kernels = make_kernels(adapters.pool)
    listed = torch.tensor(sorted({slot for slot in slots if slot >= 0}), dtype=torch.int32)
    segments = replace(segments_of(slots, kernels, max_rank=max(RANKS)), adapters=listed)
    call = LoraCall(1, group, adapters.tables, segments)
    x, weight, bias = torch.randn(len(slots), 128), torch.randn(group.total_out, 128), torch.randn(group.total_out)
    expected = torch.nn.functional.linear(x, weight, bias)
    kernels.lora_add(x, call, expected)
    found = kernels.lora_linear(x, weight, bias, call, torch.tensor(slots, dtype=torch.int32))
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-2)


def test_changed_ranks_apply_in_the_next_step(
    make_kernels: Callable[..., Any], make_adapter_pool: Callable[..., Any]
) -> None:
    ranks = np.array([[[4, 0]] * 2, [[4, 4]] * 2], np.int32)
    adapters = make_adapter_pool(
        [LinearShape("other", 128, 128), LinearShape("m", 128, 128)], ranks, GEOMETRY[torch.float32], torch.float32
    )
    kernels = make_kernels(adapters.pool)
    group = group_of(128, (128,))
    x = torch.randn(1, 128)

    def added(slot: int) -> torch.Tensor:
        y = torch.zeros(1, 128)
        call = LoraCall(0, group, adapters.tables, segments_of([slot], kernels, max_rank=4))
        kernels.lora_add(x, call, y)
        return y[0]

    assert not added(0).any()
    part = adapters.tables.scale[1, 0, 1] * (adapters.a[1, 0, 1] @ x[0]) @ adapters.b[1, 0, 1]
    part = adapters.output(1, 0, 1, part)
    torch.testing.assert_close(added(1), part, rtol=1e-4, atol=1e-4)
    for table in (adapters.tables.page_table, adapters.tables.off, adapters.tables.rank, adapters.tables.scale):
        table[0] = table[1]
    torch.testing.assert_close(added(0), part, rtol=1e-4, atol=1e-4)


# The interpreter multiplies matrices with numpy, which emits warnings.
@pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")
@pytest.mark.parametrize("slot", [0, 1], ids=["finite-neighbour", "not-finite"])
def test_non_finite_row_affects_only_itself(
    slot: int, make_kernels: Callable[..., Any], make_adapter_pool: Callable[..., Any]
) -> None:
    geometry = GEOMETRY[torch.float32]
    adapters = make_adapter_pool([LinearShape("m", 128, 128)], np.full((2, 2, 1), 4, np.int32), geometry, torch.float32)
    kernels = make_kernels(adapters.pool)
    group = ModuleGroup((0,), 128, (128,), (0,))
    x = torch.randn(2, 128)
    x[1, 7] = torch.inf
    segments = segments_of([0, slot], kernels, max_rank=4)
    call = LoraCall(0, group, adapters.tables, segments)
    planes, y = poisoned_planes(kernels, call, 2), torch.zeros(2, 128)
    kernels.lora_shrink(x, call, planes)
    kernels.lora_expand(planes, call, y)
    assert y[0].isfinite().all()
    assert not y[1].isfinite().any()


def test_tables_can_be_rewritten_between_steps(
    make_kernels: Callable[..., Any], make_adapter_pool: Callable[..., Any]
) -> None:
    adapters = make_adapter_pool(
        [LinearShape("m", 128, 128)], np.full((2, 2, 1), 4, np.int32), GEOMETRY[torch.float32], torch.float32
    )
    kernels = make_kernels(adapters.pool)
    group = ModuleGroup((0,), 128, (128,), (0,))
    x, segments = torch.randn(1, 128), segments_of([0], kernels, max_rank=4)
    call = LoraCall(0, group, adapters.tables, segments)
    planes = poisoned_planes(kernels, call, 1)
    kernels.lora_shrink(x, call, planes)
    adapters.tables.page_table[0] = adapters.tables.page_table[1]
    kernels.lora_shrink(x, call, planes)
    torch.testing.assert_close(summed(planes)[0, 0], adapters.a[1, 0, 0] @ x[0], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("in_features", "out_features"), [(63, 203), (1000, 203), (63, 643)], ids=["few-inputs", "many-inputs", "chunks"]
)
def test_row_is_bitwise_independent_of_rows_with_its_adapter(
    in_features: int, out_features: int, adapter_dtype: torch.dtype, make_adapter_pool: Callable[..., Any]
) -> None:
    """Each number of rows has code of its own. 643 outputs are several chunks in several pages."""
    from loramux.kernels.cpu.kernels import CpuKernels

    group = group_of(in_features, (out_features,))
    modules = [LinearShape("other", 72, 72), LinearShape("m", in_features, out_features)]
    adapters = make_adapter_pool(modules, np.full((1, 2, 2), 9, np.int32), GEOMETRY[adapter_dtype], adapter_dtype)
    kernels = CpuKernels(adapters.pool)
    x = torch.randn(9, in_features)

    def added(begin: int, end: int) -> torch.Tensor:
        segments = segments_of([0] * (end - begin), kernels, max_rank=9)
        call = LoraCall(1, group, adapters.tables, segments)
        planes, y = poisoned_planes(kernels, call, end - begin), torch.zeros(end - begin, out_features)
        kernels.lora_shrink(x[begin:end], call, planes)
        kernels.lora_expand(planes, call, y)
        return y

    whole = added(0, 9)
    a, b = adapters.a[0, 1, 1].double(), adapters.b[0, 1, 1].double()
    expected = adapters.tables.scale[0, 1, 1].double() * (x.double() @ a.T @ b)
    torch.testing.assert_close(whole.double(), expected, rtol=1e-4, atol=1e-3)
    for begin in range(9):
        for end in range(begin + 1, 10):
            assert torch.equal(added(begin, end), whole[begin:end])
