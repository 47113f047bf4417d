from __future__ import annotations

from dataclasses import replace

from tests.reliability.open_loop import Counted
from tests.reliability.overload import Figures

CALM = Counted(
    statuses={"200": 100},
    num_complete=100,
    num_in_time=100,
    window_s=10.0,
    first_token_ms={"p50": 20.0, "p99": 40.0, "max": 50.0},
    refusal_ms={},
    lateness_ms={},
)
BUSY = replace(CALM, statuses={"200": 90, "429": 3, "503": 700}, num_in_time=80, refusal_ms={"p99": 9.0})
SLOW = replace(CALM, num_in_time=5, first_token_ms={"p50": 25.0, "p99": 50.0, "max": 70.0})


def test_figures_follow_from_what_the_loads_counted() -> None:
    figures = Figures(
        calm=CALM,
        normal={"priority": CALM, "default": CALM},
        beside={"priority": SLOW, "default": SLOW},
        crowd=BUSY,
        grown={"server: memory, MB": (3.0, 5.0), "process: memory, MB": (6.0, 5.0)},
    )
    assert figures.polite_ratio == 1.25
    # 80 + 5 + 5 answers in time, and 100 at capacity.
    assert figures.goodput_share == 0.9
    assert figures.growing == ["process: memory, MB"]
    assert figures.crowd.num_refused == 703
    assert (CALM.refused_share, figures.crowd.refused_share) == (0, 703 / 793)
