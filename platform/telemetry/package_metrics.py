"""The metrics of each package, one record per package."""

from __future__ import annotations

from collections.abc import Callable

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from loramux.adapter_store.registry.bases import Base
from loramux.engine.protocol.service_tiers import SERVICE_TIERS
from loramux.platform.grammars.keywords import JSON_SCHEMA_KEYWORDS
from loramux.platform.ledger.settlement import FAILURES, Settlement
from loramux.platform.quotas.policies import QuotaPolicy
from loramux.platform.telemetry.token_gaps import TokenGaps
from loramux.platform.telemetry.top_refusals import TopRefusals

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


class NewMetrics:
    """Creates metrics in one registry. A metric with `values` has a series for each value of its only label from the
    start, so that the first event counts as an increase.
    """

    def __init__(self, registry: CollectorRegistry) -> None:
        self.registry = registry

    def gauge(self, name: str, help_text: str, *labels: str, values: tuple[str, ...] = ()) -> Gauge:
        family = Gauge(name, help_text, labels, registry=self.registry)
        for value in values:
            family.labels(value)
        return family

    def counter(self, name: str, help_text: str, *labels: str, values: tuple[str, ...] = ()) -> Counter:
        family = Counter(name, help_text, labels, registry=self.registry)
        for value in values:
            family.labels(value)
        return family

    def histogram(self, name: str, help_text: str, buckets: tuple[float, ...], *labels: str) -> Histogram:
        return Histogram(name, help_text, labels, buckets=buckets, registry=self.registry)


class ApiMetrics:
    def __init__(self, new: NewMetrics) -> None:
        self.requests = new.counter("loramux_requests", "Answered calls", "endpoint", "status")
        self.errors = new.counter(
            "loramux_errors", "Calls answered with an error, by code and status", "endpoint", "code", "status"
        )
        self.request_seconds = new.histogram(
            "loramux_request_seconds", "Time from the call to the last byte of its response", SECONDS, "endpoint"
        )
        self.first_token_seconds = new.histogram(
            "loramux_first_token_seconds",
            "Time from the end of a call's validation to the first text of its answer",
            SECONDS,
            "endpoint",
            "tier",
        )
        self.template_seconds = new.histogram(
            "loramux_adapter_template_seconds", "Time to render a chat with an adapter's template", COMMIT_SECONDS
        )
        self.tool_calls = new.counter("loramux_tool_calls", "Tool calls in answers, by format", "format")


class GenerationMetrics:
    def __init__(self, new: NewMetrics) -> None:
        self.running = new.gauge("loramux_running_requests", "Admitted requests that are not yet settled")
        self.token_gaps = TokenGaps()
        new.registry.register(self.token_gaps)
        self._settled = new.counter(
            "loramux_settled_requests",
            "Settled requests, by status",
            "status",
            values=("completed", "aborted", *FAILURES),
        )
        self._tokens = new.counter(
            "loramux_tokens", "Settled tokens", "kind", values=("prompt", "cached", "completion", "discarded")
        )
        self.settle_failures = new.counter("loramux_settle_failures", "Settlements given up")
        self.recovered = new.counter("loramux_recovered_requests", "Reservations recovered after their lease expired")
        self.held_settlements = new.gauge(
            "loramux_held_settlements", "Settlements in memory, rejected by both the database and the spool"
        )
        self.spooled_bytes = new.gauge("loramux_spooled_bytes", "Bytes of settlements that wait on disk")
        self.overload_refusals = new.counter(
            "loramux_overload_refusals",
            "Requests refused because their first token would have come too late for their service tier",
            "tier",
            "status",
        )
        self.overflows = new.counter(
            "loramux_overflows", "Requests answered by the overflow of the alias that they name"
        )
        self.first_tokens = new.counter(
            "loramux_first_tokens",
            "First tokens of service tiers with an objective, by whether they met it",
            "tier",
            "outcome",
        )
        # Every series exists from the start, so that the first event counts as an increase.
        for tier in SERVICE_TIERS:
            for status in ("429", "503"):
                self.overload_refusals.labels(tier, status)
            for outcome in ("in_time", "late"):
                self.first_tokens.labels(tier, outcome)

    def count_settlement(self, settlement: Settlement) -> None:
        self._settled.labels(settlement.status).inc()
        self._tokens.labels("prompt").inc(settlement.prompt_tokens)
        self._tokens.labels("cached").inc(settlement.cached_tokens)
        self._tokens.labels("completion").inc(settlement.completion_tokens)

    def count_discarded(self, num_tokens: int) -> None:
        """Count tokens that an engine committed and that no settlement charges."""
        self._tokens.labels("discarded").inc(num_tokens)


class QuotaMetrics:
    def __init__(self, new: NewMetrics) -> None:
        self.refusals = new.counter("loramux_quota_refusals", "Requests over a quota, by metric", "metric", "mode")
        self._top = TopRefusals()
        new.registry.register(self._top)

    def count_refusal(self, policy: QuotaPolicy, mode: str = "hard") -> None:
        """Count a request that exceeds a policy's limit. With the mode `soft` or `shadow`, the request ran anyway."""
        self.refusals.labels(policy.metric, mode).inc()
        if mode == "hard":
            self._top.count(policy.id)


class AdmissionMetrics:
    def __init__(self, new: NewMetrics) -> None:
        self._commit_seconds = new.histogram(
            "loramux_commit_seconds", "Duration of a transaction of reservations and settlements", COMMIT_SECONDS
        )
        self._commit_operations = new.histogram(
            "loramux_commit_operations", "Reservations and settlements per transaction", COMMIT_SIZES
        )
        self._commit_failures = new.counter("loramux_commit_failures", "Failed transactions")
        self.overdrawn = new.counter(
            "loramux_overdrawn_settlements", "Settlements after recovery that overdrew a hard limit"
        )
        self.database_connections = new.gauge("loramux_database_connections", "Database connections in use")
        self.database_trouble = new.gauge(
            "loramux_database_trouble", "1 while the database rejects reservations or does not answer"
        )

    def note_commit(self, num_operations: int, seconds: float, has_failed: bool) -> None:
        self._commit_operations.observe(num_operations)
        self._commit_seconds.observe(seconds)
        if has_failed:
            self._commit_failures.inc()


class GrammarMetrics:
    def __init__(self, new: NewMetrics) -> None:
        self._checks = new.counter("loramux_grammar_checks", "Requests with a grammar, by outcome", "outcome")
        self._check_seconds = new.histogram(
            "loramux_grammar_check_seconds", "Time to check a request's grammar", COMMIT_SECONDS
        )
        self._refused_keywords = new.counter(
            "loramux_grammar_refused_keywords", "Schema keywords that are not supported", "keyword"
        )

    def note_check(self, outcome: str, seconds: float, keywords: tuple[str, ...]) -> None:
        """Record a request with a grammar, and the keywords of its schema that are not supported."""
        self._checks.labels(outcome).inc()
        if outcome != "known":
            self._check_seconds.observe(seconds)
        for keyword in keywords:
            self._refused_keywords.labels(keyword if keyword in JSON_SCHEMA_KEYWORDS else "other").inc()


class ReplicaMetrics:
    def __init__(self, new: NewMetrics) -> None:
        self.peers = new.gauge(
            "loramux_peers", "Other servers that share requests with this one, by state", "state", values=PEER_STATES
        )
        self._forwarded = new.counter(
            "loramux_forwarded_sequences",
            "Sequences that other servers ran for this one, by outcome",
            "outcome",
            values=("completed", "failed", "lost", "moved"),
        )
        self.base_fallbacks = new.counter(
            "loramux_base_fallbacks", "Sequences that ran on a base other than the one that the weights chose"
        )
        self._refusals = new.counter(
            "loramux_replica_refusals",
            "Refused servers, claims and connections, by reason",
            "reason",
            values=REPLICA_REFUSALS,
        )

    def count_forwarded(self, outcome: str) -> None:
        self._forwarded.labels(outcome).inc()

    def count_refusal(self, reason: str) -> None:
        self._refusals.labels(reason).inc()


class EvalMetrics:
    def __init__(self, new: NewMetrics) -> None:
        self.answers = new.counter(
            "loramux_eval_answers", "Graded answers of evals", "outcome", values=("passed", "failed")
        )
        self.rollbacks = new.counter("loramux_canary_rollbacks", "Aliases rolled back because a new version failed")


class BatchMetrics:
    def __init__(self, new: NewMetrics) -> None:
        self.lines = new.counter(
            "loramux_batch_lines", "Answered requests of batches", "outcome", values=("completed", "failed")
        )


class EventMetrics:
    def __init__(self, new: NewMetrics) -> None:
        self.streams = new.gauge("loramux_event_streams", "Open streams of events")
        self._deliveries = new.counter(
            "loramux_webhook_deliveries",
            "Attempts to deliver an event to a webhook, by outcome",
            "outcome",
            values=("delivered", "failed"),
        )
        self._delivery_seconds = new.histogram(
            "loramux_webhook_delivery_seconds", "Duration of an attempt to deliver an event", SECONDS
        )

    def count_delivery(self, is_delivered: bool, seconds: float) -> None:
        self._deliveries.labels("delivered" if is_delivered else "failed").inc()
        self._delivery_seconds.observe(seconds)


class ResponseMetrics:
    def __init__(self, new: NewMetrics) -> None:
        self.background = new.counter(
            "loramux_background_responses",
            "Finished responses in the background",
            "status",
            values=("completed", "incomplete", "failed", "cancelled"),
        )


class IngestMetrics:
    """Metrics of `adapter_store`."""

    def __init__(self, new: NewMetrics) -> None:
        self.validations = new.counter(
            "loramux_validations",
            "Validated uploads, by outcome",
            "outcome",
            values=("accepted", "rejected", "failed"),
        )
        self.validation_seconds = new.histogram("loramux_validation_seconds", "Duration of a validation", SECONDS)
        self._base_versions = new.gauge(
            "loramux_base_versions",
            "Ready versions, by verdict for the served base",
            "verdict",
            values=("ready", "rejected", "pending"),
        )
        self.store_breaker_open = new.gauge(
            "loramux_gateway_store_breaker_open", "1 while this gateway does not call the blob store"
        )

    def note_base_versions(self, base: Base) -> None:
        self._base_versions.labels("ready").set(base.num_validated)
        self._base_versions.labels("rejected").set(base.num_rejected)
        self._base_versions.labels("pending").set(base.num_pending)


class AdminMetrics:
    def __init__(self, new: NewMetrics) -> None:
        self.requests = new.counter("loramux_admin_requests", "Answered admin calls", "method", "status")
        self.request_seconds = new.histogram(
            "loramux_admin_request_seconds", "Time from an admin call to the last byte of its response", SECONDS
        )


class ListenerMetrics:
    """Metrics of both listeners' connections."""

    def __init__(self, new: NewMetrics) -> None:
        self._connections = new.gauge("loramux_connections", "Open connections", "listener")
        self._refusals = new.counter(
            "loramux_network_refusals",
            "Connections and requests refused or ended by network limits",
            "listener",
            "reason",
        )

    def note_listener(self, listener: str, num_connections: Callable[[], int]) -> Counter:
        """Report a listener's number of connections. Return the counter of its refused connections and requests."""
        self._connections.labels(listener).set_function(num_connections)
        for reason in NETWORK_REFUSALS:
            self._refusals.labels(listener, reason)
        return self._refusals
