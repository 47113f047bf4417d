"""Checks that weights are finite and of reasonable size, and measures each module's effect."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from loramux.adapter_store.errors import AdapterRejected
from loramux.adapter_store.validation.expected_modules import ExpectedModule

MAX_WEIGHT = 65504.0
"""Largest allowed absolute value of a weight: float16's limit."""

MAX_MEAN_CHANGE = 100.0
"""Limit on `scale |A| |B| / sqrt(in * out)`, an upper bound on the root mean square change to the base's weights.

The base's weights are on the order of a few hundredths, so a change thousands of times larger means that training
diverged.
"""

_CERTAIN_SQUARES = MAX_WEIGHT**2 / 2
"""If the sum of a block's squares, in float32, is below this, then every weight is finite and at most `MAX_WEIGHT`.

A single larger weight would exceed it, because rounding reduces a sum of a million squares by less than a tenth.
"""
_NUM_PROBES = 4
_BLOCK_ELEMENTS = 1 << 20
"""Number of weights checked at a time. Checking a whole head at once would take hundreds of megabytes."""


@dataclass(frozen=True, slots=True)
class Effect:
    """A module's effect: the largest absolute value of `scale * B(Ax)` for fixed random inputs."""

    module: ExpectedModule
    largest: float


class WeightChecks:
    """Checks modules one by one and collects their effects."""

    def __init__(self) -> None:
        self.effects: list[Effect] = []
        self.has_vectors = False
        """True if a magnitude or bias can change the base even though all products B A are zero."""
        self._probes: dict[int, npt.NDArray[np.float32]] = {}

    @property
    def largest_effect(self) -> float:
        return max((effect.largest for effect in self.effects), default=0.0)

    def check(
        self,
        module: ExpectedModule,
        A: npt.NDArray[np.float32],
        B: npt.NDArray[np.float32],
        names: tuple[str, str] | None = None,
    ) -> None:
        """Check a module with `A` float32 `[rank, in]` and `B` float32 `[out, rank]`. Raises AdapterRejected.

        `names` are the names of the two tensors in the file, if they differ from PEFT's.
        """
        a_name, b_name = names or (module.a_name, module.b_name)
        norm = module.scale * _norm(a_name, A) * _norm(b_name, B)
        change = norm / math.sqrt(module.shape.in_features * module.shape.out_features)
        if not change <= MAX_MEAN_CHANGE:
            raise AdapterRejected(
                "norm_too_large",
                f"the module could change the base's weights by {change:.3g} (a bound on the root mean square); "
                f"at most {MAX_MEAN_CHANGE:g} is allowed",
                module.name,
            )
        effect = module.scale * ((self._probe(module.shape.in_features) @ A.T) @ B.T)
        largest = float(np.abs(effect).max(initial=0.0))
        if not math.isfinite(largest):
            raise AdapterRejected("not_finite", "the product of the module's tensors is not finite", module.name)
        self.effects.append(Effect(module, largest))

    def check_magnitude(self, name: str, magnitude: npt.NDArray[np.float32]) -> None:
        """Check a DoRA module's magnitudes `[out]`. Raises AdapterRejected."""
        _norm(name, magnitude)
        if not magnitude.all():
            raise AdapterRejected("invalid_magnitude", "a magnitude is 0, which turns an output off", name)
        self.has_vectors = True

    def check_bias(self, name: str, bias: npt.NDArray[np.float32]) -> None:
        """Check a module's bias `[out]`. Raises AdapterRejected."""
        self.has_vectors = self.has_vectors or _norm(name, bias) > 0

    def check_vector(self, name: str, vector: npt.NDArray[np.float32]) -> None:
        """Check a vector that replaces one of the base's. Raises AdapterRejected."""
        check_values(name, vector)
        self.has_vectors = True

    def _probe(self, num_features: int) -> npt.NDArray[np.float32]:
        if num_features not in self._probes:
            generator = np.random.default_rng(num_features)
            self._probes[num_features] = generator.standard_normal((_NUM_PROBES, num_features), np.float32)
        return self._probes[num_features]


def check_values(name: str, values: npt.NDArray[np.float32]) -> None:
    """Raise AdapterRejected unless all values are finite and small enough to be served."""
    largest = max(float(values.max(initial=0.0)), -float(values.min(initial=0.0)))
    # The maximum is NaN if any value is.
    if not math.isfinite(largest):
        raise AdapterRejected("not_finite", "the tensor contains NaN or infinity", name)
    if largest > MAX_WEIGHT:
        raise AdapterRejected(
            "norm_too_large", f"a weight is {largest:.3g}, but at most {MAX_WEIGHT:g} is allowed", name
        )


def _norm(name: str, weights: npt.NDArray[np.float32]) -> float:
    """Return the Frobenius norm of the weights. Raises AdapterRejected unless they are finite."""
    flat = weights.reshape(-1)
    squares = 0.0
    for begin in range(0, flat.size, _BLOCK_ELEMENTS):
        block = flat[begin : begin + _BLOCK_ELEMENTS]
        # The sum of the squares of a million values up to 65504 is well below float32's limit, and the check tolerates
        # rounding.
        with np.errstate(over="ignore", invalid="ignore"):
            of_block = float(np.dot(block, block))
        if not of_block < _CERTAIN_SQUARES:
            check_values(name, block)
        squares += of_block
    return math.sqrt(squares)
