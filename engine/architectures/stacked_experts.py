"""Finds an expert's weight in files that stack all experts. Other files of the same architectures have a tensor for
each expert.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

_OF_EXPERT = re.compile(r"(.*\.experts)\.([0-9]{1,4})\.(gate_proj|up_proj|down_proj)\.weight")


@dataclass(frozen=True, slots=True)
class StackedPlace:
    """The place of one expert's weight in a file that stacks experts.

    The stack `name` is `[num_experts, rows, in_features]` or `[num_experts, in_features, rows]`. If `num_parts` is 2,
    the rows of gate precede the rows of up, and `part` is 0 for gate and 1 for up.
    """

    name: str
    expert: int
    part: int
    num_parts: int

    def is_transposed(self, stack: tuple[int, ...], shape: tuple[int, ...]) -> bool | None:
        """Whether a stack of shape `stack` stores a weight of shape `shape` transposed. None if the shape of the stack
        fits neither way.

        As in transformers, a stack whose shape fits both ways is taken as not transposed.
        """
        rows = shape[0] * self.num_parts
        if len(stack) != 3 or self.expert >= stack[0]:
            return None
        if stack[1:] == (rows, shape[1]):
            return False
        return True if stack[1:] == (shape[1], rows) else None

    def index(self, shape: tuple[int, ...], is_transposed: bool) -> tuple[int | slice, ...]:
        rows = slice(self.part * shape[0], (self.part + 1) * shape[0])
        return (self.expert, slice(None), rows) if is_transposed else (self.expert, rows)


def stacked_place(name: str) -> StackedPlace | None:
    """The place of the weight `name` in a file that stacks experts, or None if it is not an expert's weight."""
    match = _OF_EXPERT.fullmatch(name)
    if match is None:
        return None
    experts, number, linear = match.groups()
    if linear == "down_proj":
        return StackedPlace(f"{experts}.down_proj", int(number), 0, 1)
    return StackedPlace(f"{experts}.gate_up_proj", int(number), int(linear == "up_proj"), 2)
