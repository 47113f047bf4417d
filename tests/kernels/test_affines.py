"""Affines without a LoRA, compared with dense gains and shifts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from loramux.kernels.layout import LinearShape, PageGeometry
from loramux.kernels.tables import LoraCall, ModuleGroup
from tests.kernels.test_lora import segments_of

GEOMETRY = PageGeometry(num_layers=2, num_kv_heads=2, head_dim=16, kv_itemsize=4, adapter_itemsize=4)
SLOTS = {
    "empty": [],
    "all-base": [-1] * 3,
    "mixed": [-1, 0, 1, 3, -1, 3, 1, 1, 1, 2, -1],
    "long-segments": [1] * 30 + [-1] * 4 + [3] * 70 + [2] * 20,
}


@pytest.mark.parametrize("width", [24, 160], ids=str)
@pytest.mark.parametrize("slots", SLOTS.values(), ids=SLOTS)
def test_rows_of_adapters_with_the_module_are_scaled_and_shifted(
    slots: list[int], width: int, make_kernels: Callable[..., Any], make_adapter_pool: Callable[..., Any]
) -> None:
    """Adapters in odd slots have affines. The adapter in slot 3 lacks the module in layer 0."""
    ranks = np.ones((4, 2, 2), np.int32)
    ranks[3, 0, 1] = 0
    adapters = make_adapter_pool(
        [LinearShape("other", 40, 72), LinearShape("norm", width, width)], ranks, GEOMETRY, torch.float32
    )
    kernels = make_kernels(adapters.pool)
    group = ModuleGroup((1,), width, (width,), (0,))
    for layer in (0, 1):
        y = torch.randn(len(slots), width + 3)[:, :width]
        expected = [
            before if slot < 0 or not ranks[slot, layer, 1] else adapters.output(slot, layer, 1, before)
            for slot, before in zip(slots, y.clone(), strict=True)
        ]
        kernels.lora_affine(LoraCall(layer, group, adapters.tables, segments_of(slots, kernels, 1)), y)
        for slot, after, wanted in zip(slots, y, expected, strict=True):
            if slot in (1, 3):
                torch.testing.assert_close(after, wanted, rtol=1e-6, atol=1e-6)
            else:
                assert torch.equal(after, wanted)
