"""What Prometheus scrapes of the engine behind a gateway: how adapters come to its pool. The series are a fixed set."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from loramux.adapter_store.tier_figures import LoadCounts

BOUNDED_TIERS = ("host", "disk")


class LoadCollector(Collector):
    """The engine's own counts, which begin again when it restarts; README.md of `adapter_store` says what each is."""

    def __init__(self, counts: LoadCounts) -> None:
        self._counts = counts

    def collect(self) -> Iterator[Metric]:
        lookups = CounterMetricFamily(
            "loramux_adapter_lookups", "Adapters looked for, by tier and result", labels=("tier", "result")
        )
        held = GaugeMetricFamily("loramux_adapter_tier_bytes", "Adapters kept, by tier", labels=("tier",))
        evictions = CounterMetricFamily(
            "loramux_adapter_tier_evictions", "Adapters that gave way to others, by tier", labels=("tier",)
        )
        for tier in self._counts.tiers:
            lookups.add_metric((tier.tier, "hit"), tier.num_hits)
            lookups.add_metric((tier.tier, "miss"), tier.num_misses)
            if tier.tier in BOUNDED_TIERS:
                held.add_metric((tier.tier,), tier.used_bytes)
                evictions.add_metric((tier.tier,), tier.num_evictions)
        labels = ("tier", "stage")
        stages = CounterMetricFamily("loramux_adapter_stages", "Stages of loading that adapters passed", labels=labels)
        num_bytes = CounterMetricFamily("loramux_adapter_stage_bytes", "Bytes that passed them", labels=labels)
        seconds = CounterMetricFamily("loramux_adapter_stage_seconds", "Time that this took", labels=labels)
        for one in self._counts.stages:
            at = (one.tier, one.stage)
            stages.add_metric(at, one.count)
            num_bytes.add_metric(at, one.num_bytes)
            seconds.add_metric(at, one.seconds)
        loads = CounterMetricFamily("loramux_adapter_loads", "Loads into host memory, by outcome", labels=("outcome",))
        for outcome, count in (
            ("loaded", self._counts.num_loaded),
            ("failed", self._counts.num_failed),
            ("given_up", self._counts.num_given_up),
        ):
            loads.add_metric((outcome,), count)
        set_aside = CounterMetricFamily(
            "loramux_adapter_files_set_aside", "Files with wrong bytes", value=self._counts.num_set_aside
        )
        yield from (lookups, held, evictions, stages, num_bytes, seconds, loads, set_aside)


def render_loading(counts: LoadCounts) -> bytes:
    """The text exposition."""
    registry = CollectorRegistry()
    registry.register(LoadCollector(counts))
    return generate_latest(registry)
