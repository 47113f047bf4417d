"""The S-LoRA workload, drawn: which adapter each request names, how long it is, and when it arrives.

After "S-LoRA: Serving Thousands of Concurrent LoRA Adapters" (Sheng et al., 2023, arXiv 2311.03285), section 7, and
`benchmarks/trace.py` of its repository. Everything is seeded, and the same requests arrive at the same times whatever
the number of adapters: only whom they name changes.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, slots=True)
class Lengths:
    """Numbers of tokens in [shortest, end), all equally likely."""

    shortest: int
    end: int

    @property
    def mean(self) -> float:
        return (self.shortest + self.end - 1) / 2

    def __str__(self) -> str:
        return f"[{self.shortest}, {self.end})"


@dataclass(frozen=True, slots=True)
class DrawnRequest:
    """Lengths in tokens, and the number of the adapter that is asked for."""

    adapter: int
    num_prompt: int
    num_output: int


def draw_requests(
    num_requests: int, num_adapters: int, prompts: Lengths, outputs: Lengths, alpha: float = 1.0, seed: int = 42
) -> list[DrawnRequest]:
    """Adapters have places in [0, 1) drawn with the density `alpha * x ** (alpha - 1)`, as `numpy.random.power` does.

    An alpha of 1 is uniform, the hardest on a pool. Below 1 the first adapters are asked for most: the share of the
    first k of n is `(k / n) ** alpha`.
    """
    lengths = np.random.default_rng(seed).integers(
        [prompts.shortest, outputs.shortest], [prompts.end, outputs.end], (num_requests, 2)
    )
    places = np.random.default_rng(seed + 1).random(num_requests) ** (1.0 / alpha)
    return [
        # Far above 1, an alpha rounds the last places up to 1.
        DrawnRequest(min(int(place * num_adapters), num_adapters - 1), num_prompt, num_output)
        for (num_prompt, num_output), place in zip(lengths.tolist(), places.tolist(), strict=True)
    ]


def draw_arrivals(rate: float, cv: float, until_s: float, seed: int = 42) -> Iterator[float]:
    """Seconds at which requests arrive before `until_s`: a gamma process of `rate` a second.

    The time between two has the coefficient of variation `cv`: 1 is a Poisson process, more comes in bursts.
    """
    random = np.random.default_rng(seed + 3)
    at_s = 0.0
    while True:
        at_s += random.gamma(1.0 / cv**2, cv**2 / rate)
        if at_s >= until_s:
            return
        yield at_s
