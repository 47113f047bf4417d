"""The forms in which files store the tensors of stacked experts.

The usual form is PEFT's since 0.19.1. For `n` experts of rank `r`, A is `[n * r, in_features]` with all ranks of expert
0 first, and B is `[out_features, r * n]` with rank 0 of every expert first. Other files differ in two ways:

- Unsloth before 17 September 2026 trained with another B, `[out_features, n * r]` with all ranks of expert 0 first
  (https://github.com/unslothai/unsloth-zoo/pull/1269).
- PEFT before 0.19.1 took the outputs of a weight `[n, out_features, in_features]` for its inputs. Its A is
  `[n * r, out_features]`, and its B is `[in_features, r * n]`. PEFT 0.19.0, and no other release, did so for a weight
  `[n, in_features, out_features]`, as in gpt-oss, too.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy.typing as npt

from loramux.adapter_store.formats.packed.module_places import A_SUFFIX


@dataclass(frozen=True, slots=True)
class StackForm:
    """How a file stores the A and B of a stack of `num_experts` experts.

    With `is_grouped`, all ranks of expert 0 come first in the columns of the file's B. With `is_swapped`, the usual A
    is made of the file's B, and the usual B of the file's A.
    """

    num_experts: int
    is_grouped: bool
    is_swapped: bool

    def usual_shape(self, stored: tuple[int, ...]) -> tuple[int, ...]:
        """Return the usual shape of a tensor with the shape `stored`, or the other way round."""
        return stored[::-1] if self.is_swapped else stored

    def usual(self, name: str, stored: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """Return the tensor `name` in the usual form. It is made of the file's tensor `stored`, of any dtype."""
        matrix = stored.T if self.is_swapped else stored
        if name.endswith(A_SUFFIX):
            return _rows_by_expert(matrix, self.num_experts) if self.is_swapped and not self.is_grouped else matrix
        # The rows of every A are in groups, so a B that is made of an A has its columns in groups.
        return _columns_by_rank(matrix, self.num_experts) if self.is_swapped or self.is_grouped else matrix


def _rows_by_expert(matrix: npt.NDArray[Any], num_experts: int) -> npt.NDArray[Any]:
    """Reorder rows `[rank * num_experts, x]` to `[num_experts * rank, x]`."""
    num_rows, size = matrix.shape
    return matrix.reshape(-1, num_experts, size).swapaxes(0, 1).reshape(num_rows, size)


def _columns_by_rank(matrix: npt.NDArray[Any], num_experts: int) -> npt.NDArray[Any]:
    """Reorder columns `[x, num_experts * rank]` to `[x, rank * num_experts]`."""
    size, num_columns = matrix.shape
    return matrix.reshape(size, num_experts, -1).swapaxes(1, 2).reshape(size, num_columns)
