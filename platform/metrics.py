"""What Prometheus scrapes of a gateway. Labels come from small fixed sets: never a tenant, key or path."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.exposition import CONTENT_TYPE_LATEST

from loramux.platform.reservations import Settlement

CONTENT_TYPE = CONTENT_TYPE_LATEST
SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)


class GatewayMetrics:
    """The gateway's metrics in a registry of their own, so that several gateways fit in one process."""

    def __init__(self, registry: CollectorRegistry | None = None) -> None:
        self.registry = registry if registry is not None else CollectorRegistry()
        self.requests = Counter("loramux_requests", "Answered calls", ("endpoint", "status"), registry=self.registry)
        self.tokens = Counter("loramux_tokens", "Settled tokens", ("kind",), registry=self.registry)
        self.refusals = Counter(
            "loramux_quota_refusals", "Requests that a quota refused", ("metric",), registry=self.registry
        )
        self.request_seconds = Histogram(
            "loramux_request_seconds",
            "From the call to its last byte",
            ("endpoint",),
            buckets=SECONDS,
            registry=self.registry,
        )
        self.first_token_seconds = Histogram(
            "loramux_first_token_seconds",
            "From the call to its first token",
            ("endpoint",),
            buckets=SECONDS,
            registry=self.registry,
        )
        self.running = Gauge("loramux_running_requests", "Admitted and not settled", registry=self.registry)
        self.settle_failures = Counter("loramux_settle_failures", "Requests left to recovery", registry=self.registry)
        self.recovered = Counter(
            "loramux_recovered_requests", "Reservations recovered after their lease", registry=self.registry
        )

    def count_tokens(self, settlement: Settlement) -> None:
        self.tokens.labels("prompt").inc(settlement.prompt_tokens)
        self.tokens.labels("cached").inc(settlement.cached_tokens)
        self.tokens.labels("completion").inc(settlement.completion_tokens)

    def render(self) -> bytes:
        """The text exposition, of type `CONTENT_TYPE`."""
        return generate_latest(self.registry)
