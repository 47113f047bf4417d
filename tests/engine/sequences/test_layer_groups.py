from __future__ import annotations

import numpy as np
import pytest

from loramux.engine.sequences.layer_groups import ALL_GROUPS, LayerGroups

SPLIT = ((0, 1, 2), (3,), (4, 5), (6,), (), (), (), (), (), (), ())
FUSED = ((0,), (1,), (2,), (3,), (), (), (), (), (), (), (4, 5))
EXPERTS = ((0,), (1,), (), (), (2,), (3, 5), (4, 6), (), (), (), ())
INPUTS = LayerGroups.INPUT_GATE | LayerGroups.INPUT_PROJECTION | LayerGroups.ALL_INPUTS
"""The groups that a base without per-layer inputs lacks."""
WITHOUT_EXPERTS = LayerGroups.ROUTER | LayerGroups.EXPERTS_GATE_UP | LayerGroups.EXPERTS_DOWN | INPUTS
"""The groups that a base with neither experts nor per-layer inputs lacks."""
WITHOUT_FEED_FORWARD = LayerGroups.GATE_UP | LayerGroups.DOWN | INPUTS


@pytest.mark.parametrize(
    ("modules", "module_groups", "expected"),
    [
        pytest.param([], SPLIT, WITHOUT_EXPERTS, id="none"),
        pytest.param([0, 2], SPLIT, LayerGroups.QKV | WITHOUT_EXPERTS, id="q-and-v"),
        pytest.param([3, 5], SPLIT, LayerGroups.O | LayerGroups.GATE_UP | WITHOUT_EXPERTS, id="o-and-up"),
        pytest.param([1, 3, 4, 6], SPLIT, ALL_GROUPS, id="one-of-each"),
        pytest.param([3], FUSED, LayerGroups.DOWN | WITHOUT_EXPERTS, id="fused-down"),
        pytest.param([0, 1, 2, 3], FUSED, ALL_GROUPS, id="all-but-norms"),
        pytest.param([3, 5], FUSED, LayerGroups.DOWN | LayerGroups.NORMS | WITHOUT_EXPERTS, id="a-norm"),
        pytest.param([6], EXPERTS, WITHOUT_FEED_FORWARD | LayerGroups.EXPERTS_DOWN, id="an-expert"),
        pytest.param([2], EXPERTS, WITHOUT_FEED_FORWARD | LayerGroups.ROUTER, id="router"),
    ],
)
def test_changed_modules_map_to_their_groups(
    modules: list[int], module_groups: tuple[tuple[int, ...], ...], expected: LayerGroups
) -> None:
    changed = np.zeros(7, np.bool_)
    changed[modules] = True
    groups = [np.array(group, np.intp) for group in module_groups]
    assert LayerGroups.holding(changed, groups) == expected
