"""When the requests of a load are sent."""

from __future__ import annotations

import math
import random


def arrival_times(num_requests: int, requests_s: float, burstiness: float, dice: random.Random) -> list[float]:
    """Return times in seconds from the start, in order.

    Gaps follow a gamma distribution with shape `burstiness`: 1 is a Poisson process, less is more bursty, and infinity
    is even. As in `vllm bench serve`, the times are scaled so that the mean rate is exactly `requests_s`. With an
    infinite rate, all requests are sent at once.
    """
    if math.isinf(requests_s):
        return [0.0] * num_requests
    if math.isinf(burstiness):
        return [(number + 1) / requests_s for number in range(num_requests)]
    times, at_s = [], 0.0
    for _ in range(num_requests):
        at_s += dice.gammavariate(burstiness, 1.0)
        times.append(at_s)
    # Gaps of a very bursty process can all be 0 in floating point.
    scale = num_requests / requests_s / at_s if at_s > 0 else 0.0
    return [one * scale for one in times]
