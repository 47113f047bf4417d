"""Adapters on experts, compared with plain loops over tokens, experts and modules."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from loramux.kernels.layout import LinearShape, PageGeometry
from loramux.kernels.routing_spec import RoutingSpec
from loramux.kernels.tables import LoraCall, ModuleGroup
from tests.kernels.test_lora import segments_of

GEOMETRY = PageGeometry(num_layers=2, num_kv_heads=2, head_dim=16, kv_itemsize=4, adapter_itemsize=4)
NUM_SLOTS, NUM_EXPERTS, TOP_K = 4, 5, 3
SIZE, INNER = 40, 24
HIGH_RANK = 100
PARTS = (LinearShape("gate_up", SIZE, 2 * INNER), LinearShape("gate", SIZE, INNER), LinearShape("up", SIZE, INNER))
GATE_UP = ModuleGroup((1, 2, 3), SIZE, (2 * INNER, INNER, INNER), (0, 0, INNER), expert_stride=4)
DOWN = ModuleGroup((4,), INNER, (SIZE,), (0,), expert_stride=4)
MODULES = [LinearShape("other", 72, 72), *(NUM_EXPERTS * [*PARTS, LinearShape("down", INNER, SIZE)])]

SLOTS = {
    "empty": [],
    "all-base": [-1] * 3,
    "one-row": [2],
    "mixed": [-1, 0, 0, 3, -1, 3, 1, 1, 1, 2, -1],
    "long-segments": [1] * 30 + [-1] * 4 + [1] * 5 + [2] * 20,
}


def random_ranks() -> np.ndarray[Any, np.dtype[np.int32]]:
    """Ranks of adapters that have gate and up either separate or stacked, and lack one of the experts."""
    ranks = np.random.default_rng(3).choice([0, 1, 31, HIGH_RANK], (NUM_SLOTS, 2, len(MODULES))).astype(np.int32)
    by_expert = ranks[:, :, 1:].reshape(NUM_SLOTS, 2, NUM_EXPERTS, 4)
    by_expert[::2, ..., 0] = 0
    by_expert[1::2, ..., 1:3] = 0
    by_expert[:, :, 2] = 0
    return ranks


@pytest.mark.parametrize("slots", SLOTS.values(), ids=SLOTS)
def test_each_pair_gets_the_adapter_of_its_row_and_expert(
    slots: list[int], make_kernels: Callable[..., Any], make_adapter_pool: Callable[..., Any]
) -> None:
    adapters = make_adapter_pool(MODULES, random_ranks(), GEOMETRY, torch.float32)
    kernels = make_kernels(adapters.pool)
    num_rows = len(slots)
    routing = kernels.route(torch.randn(num_rows, NUM_EXPERTS), RoutingSpec(NUM_EXPERTS, TOP_K, True))
    pairs = kernels.adapter_pairs(
        routing, torch.tensor(slots, dtype=torch.int32), segments_of(slots, kernels, HIGH_RANK)
    )
    x = torch.randn(num_rows, SIZE + 3)[:, 2 : SIZE + 2]
    layer, experts = 1, routing.experts.flatten().tolist()
    inner = torch.randn(len(experts), INNER)
    for group, rows, per_row in ((GATE_UP, x, TOP_K), (DOWN, inner, 1)):
        y = torch.randn(len(experts), group.total_out)
        before = y.clone()
        kernels.lora_add(rows, LoraCall(layer, group, adapters.tables, pairs), y)
        for pair, expert in enumerate(experts):
            slot = slots[pair // TOP_K]
            expected = before[pair].double()
            for i, first in enumerate(group.modules if slot >= 0 else ()):
                at = (slot, layer, first + expert * group.expert_stride)
                columns = slice(group.out_offsets[i], group.out_offsets[i] + group.out_features[i])
                v = adapters.a[at].double() @ rows[pair // per_row].double()
                total = expected[columns] + adapters.tables.scale[at].double() * (v @ adapters.b[at].double())
                expected[columns] = adapters.output(*at, total)
            torch.testing.assert_close(y[pair].double(), expected, rtol=1e-4, atol=1e-3)
            if slot < 0 or expert == 2:
                assert torch.equal(y[pair], before[pair])


def test_pairs_are_grouped_by_adapter_and_expert(
    make_kernels: Callable[..., Any], make_adapter_pool: Callable[..., Any]
) -> None:
    slots = SLOTS["long-segments"]
    adapters = make_adapter_pool(MODULES, random_ranks(), GEOMETRY, torch.float32)
    kernels = make_kernels(adapters.pool)
    routing = kernels.route(torch.randn(len(slots), NUM_EXPERTS), RoutingSpec(NUM_EXPERTS, TOP_K, True))
    pairs = kernels.adapter_pairs(
        routing, torch.tensor(slots, dtype=torch.int32), segments_of(slots, kernels, HIGH_RANK)
    )
    of_pair, found = routing.experts.flatten().tolist(), []
    for index, (slot, expert) in enumerate(zip(pairs.slots.tolist(), pairs.experts.tolist(), strict=True)):
        if slot >= 0:
            listed = pairs.rows[pairs.starts[index] : pairs.starts[index + 1]].tolist()
            assert 0 < len(listed) <= kernels.segment_rows
            assert {(slots[pair // TOP_K], of_pair[pair]) for pair in listed} == {(slot, expert)}
            found += listed
    assert sorted(found) == [pair for pair in range(len(of_pair)) if slots[pair // TOP_K] >= 0]
