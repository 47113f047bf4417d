"""The module groups that a step's adapters modify in a layer."""

from __future__ import annotations

from collections.abc import Sequence
from enum import IntFlag

import numpy as np
import numpy.typing as npt


class LayerGroups(IntFlag):
    """A set of module groups. The flags follow the order of `Decoder.module_groups`."""

    QKV = 1
    O = 2  # noqa: E741  the projection's name in every model
    GATE_UP = 4
    DOWN = 8
    ROUTER = 16
    EXPERTS_GATE_UP = 32
    EXPERTS_DOWN = 64
    INPUT_GATE = 128
    INPUT_PROJECTION = 256
    ALL_INPUTS = 512
    NORMS = 1024

    @staticmethod
    def holding(modules: npt.NDArray[np.bool_], module_groups: Sequence[npt.NDArray[np.intp]]) -> LayerGroups:
        """The groups with at least one module set in `modules`, bool `[num_modules]`.

        Groups without modules are included, so that an adapter that targets all modules has all groups. Few adapters
        replace norms, so NORMS does not belong to ALL_GROUPS, and is included only if an adapter replaces norms.
        """
        groups = NO_GROUPS
        for group, members in zip(LayerGroups, module_groups, strict=True):
            if modules[members].any() or not (len(members) or group is LayerGroups.NORMS):
                groups |= group
        return groups


NO_GROUPS = LayerGroups(0)
ALL_GROUPS = (
    LayerGroups.QKV
    | LayerGroups.O
    | LayerGroups.GATE_UP
    | LayerGroups.DOWN
    | LayerGroups.ROUTER
    | LayerGroups.EXPERTS_GATE_UP
    | LayerGroups.EXPERTS_DOWN
    | LayerGroups.INPUT_GATE
    | LayerGroups.INPUT_PROJECTION
    | LayerGroups.ALL_INPUTS
)
