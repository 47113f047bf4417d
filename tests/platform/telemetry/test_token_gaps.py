from __future__ import annotations

from prometheus_client import CollectorRegistry, Histogram, generate_latest

from loramux.platform.telemetry.token_gaps import GAP_SECONDS, TokenGaps

OBSERVED = ((0.0, 1), (0.0025, 2), (0.0026, 3), (0.02, 5), (10.0, 1), (11.0, 2))


def shown(registry: CollectorRegistry) -> list[str]:
    return [line for line in generate_latest(registry).decode().splitlines() if "_created" not in line]


def test_gaps_are_shown_as_by_a_histogram_of_the_library() -> None:
    own, library = CollectorRegistry(), CollectorRegistry()
    gaps = TokenGaps()
    own.register(gaps)
    histogram = Histogram(
        "loramux_token_gap_seconds",
        "Time between consecutive tokens of a choice",
        ("endpoint",),
        buckets=GAP_SECONDS,
        registry=library,
    )
    for endpoint in ("chat", "completions"):
        for seconds, count in OBSERVED:
            gaps.of(endpoint).observe(seconds, count)
            for _ in range(count):
                histogram.labels(endpoint).observe(seconds)
    assert shown(own) == shown(library)
