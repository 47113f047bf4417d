"""Methods that combine one matrix from each of several adapters.

In float32, the results equal PEFT's, apart from the random choices of the DARE methods.

- `linear`: the weighted sum.
- `ties` (arXiv:2306.01708): each matrix keeps its values of largest magnitude. At each position, only the values with
  the majority sign are averaged.
- `dare_linear` and `dare_ties` (arXiv:2311.03099): each matrix keeps random values, rescaled to preserve its expected
  value. The matrices are then combined as in `linear` and `ties`, respectively.

`cat` combines the factors A and B of a module at once: see `merge.py`.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

import numpy as np
import numpy.typing as npt

from loramux.adapter_store.errors import MergeRefused

Matrix = npt.NDArray[np.float32]


class MergeMethod(StrEnum):
    LINEAR = "linear"
    CAT = "cat"
    TIES = "ties"
    DARE_LINEAR = "dare_linear"
    DARE_TIES = "dare_ties"

    @property
    def prunes(self) -> bool:
        return self not in (MergeMethod.LINEAR, MergeMethod.CAT)

    @property
    def is_random(self) -> bool:
        return self in (MergeMethod.DARE_LINEAR, MergeMethod.DARE_TIES)

    @property
    def elects_signs(self) -> bool:
        return self in (MergeMethod.TIES, MergeMethod.DARE_TIES)


class SignRule(StrEnum):
    """How to find the majority sign: by the sum of the values, or by the number of adapters with each sign."""

    TOTAL = "total"
    FREQUENCY = "frequency"


@dataclass(frozen=True, slots=True)
class MergeSettings:
    """`density` is the share of values that each matrix keeps. With a random method, `seed` determines which values are
    kept.

    Raises MergeRefused for a density outside (0, 1].
    """

    method: MergeMethod
    density: float = 1.0
    sign_rule: SignRule = SignRule.TOTAL
    seed: int = 0

    def __post_init__(self) -> None:
        if not 0 < self.density <= 1:
            raise MergeRefused("invalid_density", "the density must be above 0 and at most 1", "density")
        if not self.method.prunes and self.density != 1:
            raise MergeRefused("invalid_density", f"{self.method} keeps all values: omit the density", "density")


def combine(name: str, matrices: Sequence[Matrix], weights: Sequence[float], settings: MergeSettings) -> Matrix:
    """Combine several adapters' matrices for the tensor `name`, which have equal shapes."""
    if settings.method.is_random:
        masks = (random_mask(settings, name, index, matrix.shape) for index, matrix in enumerate(matrices))
        matrices = [_rescaled(matrix, mask, settings.density) for matrix, mask in zip(matrices, masks, strict=True)]
    elif settings.method.prunes:
        matrices = [keep_largest(matrix, settings.density) for matrix in matrices]
    factors = [np.float32(weight) for weight in weights]
    if not settings.method.elects_signs:
        return _sum([matrix * factor for matrix, factor in zip(matrices, factors, strict=True)])
    majority = _majority(matrices, settings.sign_rule)
    agrees = [np.sign(matrix) == majority for matrix in matrices]
    kept = [matrix * factor * mask for matrix, factor, mask in zip(matrices, factors, agrees, strict=True)]
    num_kept: Matrix = np.maximum(_sum([mask.astype(np.float32) for mask in agrees]), np.float32(1))
    return np.divide(_sum(kept), num_kept, dtype=np.float32)


def keep_largest(matrix: Matrix, density: float) -> Matrix:
    """Keep the share `density` of the values, largest magnitudes first, and set the others to 0.

    Of equal magnitudes, the first are kept.
    """
    num_kept = int(density * matrix.size)
    if num_kept == matrix.size:
        return matrix
    if num_kept == 0:
        return np.zeros_like(matrix)
    sizes = np.abs(matrix).reshape(-1)
    smallest = np.partition(sizes, matrix.size - num_kept)[matrix.size - num_kept]
    mask = sizes > smallest
    mask[np.flatnonzero(sizes == smallest)[: num_kept - np.count_nonzero(mask)]] = True
    pruned: Matrix = matrix * mask.reshape(matrix.shape)
    return pruned


def random_mask(settings: MergeSettings, name: str, index: int, shape: tuple[int, ...]) -> npt.NDArray[np.bool_]:
    """Return a mask of the values of the tensor `name` that adapter `index` keeps.

    Equal arguments yield equal masks.
    """
    if settings.density == 1:
        return np.ones(shape, np.bool_)
    random = np.random.default_rng((settings.seed, index, zlib.crc32(name.encode())))
    return random.random(shape, np.float32) < np.float32(settings.density)


def _rescaled(matrix: Matrix, mask: npt.NDArray[np.bool_], density: float) -> Matrix:
    return matrix if density == 1 else matrix * mask / np.float32(density)


def _majority(matrices: Sequence[Matrix], rule: SignRule) -> Matrix:
    votes = matrices if rule is SignRule.TOTAL else [np.sign(matrix) for matrix in matrices]
    return np.where(_sum(votes) >= 0, np.float32(1), np.float32(-1))


def _sum(matrices: Sequence[Matrix]) -> Matrix:
    total = matrices[0].copy()
    for matrix in matrices[1:]:
        total += matrix
    return total
