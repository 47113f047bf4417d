"""Whether the numbers of one module can be served: finite, of a sane size, with an effect."""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

from loramux.adapter_store.errors import AdapterRejected
from loramux.adapter_store.expected_modules import ExpectedModule

MAX_WEIGHT = 65504.0
"""No single weight may be larger: float16's limit."""

MAX_MEAN_CHANGE = 100.0
"""Bound on `scale |A| |B| / sqrt(in * out)`, which bounds the root mean square of the change to the base's weights.

Those weights are a few hundredths; a change thousands of times larger is a diverged training, never an adapter."""

_NUM_PROBES = 4


class WeightChecks:
    """Checks modules one by one and remembers the largest effect on fixed random inputs."""

    def __init__(self) -> None:
        self.largest_effect = 0.0
        self._probes: dict[int, npt.NDArray[np.float32]] = {}

    def check(self, module: ExpectedModule, A: npt.NDArray[np.float32], B: npt.NDArray[np.float32]) -> None:
        """`A` float32 `[rank, in]`, `B` float32 `[out, rank]`; raises AdapterRejected."""
        norm = module.scale
        for name, weights in ((module.a_name, A), (module.b_name, B)):
            if not np.isfinite(weights).all():
                raise AdapterRejected("not_finite", "the tensor holds NaN or infinity", name)
            largest = float(np.abs(weights).max(initial=0.0))
            if largest > MAX_WEIGHT:
                raise AdapterRejected(
                    "norm_too_large", f"a weight of {largest:.3g}, at most {MAX_WEIGHT:g} is allowed", name
                )
            norm *= math.sqrt(float(np.square(weights, dtype=np.float64).sum()))
        change = norm / math.sqrt(module.shape.in_features * module.shape.out_features)
        if change > MAX_MEAN_CHANGE:
            raise AdapterRejected(
                "norm_too_large",
                f"the module changes the base's weights by up to {change:.3g} on average, "
                f"at most {MAX_MEAN_CHANGE:g} is allowed",
                module.key,
            )
        effect = module.scale * ((self._probe(module.shape.in_features) @ A.T) @ B.T)
        self.largest_effect = max(self.largest_effect, float(np.abs(effect).max(initial=0.0)))

    def _probe(self, num_features: int) -> npt.NDArray[np.float32]:
        if num_features not in self._probes:
            generator = np.random.default_rng(num_features)
            self._probes[num_features] = generator.standard_normal((_NUM_PROBES, num_features), np.float32)
        return self._probes[num_features]
