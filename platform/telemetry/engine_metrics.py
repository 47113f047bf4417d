"""Prometheus metrics of the engine behind a gateway: its steps, its pool, and adapter loading."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

from prometheus_client import generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from loramux.adapter_store.tiers.tier_figures import LoadCounts
from loramux.engine.protocol.messages import EngineReady, Stats, StepTimes

BOUNDED_TIERS = ("host", "disk")


def render_engine(stats: Stats | None, info: EngineReady | None = None) -> bytes:
    """Return the text exposition. If no engine answers, it contains only `loramux_engine_up 0`."""
    return generate_latest(Collected(_metrics(stats, info)))


def render_engines(engines: Mapping[str, tuple[Stats | None, EngineReady | None]]) -> bytes:
    """Return the text exposition of several engines by their names, which are the values of the label `engine`."""
    merged: dict[str, Metric] = {}
    for name, (stats, info) in engines.items():
        for metric in _metrics(stats, info):
            into = merged.setdefault(metric.name, Metric(metric.name, metric.documentation, metric.type))
            into.samples += [sample._replace(labels={**sample.labels, "engine": name}) for sample in metric.samples]
    return generate_latest(Collected(merged.values()))


class Collected(Collector):
    """Metrics that are rendered once."""

    def __init__(self, metrics: Iterable[Metric]) -> None:
        self._metrics = metrics

    def collect(self) -> Iterable[Metric]:
        return self._metrics


def _metrics(stats: Stats | None, info: EngineReady | None) -> Iterator[Metric]:
    """Yield the engine's own counts, which reset to zero when it restarts. docs/metrics.md describes the series."""
    yield _gauge("loramux_engine_up", "1 while the engine responds", int(stats is not None))
    if stats is None:
        return
    if info is not None:
        labels = ("device", "dtype", "weights")
        formats = GaugeMetricFamily("loramux_engine_info", "The engine's device and formats", labels=labels)
        formats.add_metric((info.device, info.dtype, info.quantization or "float"), 1)
        yield formats
    yield from _steps(stats)
    yield from _pool(stats)
    yield from _host_pages(stats)
    yield from _disk_pages(stats)
    yield from _loading(stats.loading)


def _steps(stats: Stats) -> Iterator[Metric]:
    yield _histogram(
        "loramux_engine_step_seconds", "Duration of an engine loop iteration that ran a step", stats.step_times
    )
    yield _counter("loramux_engine_steps", "Executed steps", stats.num_steps)
    yield _counter(
        "loramux_engine_given_up_steps",
        "Steps of batches that were given up because other requests arrived",
        stats.given_up_steps,
    )
    yield _counter("loramux_engine_mixed_steps", "Steps with two or more adapters", stats.mixed_steps)
    yield _counter("loramux_engine_step_sequences", "Sequences, summed over all steps", stats.num_step_sequences)
    yield _counter("loramux_engine_step_rows", "Tokens computed by steps", stats.num_rows)
    tokens = {
        "prompt": stats.prompt_tokens,
        "cached": stats.cached_tokens,
        "completion": stats.completion_tokens,
        "recomputed": stats.recomputed_tokens,
    }
    yield _counters("loramux_engine_tokens", "Tokens, by kind", "kind", tokens)
    drafts = stats.drafts
    labels = ("source", "outcome")
    drafted = CounterMetricFamily(
        "loramux_engine_draft_tokens", "Verified drafts, by source and outcome", labels=labels
    )
    for source, count, accepted in (
        ("text", drafts.text_tokens, drafts.accepted_text_tokens),
        ("prediction", drafts.prediction_tokens, drafts.accepted_prediction_tokens),
        ("head", drafts.head_tokens, drafts.accepted_head_tokens),
        ("drafter", drafts.drafter_tokens, drafts.accepted_drafter_tokens),
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
    yield _counter("loramux_engine_ended_sequences", "Sequences that ended while they were running", stats.num_ended)
    yield _gauge("loramux_engine_running_sequences", "Running sequences", stats.num_running)
    waiting = stats.waiting
    reasons = {"adapter": waiting.adapter, "pages": waiting.pages, "slot": waiting.slot, "grant": waiting.grant}
    yield _gauges("loramux_engine_waiting_sequences", "Waiting sequences, by reason", "reason", reasons)
    yield _counter("loramux_engine_preemptions", "Preempted sequences", stats.num_preemptions)


def _pool(stats: Stats) -> Iterator[Metric]:
    owners = {"kv": stats.num_kv_pages, "adapter": stats.num_adapter_pages, "free": stats.num_free_pages}
    yield _gauges("loramux_engine_pages", "Pages of the pool, by owner", "owner", owners)
    yield _gauge("loramux_engine_prefix_pages", "KV pages in the prefix cache", stats.num_prefix_pages)
    resident, pinned = len(stats.adapters), sum(adapter.is_pinned for adapter in stats.adapters)
    yield _gauge("loramux_engine_resident_adapters", "Adapters in the pool", resident)
    yield _gauge("loramux_engine_pinned_adapters", "Adapters pinned in the pool", pinned)
    yield _counter("loramux_engine_adapter_loads", "Adapters that became resident", stats.num_adapter_loads)
    evictions = {"adapter": stats.num_adapter_evictions, "prefix_page": stats.num_prefix_evictions}
    yield _counters("loramux_engine_evictions", "Evictions from the pool, by kind", "kind", evictions)


def _host_pages(stats: Stats) -> Iterator[Metric]:
    counts, size = stats.host_pages, stats.page_bytes
    yield _gauge("loramux_engine_host_page_bytes", "Bytes of evicted prefixes in host memory", counts.num_pages * size)
    limit = counts.num_slots * size
    yield _gauge("loramux_engine_host_page_limit_bytes", "Largest size of evicted prefixes in host memory", limit)
    copied = {"save": counts.num_saved, "load": counts.num_loaded}
    yield _counters("loramux_engine_host_page_copies", "Pages copied to and from host memory", "direction", copied)
    yield _counter("loramux_engine_host_page_evictions", "Pages evicted from host memory", counts.num_evictions)
    tokens = {"restored": counts.restored_tokens, "recomputed": counts.recomputed_tokens}
    text = "Tokens with pages in host memory, by what was done"
    yield _counters("loramux_engine_host_page_tokens", text, "outcome", tokens)


def _disk_pages(stats: Stats) -> Iterator[Metric]:
    counts, size = stats.disk_pages, stats.page_bytes
    yield _gauge("loramux_engine_disk_page_bytes", "Bytes of evicted prefixes on disk", counts.num_pages * size)
    limit = counts.num_slots * size
    yield _gauge("loramux_engine_disk_page_limit_bytes", "Largest size of evicted prefixes on disk", limit)
    copied = {"write": counts.num_written, "read": counts.num_read}
    yield _counters("loramux_engine_disk_page_copies", "Pages written to disk and read back", "direction", copied)
    lost = {"evicted": counts.num_evictions, "late": counts.num_lost, "failed": counts.num_failed}
    yield _counters("loramux_engine_disk_page_losses", "Pages that the disk does not keep", "reason", lost)
    tokens = {"read": counts.read_tokens, "recomputed": counts.recomputed_tokens}
    text = "Tokens whose pages were on disk, by whether they were read or computed again"
    yield _counters("loramux_engine_disk_page_tokens", text, "outcome", tokens)


def _loading(counts: LoadCounts) -> Iterator[Metric]:
    lookups = CounterMetricFamily(
        "loramux_adapter_lookups", "Adapter lookups, by tier and result", labels=("tier", "result")
    )
    for tier in counts.tiers:
        lookups.add_metric((tier.tier, "hit"), tier.num_hits)
        lookups.add_metric((tier.tier, "miss"), tier.num_misses)
    yield lookups
    bounded = [tier for tier in counts.tiers if tier.tier in BOUNDED_TIERS]
    held = {tier.tier: tier.used_bytes for tier in bounded}
    yield _gauges("loramux_adapter_tier_bytes", "Bytes of stored adapters, by tier", "tier", held)
    evictions = {tier.tier: tier.num_evictions for tier in bounded}
    yield _counters("loramux_adapter_tier_evictions", "Adapters evicted, by tier", "tier", evictions)
    labels = ("tier", "stage")
    stages = CounterMetricFamily("loramux_adapter_stages", "Completed stages of adapter loads", labels=labels)
    num_bytes = CounterMetricFamily("loramux_adapter_stage_bytes", "Bytes processed by a loading stage", labels=labels)
    seconds = CounterMetricFamily("loramux_adapter_stage_seconds", "Time spent in a loading stage", labels=labels)
    for one in counts.stages:
        at = (one.tier, one.stage)
        stages.add_metric(at, one.count)
        num_bytes.add_metric(at, one.num_bytes)
        seconds.add_metric(at, one.seconds)
    yield from (stages, num_bytes, seconds)
    loads = {"loaded": counts.num_loaded, "failed": counts.num_failed, "given_up": counts.num_given_up}
    yield _counters("loramux_adapter_loads", "Loads into host memory, by outcome", "outcome", loads)
    yield _counter("loramux_adapter_files_set_aside", "Corrupt adapter files set aside", counts.num_set_aside)
    is_open = int(counts.breaker != "closed")
    yield _gauge("loramux_engine_store_breaker_open", "1 while the engine does not call the blob store", is_open)


def _counter(name: str, help_text: str, value: float) -> Metric:
    return CounterMetricFamily(name, help_text, value=value)


def _gauge(name: str, help_text: str, value: float) -> Metric:
    return GaugeMetricFamily(name, help_text, value=value)


def _counters(name: str, help_text: str, label: str, values: Mapping[str, float]) -> Metric:
    family = CounterMetricFamily(name, help_text, labels=(label,))
    for key, value in values.items():
        family.add_metric((key,), value)
    return family


def _gauges(name: str, help_text: str, label: str, values: Mapping[str, float]) -> Metric:
    family = GaugeMetricFamily(name, help_text, labels=(label,))
    for key, value in values.items():
        family.add_metric((key,), value)
    return family


def _histogram(name: str, help_text: str, times: StepTimes) -> Metric:
    total, buckets = 0, []
    for bound, count in zip((*map(str, times.bounds_s), "+Inf"), times.counts, strict=True):
        total += count
        buckets.append((bound, total))
    return HistogramMetricFamily(name, help_text, buckets=buckets, sum_value=times.seconds)
