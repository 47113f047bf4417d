"""A histogram of the time between tokens. It updates ten times as fast as prometheus_client's own histogram."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator
from itertools import accumulate

from prometheus_client.core import HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

GAP_SECONDS = (0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.25, 0.5, 1.0, 2.5, 10.0)


class EndpointGaps:
    """The gaps of one endpoint. Not thread-safe: only the event loop observes gaps."""

    def __init__(self) -> None:
        self.counts = [0] * (len(GAP_SECONDS) + 1)
        self.seconds = 0.0

    def observe(self, seconds: float, count: int) -> None:
        self.counts[bisect_left(GAP_SECONDS, seconds)] += count
        self.seconds += seconds * count


class TokenGaps(Collector):
    """The metric `loramux_token_gap_seconds`, by endpoint."""

    def __init__(self) -> None:
        self._endpoints: dict[str, EndpointGaps] = {}

    def of(self, endpoint: str) -> EndpointGaps:
        gaps = self._endpoints.get(endpoint)
        if gaps is None:
            gaps = self._endpoints[endpoint] = EndpointGaps()
        return gaps

    def collect(self) -> Iterator[Metric]:
        family = HistogramMetricFamily(
            "loramux_token_gap_seconds", "Time between consecutive tokens of a choice", labels=["endpoint"]
        )
        bounds = [*map(str, GAP_SECONDS), "+Inf"]
        for endpoint, gaps in list(self._endpoints.items()):
            buckets = list(zip(bounds, accumulate(gaps.counts), strict=True))
            family.add_metric([endpoint], buckets, gaps.seconds)
        yield family
