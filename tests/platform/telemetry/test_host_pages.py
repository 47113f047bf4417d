"""The metrics of evicted prefixes in host memory and on disk."""

from __future__ import annotations

from msgspec import structs

from loramux.engine.protocol.messages import DiskPageCounts, HostPageCounts
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


def test_metrics_report_what_the_disk_keeps_and_loses() -> None:
    counts = DiskPageCounts(
        num_slots=9,
        num_pages=8,
        num_written=7,
        num_read=6,
        num_evictions=5,
        num_lost=4,
        num_failed=3,
        read_tokens=2,
        recomputed_tokens=1,
    )
    text = render_engine(structs.replace(stats(), page_bytes=100, disk_pages=counts)).decode()
    found = [line for line in text.splitlines() if line.startswith("loramux_engine_disk_page")]
    assert found == [
        "loramux_engine_disk_page_bytes 800.0",
        "loramux_engine_disk_page_limit_bytes 900.0",
        'loramux_engine_disk_page_copies_total{direction="write"} 7.0',
        'loramux_engine_disk_page_copies_total{direction="read"} 6.0',
        'loramux_engine_disk_page_losses_total{reason="evicted"} 5.0',
        'loramux_engine_disk_page_losses_total{reason="late"} 4.0',
        'loramux_engine_disk_page_losses_total{reason="failed"} 3.0',
        'loramux_engine_disk_page_tokens_total{outcome="read"} 2.0',
        'loramux_engine_disk_page_tokens_total{outcome="recomputed"} 1.0',
    ]
