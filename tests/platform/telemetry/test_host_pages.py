"""The metrics of evicted prefixes in host memory."""

from __future__ import annotations

from msgspec import structs

from loramux.engine.protocol.messages import HostPageCounts
from loramux.platform.telemetry.engine_metrics import render_engine
from tests.platform.cluster.test_replica_report import stats


def test_metrics_report_bytes_copies_and_decisions() -> None:
    counts = HostPageCounts(
        num_slots=9, num_pages=8, num_saved=7, num_loaded=6, num_evictions=5, restored_tokens=4, recomputed_tokens=3
    )
    text = render_engine(structs.replace(stats(), page_bytes=100, host_pages=counts)).decode()
    found = [line for line in text.splitlines() if line.startswith("loramux_engine_host_page")]
    assert found == [
        "loramux_engine_host_page_bytes 800.0",
        "loramux_engine_host_page_limit_bytes 900.0",
        'loramux_engine_host_page_copies_total{direction="save"} 7.0',
        'loramux_engine_host_page_copies_total{direction="load"} 6.0',
        "loramux_engine_host_page_evictions_total 5.0",
        'loramux_engine_host_page_tokens_total{outcome="restored"} 4.0',
        'loramux_engine_host_page_tokens_total{outcome="recomputed"} 3.0',
    ]
