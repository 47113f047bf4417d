from __future__ import annotations

import numpy as np
import pytest

from loramux.engine.layer_groups import ALL_GROUPS, NO_GROUPS, LayerGroups

SPLIT = ((0, 1, 2), (3,), (4, 5), (6,))
FUSED = ((0,), (1,), (2,), (3,))


@pytest.mark.parametrize(
    ("modules", "module_groups", "expected"),
    [
        pytest.param([], SPLIT, NO_GROUPS, id="none"),
        pytest.param([0, 2], SPLIT, LayerGroups.QKV, id="q-and-v"),
        pytest.param([3, 5], SPLIT, LayerGroups.O | LayerGroups.GATE_UP, id="o-and-up"),
        pytest.param([1, 3, 4, 6], SPLIT, ALL_GROUPS, id="one-of-each"),
        pytest.param([3], FUSED, LayerGroups.DOWN, id="fused-down"),
    ],
)
def test_changed_modules_map_to_their_groups(
    modules: list[int], module_groups: tuple[tuple[int, ...], ...], expected: LayerGroups
) -> None:
    changed = np.zeros(7, np.bool_)
    changed[modules] = True
    assert LayerGroups.holding(changed, module_groups) == expected
