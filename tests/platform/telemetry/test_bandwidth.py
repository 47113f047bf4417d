"""The model bandwidth utilisation of decode steps: its metrics, and the dashboard's panel that divides them."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from msgspec import structs

from loramux.engine.protocol.messages import DecodeReads
from loramux.platform.telemetry.engine_metrics import render_engine
from tests.platform.cluster.test_replica_report import stats

DASHBOARD = Path(__file__).parents[3] / "platform" / "deploy" / "grafana" / "loramux.json"
READS = DecodeReads(num_bytes=600, seconds=2.0, bandwidth=500.0)


def test_metrics_report_what_decode_steps_read() -> None:
    lines = render_engine(structs.replace(stats(), decode_reads=READS)).decode().splitlines()
    assert "loramux_engine_decode_read_bytes_total 600.0" in lines
    assert "loramux_engine_decode_seconds_total 2.0" in lines
    assert "loramux_engine_memory_bandwidth_bytes 500.0" in lines


def test_the_panel_divides_these_metrics() -> None:
    panels = json.loads(DASHBOARD.read_text())["panels"]
    (panel,) = [one for one in panels if one["title"] == "Memory bandwidth used by decode steps (GPU)"]
    (target,) = panel["targets"]
    values = {
        "loramux_engine_decode_read_bytes_total": READS.num_bytes,
        "loramux_engine_decode_seconds_total": READS.seconds,
        "loramux_engine_memory_bandwidth_bytes": READS.bandwidth,
    }
    # Rates over the same interval divide like the counters themselves, and `> 0` drops engines without a GPU.
    expression = re.sub(r"rate\((\w+)\[\$__rate_interval\]\)", r"\1", target["expr"]).replace(" > 0", "")
    named = re.fullmatch(r"max by \(instance, engine\) \((\w+) / \((\w+) \* (\w+)\)\)", expression)
    assert named is not None, expression
    read, seconds, bandwidth = (values[name] for name in named.groups())
    assert read / (seconds * bandwidth) == pytest.approx(READS.utilization)
    assert panel["fieldConfig"]["defaults"]["unit"] == "percentunit"
