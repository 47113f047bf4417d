"""Prometheus metrics of a gateway.

Labels come from small fixed sets, never from tenants, keys or paths. The only exception is the list of the ten quota
policies with the most refusals. docs/metrics.md lists every metric.
"""

from __future__ import annotations

import collections
import threading
import time
from collections.abc import Callable, Iterator

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, ProcessCollector, generate_latest
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.exposition import CONTENT_TYPE_LATEST
from prometheus_client.registry import Collector

from loramux.adapter_store.registry.bases import Base
from loramux.platform.grammars.keywords import JSON_SCHEMA_KEYWORDS
from loramux.platform.ledger.settlement import Settlement
from loramux.platform.quotas.policies import QuotaPolicy
from loramux.platform.telemetry.token_gaps import TokenGaps

CONTENT_TYPE = CONTENT_TYPE_LATEST
SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)
COMMIT_SECONDS = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 1.0, 5.0, 30.0)
COMMIT_SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256)
NETWORK_REFUSALS = (
    "address_full",
    "forwarded_address_full",
    "listener_full",
    "no_request",
    "shed",
    "slow_reader",
)
PEER_STATES = ("connected", "draining", "unreachable", "refused")
REPLICA_REFUSALS = (
    "answers",
    "base",
    "certificate",
    "claims",
    "connections",
    "handshake",
    "malformed",
    "protocol",
    "summary",
    "version",
)

REFUSALS_WINDOW_S = 300.0
MAX_POLICIES = 4096
"""Maximum number of policies counted per window. Refusals by other policies are ignored until the next window."""


class GatewayMetrics:
    def __init__(self, registry: CollectorRegistry | None = None) -> None:
        self.registry = registry if registry is not None else CollectorRegistry()
        ProcessCollector(registry=self.registry)
        self._top_refusals = TopRefusals()
        self.registry.register(_TopRefusalsCollector(self._top_refusals))

        self.requests = self._counter("loramux_requests", "Answered calls", "endpoint", "status")
        self.errors = self._counter("loramux_errors", "Calls answered with an error, by code", "endpoint", "code")
        self.request_seconds = self._histogram(
            "loramux_request_seconds", "Time from the call to the last byte of its response", SECONDS, "endpoint"
        )
        self.first_token_seconds = self._histogram(
            "loramux_first_token_seconds",
            "Time from the end of a call's validation to the first text of its answer",
            SECONDS,
            "endpoint",
        )
        self.token_gaps = TokenGaps()
        self.registry.register(self.token_gaps)
        self.settled = self._counter("loramux_settled_requests", "Settled requests, by status", "status")
        self.tokens = self._counter("loramux_tokens", "Settled tokens", "kind")
        self.running = self._gauge("loramux_running_requests", "Admitted requests that are not yet settled")

        self.refusals = self._counter("loramux_quota_refusals", "Requests over a quota, by metric", "metric", "mode")
        self.grammar_checks = self._counter("loramux_grammar_checks", "Requests with a grammar, by outcome", "outcome")
        self.grammar_check_seconds = self._histogram(
            "loramux_grammar_check_seconds", "Time to check a request's grammar", COMMIT_SECONDS
        )
        self.grammar_refused_keywords = self._counter(
            "loramux_grammar_refused_keywords", "Schema keywords that are not supported", "keyword"
        )
        self.template_seconds = self._histogram(
            "loramux_adapter_template_seconds", "Time to render a chat with an adapter's template", COMMIT_SECONDS
        )
        self.tool_calls = self._counter("loramux_tool_calls", "Tool calls in answers, by format", "format")
        self.commit_seconds = self._histogram(
            "loramux_commit_seconds", "Duration of a transaction of reservations and settlements", COMMIT_SECONDS
        )
        self.commit_operations = self._histogram(
            "loramux_commit_operations", "Reservations and settlements per transaction", COMMIT_SIZES
        )
        self.commit_failures = self._counter("loramux_commit_failures", "Failed transactions")
        self.settle_failures = self._counter("loramux_settle_failures", "Settlements given up")
        self.recovered = self._counter("loramux_recovered_requests", "Reservations recovered after their lease expired")

        self.overdrawn = self._counter(
            "loramux_overdrawn_settlements", "Settlements after recovery that overdrew a hard limit"
        )

        self.database_connections = self._gauge("loramux_database_connections", "Database connections in use")

        self.database_trouble = self._gauge(
            "loramux_database_trouble", "1 while the database rejects reservations or does not answer"
        )
        self.held_settlements = self._gauge(
            "loramux_held_settlements", "Settlements in memory, rejected by both the database and the spool"
        )
        self.spooled_bytes = self._gauge("loramux_spooled_bytes", "Bytes of settlements that wait on disk")

        self.store_breaker_open = self._gauge(
            "loramux_gateway_store_breaker_open", "1 while this gateway does not call the blob store"
        )
        self._connections = Gauge("loramux_connections", "Open connections", ("listener",), registry=self.registry)
        self._network_refusals = self._counter(
            "loramux_network_refusals",
            "Connections and requests refused or ended by network limits",
            "listener",
            "reason",
        )

        self.peers = self._gauge("loramux_peers", "Other servers that share requests with this one, by state", "state")
        self.forwarded = self._counter(
            "loramux_forwarded_sequences", "Sequences that other servers ran for this one, by outcome", "outcome"
        )
        self.base_fallbacks = self._counter(
            "loramux_base_fallbacks", "Sequences that ran on a base other than the one that the weights chose"
        )
        self.replica_refusals = self._counter(
            "loramux_replica_refusals", "Refused servers, claims and connections, by reason", "reason"
        )

        self.validations = self._counter("loramux_validations", "Validated uploads, by outcome", "outcome")
        self.base_versions = self._gauge(
            "loramux_base_versions", "Ready versions, by verdict for the served base", "verdict"
        )
        self.validation_seconds = self._histogram("loramux_validation_seconds", "Duration of a validation", SECONDS)
        self.admin_requests = self._counter("loramux_admin_requests", "Answered admin calls", "method", "status")
        self.admin_request_seconds = self._histogram(
            "loramux_admin_request_seconds", "Time from an admin call to the last byte of its response", SECONDS
        )

        # Create these series at startup, so that the first event counts as an increase.
        for family, values in (
            (self.settled, ("completed", "aborted", "failed")),
            (self.tokens, ("prompt", "cached", "completion", "discarded")),
            (self.validations, ("accepted", "rejected", "failed")),
            (self.base_versions, ("ready", "rejected", "pending")),
            (self.peers, PEER_STATES),
            (self.forwarded, ("completed", "failed", "lost", "moved")),
            (self.replica_refusals, REPLICA_REFUSALS),
        ):
            for value in values:
                family.labels(value)

    def note_base_versions(self, base: Base) -> None:
        self.base_versions.labels("ready").set(base.num_validated)
        self.base_versions.labels("rejected").set(base.num_rejected)
        self.base_versions.labels("pending").set(base.num_pending)

    def count_settlement(self, settlement: Settlement) -> None:
        self.settled.labels(settlement.status).inc()
        self.tokens.labels("prompt").inc(settlement.prompt_tokens)
        self.tokens.labels("cached").inc(settlement.cached_tokens)
        self.tokens.labels("completion").inc(settlement.completion_tokens)

    def count_discarded(self, num_tokens: int) -> None:
        """Count tokens that an engine committed and that no settlement charges."""
        self.tokens.labels("discarded").inc(num_tokens)

    def count_refusal(self, policy: QuotaPolicy, mode: str = "hard") -> None:
        """Count a request that exceeds a policy's limit. With the mode `soft` or `shadow`, the request ran anyway."""
        self.refusals.labels(policy.metric, mode).inc()
        if mode == "hard":
            self._top_refusals.count(policy.id)

    def note_commit(self, num_operations: int, seconds: float, has_failed: bool) -> None:
        self.commit_operations.observe(num_operations)
        self.commit_seconds.observe(seconds)
        if has_failed:
            self.commit_failures.inc()

    def note_grammar(self, outcome: str, seconds: float, keywords: tuple[str, ...]) -> None:
        """Record a request with a grammar, and the keywords of its schema that are not supported."""
        self.grammar_checks.labels(outcome).inc()
        if outcome != "known":
            self.grammar_check_seconds.observe(seconds)
        for keyword in keywords:
            self.grammar_refused_keywords.labels(keyword if keyword in JSON_SCHEMA_KEYWORDS else "other").inc()

    def note_listener(self, listener: str, num_connections: Callable[[], int]) -> Counter:
        """Report a listener's number of connections. Return the counter of its refused connections and requests."""
        self._connections.labels(listener).set_function(num_connections)
        for reason in NETWORK_REFUSALS:
            self._network_refusals.labels(listener, reason)
        return self._network_refusals

    def render(self) -> bytes:
        return generate_latest(self.registry)

    def _gauge(self, name: str, help_text: str, *labels: str) -> Gauge:
        return Gauge(name, help_text, labels, registry=self.registry)

    def _counter(self, name: str, help_text: str, *labels: str) -> Counter:
        return Counter(name, help_text, labels, registry=self.registry)

    def _histogram(self, name: str, help_text: str, buckets: tuple[float, ...], *labels: str) -> Histogram:
        return Histogram(name, help_text, labels, buckets=buckets, registry=self.registry)


class _TopRefusalsCollector(Collector):
    def __init__(self, refusals: TopRefusals) -> None:
        self._refusals = refusals

    def collect(self) -> Iterator[Metric]:
        family = GaugeMetricFamily(
            "loramux_quota_top_refusals", "Refusals by policy in the last 5 to 10 minutes, top ten", labels=("policy",)
        )
        for policy_id, count in self._refusals.top():
            family.add_metric((policy_id,), count)
        yield family


class TopRefusals:
    """Refusals by policy over the last five to ten minutes. Thread-safe. Uses bounded memory."""

    def __init__(self, num_shown: int = 10, clock: Callable[[], float] = time.monotonic) -> None:
        self._num_shown = num_shown
        self._clock = clock
        self._lock = threading.Lock()
        self._window = 0
        self._current: collections.Counter[str] = collections.Counter()
        self._previous: collections.Counter[str] = collections.Counter()

    def count(self, policy_id: str) -> None:
        with self._lock:
            self._move()
            if policy_id in self._current or len(self._current) < MAX_POLICIES:
                self._current[policy_id] += 1

    def top(self) -> list[tuple[str, int]]:
        """Return the policies with the most refusals and their counts, highest first."""
        with self._lock:
            self._move()
            return (self._current + self._previous).most_common(self._num_shown)

    def _move(self) -> None:
        window = int(self._clock() / REFUSALS_WINDOW_S)
        if window != self._window:
            self._previous = self._current if window == self._window + 1 else collections.Counter()
            self._current = collections.Counter()
            self._window = window
