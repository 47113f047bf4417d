"""The random draws of the S-LoRA workload: each request's adapter, lengths and arrival time.

The workload follows section 7 of "S-LoRA: Serving Thousands of Concurrent LoRA Adapters" (Sheng et al., 2023, arXiv
2311.03285) and `benchmarks/trace.py` in its repository. All draws are seeded. For every number of adapters, requests of
the same lengths arrive at the same times. Only the requested adapters differ.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, slots=True)
class Lengths:
    """Uniformly distributed numbers of tokens in [shortest, end)."""

    shortest: int
    end: int

    @property
    def mean(self) -> float:
        return (self.shortest + self.end - 1) / 2

    def __str__(self) -> str:
        return f"[{self.shortest}, {self.end})"


@dataclass(frozen=True, slots=True)
class DrawnRequest:
    """Lengths in tokens, and the index of the requested adapter."""

    adapter: int
    num_prompt: int
    num_output: int


def draw_requests(
    num_requests: int, num_adapters: int, prompts: Lengths, outputs: Lengths, alpha: float = 1.0, seed: int = 42
) -> list[DrawnRequest]:
    """Draw adapters from positions in [0, 1) with density `alpha * x ** (alpha - 1)`, like `numpy.random.power`.

    An alpha of 1 is uniform, the hardest case for a pool. Below 1, the first adapters are requested most often: the
    first k of n get a share of `(k / n) ** alpha` of the requests.
    """
    lengths = np.random.default_rng(seed).integers(
        [prompts.shortest, outputs.shortest], [prompts.end, outputs.end], (num_requests, 2)
    )
    places = np.random.default_rng(seed + 1).random(num_requests) ** (1.0 / alpha)
    return [
        # If alpha is far above 1, the last positions round up to 1.
        DrawnRequest(min(int(place * num_adapters), num_adapters - 1), num_prompt, num_output)
        for (num_prompt, num_output), place in zip(lengths.tolist(), places.tolist(), strict=True)
    ]


def draw_arrivals(rate: float, cv: float, until_s: float, seed: int = 42) -> Iterator[float]:
    """Arrival times in [0, until_s), in seconds, from a gamma process with `rate` arrivals per second. `cv` is the
    coefficient of variation of the time between arrivals: 1 is a Poisson process, and higher values are bursty.
    """
    random = np.random.default_rng(seed + 3)
    at_s = 0.0
    while True:
        at_s += random.gamma(1.0 / cv**2, cv**2 / rate)
        if at_s >= until_s:
            return
        yield at_s
