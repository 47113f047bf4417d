"""Prometheus metrics of a gateway.

Labels come from small fixed sets, never from tenants, keys or paths. The only exception is the list of the ten quota
policies with the most refusals. docs/metrics.md lists every metric.
"""

from __future__ import annotations

from prometheus_client import CollectorRegistry, ProcessCollector, generate_latest
from prometheus_client.exposition import CONTENT_TYPE_LATEST

from loramux.platform.telemetry.package_metrics import (
    AdminMetrics,
    AdmissionMetrics,
    ApiMetrics,
    BatchMetrics,
    EvalMetrics,
    EventMetrics,
    GenerationMetrics,
    GrammarMetrics,
    IngestMetrics,
    ListenerMetrics,
    NewMetrics,
    QuotaMetrics,
    ReplicaMetrics,
    ResponseMetrics,
)

CONTENT_TYPE = CONTENT_TYPE_LATEST


class GatewayMetrics:
    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        ProcessCollector(registry=self.registry)
        new = NewMetrics(self.registry)
        self.api = ApiMetrics(new)
        self.generation = GenerationMetrics(new)
        self.quotas = QuotaMetrics(new)
        self.admission = AdmissionMetrics(new)
        self.grammars = GrammarMetrics(new)
        self.replicas = ReplicaMetrics(new)
        self.ingest = IngestMetrics(new)
        self.admin = AdminMetrics(new)
        self.evals = EvalMetrics(new)
        self.batches = BatchMetrics(new)
        self.responses = ResponseMetrics(new)
        self.events = EventMetrics(new)
        self.listeners = ListenerMetrics(new)

    def render(self) -> bytes:
        return generate_latest(self.registry)
