"""Prometheus metrics of the engine behind a gateway: its steps, its pool, and adapter loading."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from loramux.adapter_store.tiers.tier_figures import LoadCounts
from loramux.engine.protocol.messages import EngineReady, Stats, StepTimes

BOUNDED_TIERS = ("host", "disk")


class EngineCollector(Collector):
    """The engine's own counts, which reset to zero when the engine restarts. docs/metrics.md describes the series."""

    def __init__(self, stats: Stats) -> None:
        self._stats = stats

    def collect(self) -> Iterator[Metric]:
        yield from _steps(self._stats)
        yield from _pool(self._stats)
        yield from _host_pages(self._stats)
        yield from _loading(self._stats.loading)


def render_engine(stats: Stats | None, info: EngineReady | None = None) -> bytes:
    """Return the text exposition. If no engine answers, it contains only `loramux_engine_up 0`."""
    registry = CollectorRegistry()
    for collector in _collectors(stats, info):
        registry.register(collector)
    return generate_latest(registry)


def render_engines(engines: Mapping[str, tuple[Stats | None, EngineReady | None]]) -> bytes:
    """Return the text exposition of several engines by their names, which are the values of the label `engine`."""
    registry = CollectorRegistry()
    registry.register(_Several({name: _collectors(*found) for name, found in engines.items()}))
    return generate_latest(registry)


def _collectors(stats: Stats | None, info: EngineReady | None) -> Sequence[Collector]:
    up = _Up(stats is not None)
    return (up,) if stats is None else (up, _Info(info), EngineCollector(stats))


class _Several(Collector):
    """The metrics of several engines, each sample with the name of its engine."""

    def __init__(self, engines: Mapping[str, Sequence[Collector]]) -> None:
        self._engines = engines

    def collect(self) -> Iterator[Metric]:
        merged: dict[str, Metric] = {}
        for name, collectors in self._engines.items():
            for metric in (metric for collector in collectors for metric in collector.collect()):
                into = merged.setdefault(metric.name, Metric(metric.name, metric.documentation, metric.type))
                into.samples += [sample._replace(labels={**sample.labels, "engine": name}) for sample in metric.samples]
        yield from merged.values()


class _Up(Collector):
    def __init__(self, is_up: bool) -> None:
        self._is_up = is_up

    def collect(self) -> Iterator[Metric]:
        yield _gauge("loramux_engine_up", "1 while the engine responds", int(self._is_up))


class _Info(Collector):
    def __init__(self, info: EngineReady | None) -> None:
        self._info = info

    def collect(self) -> Iterator[Metric]:
        info = self._info
        if info is not None:
            labels = ("device", "dtype", "weights")
            metric = GaugeMetricFamily("loramux_engine_info", "The engine's device and formats", labels=labels)
            metric.add_metric((info.device, info.dtype, info.quantization or "float"), 1)
            yield metric


def _steps(stats: Stats) -> Iterator[Metric]:
    yield _histogram(
        "loramux_engine_step_seconds", "Duration of an engine loop iteration that ran a step", stats.step_times
    )
    yield _counter("loramux_engine_steps", "Executed steps", stats.num_steps)
    yield _counter("loramux_engine_mixed_steps", "Steps with two or more adapters", stats.mixed_steps)
    yield _counter("loramux_engine_step_sequences", "Sequences, summed over all steps", stats.num_step_sequences)
    yield _counter("loramux_engine_step_rows", "Tokens computed by steps", stats.num_rows)
    tokens = CounterMetricFamily("loramux_engine_tokens", "Tokens, by kind", labels=("kind",))
    for kind, count in (
        ("prompt", stats.prompt_tokens),
        ("cached", stats.cached_tokens),
        ("completion", stats.completion_tokens),
        ("recomputed", stats.recomputed_tokens),
    ):
        tokens.add_metric((kind,), count)
    yield tokens
    drafts = stats.drafts
    labels = ("source", "outcome")
    drafted = CounterMetricFamily(
        "loramux_engine_draft_tokens", "Verified drafts, by source and outcome", labels=labels
    )
    for source, count, accepted in (
        ("text", drafts.text_tokens, drafts.accepted_text_tokens),
        ("prediction", drafts.prediction_tokens, drafts.accepted_prediction_tokens),
        ("head", drafts.head_tokens, drafts.accepted_head_tokens),
        ("grammar", drafts.grammar_tokens, drafts.accepted_grammar_tokens),
    ):
        drafted.add_metric((source, "accepted"), accepted)
        drafted.add_metric((source, "rejected"), count - accepted)
    yield drafted
    yield _counter("loramux_engine_draft_wasted_seconds", "Time of steps spent on rejected drafts", drafts.wasted_s)
    yield _counter(
        "loramux_engine_draft_head_seconds", "Time that decode steps spent on the base's own head", drafts.head_s
    )
    grammars = stats.grammars
    yield _counter("loramux_engine_grammars_compiled", "Grammars compiled", grammars.num_compiled)
    yield _counter(
        "loramux_engine_grammars_reused",
        "Sequences whose grammar was already compiled or being compiled",
        grammars.num_reused,
    )
    yield _counter("loramux_engine_grammar_compile_seconds", "Time to compile grammars", grammars.compile_s)
    yield _counter("loramux_engine_grammar_masks", "Tokens chosen under a grammar's mask", grammars.num_masks)
    yield _counter(
        "loramux_engine_grammar_mask_seconds", "Processor time to compute masks, in other processes", grammars.mask_s
    )
    yield _counter("loramux_engine_grammar_wait_seconds", "Time that steps waited for masks", grammars.wait_s)
    yield _gauge("loramux_engine_grammar_processes", "Processes that compute masks", grammars.num_processes)
    yield _gauge("loramux_engine_graphs", "Cached CUDA graphs of steps", stats.graphs.num_graphs)
    yield _gauge("loramux_engine_graph_bytes", "Device memory taken by CUDA graphs", stats.graphs.num_bytes)
    reads = stats.decode_reads
    yield _counter("loramux_engine_decode_read_bytes", "Bytes that measured decode steps had to read", reads.num_bytes)
    yield _counter("loramux_engine_decode_seconds", "Duration of measured decode steps", reads.seconds)
    yield _gauge("loramux_engine_memory_bandwidth_bytes", "Measured bandwidth of device memory", reads.bandwidth)
    yield _gauge("loramux_engine_running_sequences", "Running sequences", stats.num_running)
    waiting = stats.waiting
    yield _gauges(
        "loramux_engine_waiting_sequences",
        "Waiting sequences, by reason",
        "reason",
        (
            ("adapter", waiting.adapter),
            ("pages", waiting.pages),
            ("slot", waiting.slot),
            ("grant", waiting.grant),
        ),
    )
    yield _counter("loramux_engine_preemptions", "Preempted sequences", stats.num_preemptions)


def _pool(stats: Stats) -> Iterator[Metric]:
    owners = (("kv", stats.num_kv_pages), ("adapter", stats.num_adapter_pages), ("free", stats.num_free_pages))
    yield _gauges("loramux_engine_pages", "Pages of the pool, by owner", "owner", owners)
    yield _gauge("loramux_engine_prefix_pages", "KV pages in the prefix cache", stats.num_prefix_pages)
    resident, pinned = len(stats.adapters), sum(adapter.is_pinned for adapter in stats.adapters)
    yield _gauge("loramux_engine_resident_adapters", "Adapters in the pool", resident)
    yield _gauge("loramux_engine_pinned_adapters", "Adapters pinned in the pool", pinned)
    yield _counter("loramux_engine_adapter_loads", "Adapters that became resident", stats.num_adapter_loads)
    evictions = CounterMetricFamily("loramux_engine_evictions", "Evictions from the pool, by kind", labels=("kind",))
    evictions.add_metric(("adapter",), stats.num_adapter_evictions)
    evictions.add_metric(("prefix_page",), stats.num_prefix_evictions)
    yield evictions


def _host_pages(stats: Stats) -> Iterator[Metric]:
    counts, size = stats.host_pages, stats.page_bytes
    yield _gauge("loramux_engine_host_page_bytes", "Bytes of evicted prefixes in host memory", counts.num_pages * size)
    limit = counts.num_slots * size
    yield _gauge("loramux_engine_host_page_limit_bytes", "Largest size of evicted prefixes in host memory", limit)
    copied = CounterMetricFamily(
        "loramux_engine_host_page_copies", "Pages copied to and from host memory", labels=("direction",)
    )
    copied.add_metric(("save",), counts.num_saved)
    copied.add_metric(("load",), counts.num_loaded)
    yield copied
    yield _counter("loramux_engine_host_page_evictions", "Pages evicted from host memory", counts.num_evictions)
    tokens = CounterMetricFamily(
        "loramux_engine_host_page_tokens", "Tokens with pages in host memory, by what was done", labels=("outcome",)
    )
    tokens.add_metric(("restored",), counts.restored_tokens)
    tokens.add_metric(("recomputed",), counts.recomputed_tokens)
    yield tokens


def _loading(counts: LoadCounts) -> Iterator[Metric]:
    lookups = CounterMetricFamily(
        "loramux_adapter_lookups", "Adapter lookups, by tier and result", labels=("tier", "result")
    )
    held = GaugeMetricFamily("loramux_adapter_tier_bytes", "Bytes of stored adapters, by tier", labels=("tier",))
    evictions = CounterMetricFamily("loramux_adapter_tier_evictions", "Adapters evicted, by tier", labels=("tier",))
    for tier in counts.tiers:
        lookups.add_metric((tier.tier, "hit"), tier.num_hits)
        lookups.add_metric((tier.tier, "miss"), tier.num_misses)
        if tier.tier in BOUNDED_TIERS:
            held.add_metric((tier.tier,), tier.used_bytes)
            evictions.add_metric((tier.tier,), tier.num_evictions)
    labels = ("tier", "stage")
    stages = CounterMetricFamily("loramux_adapter_stages", "Completed stages of adapter loads", labels=labels)
    num_bytes = CounterMetricFamily("loramux_adapter_stage_bytes", "Bytes processed by a loading stage", labels=labels)
    seconds = CounterMetricFamily("loramux_adapter_stage_seconds", "Time spent in a loading stage", labels=labels)
    for one in counts.stages:
        at = (one.tier, one.stage)
        stages.add_metric(at, one.count)
        num_bytes.add_metric(at, one.num_bytes)
        seconds.add_metric(at, one.seconds)
    loads = CounterMetricFamily("loramux_adapter_loads", "Loads into host memory, by outcome", labels=("outcome",))
    for outcome, count in (
        ("loaded", counts.num_loaded),
        ("failed", counts.num_failed),
        ("given_up", counts.num_given_up),
    ):
        loads.add_metric((outcome,), count)
    yield from (lookups, held, evictions, stages, num_bytes, seconds, loads)
    yield _counter("loramux_adapter_files_set_aside", "Corrupt adapter files set aside", counts.num_set_aside)
    is_open = int(counts.breaker != "closed")
    yield _gauge("loramux_engine_store_breaker_open", "1 while the engine does not call the blob store", is_open)


def _counter(name: str, help_text: str, value: float) -> Metric:
    return CounterMetricFamily(name, help_text, value=value)


def _gauge(name: str, help_text: str, value: float) -> Metric:
    return GaugeMetricFamily(name, help_text, value=value)


def _gauges(name: str, help_text: str, label: str, values: Iterable[tuple[str, float]]) -> Metric:
    family = GaugeMetricFamily(name, help_text, labels=(label,))
    for key, value in values:
        family.add_metric((key,), value)
    return family


def _histogram(name: str, help_text: str, times: StepTimes) -> Metric:
    total, buckets = 0, []
    for bound, count in zip((*map(str, times.bounds_s), "+Inf"), times.counts, strict=True):
        total += count
        buckets.append((bound, total))
    return HistogramMetricFamily(name, help_text, buckets=buckets, sum_value=times.seconds)
