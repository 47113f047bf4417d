from __future__ import annotations

from benchmarks.gpu.kernel_times import Span, summary


def test_overlapping_kernels_are_busy_once() -> None:
    spans = [Span("a", 0.0, 10.0), Span("b", 8.0, 12.0), Span("a", 20.0, 24.0)]
    found = summary(spans, num_steps=2)
    assert (found["step_us"], found["busy_us"]) == (12.0, 8.0)
    assert found["kernels"] == {"a": {"us": 7.0, "launches": 1.0}, "b": {"us": 2.0, "launches": 0.5}}
