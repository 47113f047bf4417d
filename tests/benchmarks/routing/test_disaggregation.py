from __future__ import annotations

import pytest

from benchmarks.answers import CheckError
from benchmarks.routing import disaggregation
from benchmarks.routing.disaggregation import Fleet, Layout, Workload, best, measure

SMALL = Workload("small", 300, 20)


@pytest.fixture(autouse=True)
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disaggregation, "SETTLE_S", 0.5)
    monkeypatch.setattr(disaggregation, "MEASURE_S", 1.5)


def test_separate_engines_move_each_prompt_once_and_keep_gaps_even() -> None:
    both, split = (measure(SMALL, layout, 0.5, 1) for layout in (Layout(0, 2048), Layout(2, 4096)))
    assert (both["requests"], both["moved_gb_per_s"]) == (split["requests"], 0)
    prompts_gb_per_s = split["requests_per_s"] * 300 * disaggregation.KV_BYTES / 1e9
    assert split["moved_gb_per_s"] == pytest.approx(prompts_gb_per_s, rel=0.25)
    assert split["p99_gap_s"] < both["p99_gap_s"], "no prompt delays a decode step"
    assert both == measure(SMALL, Layout(0, 2048), 0.5, 1), "equal seeds give equal figures"


def test_one_engine_on_a_side_holds_fewer_adapters() -> None:
    lone, spread = (measure(SMALL, Layout(number, 4096), 0.3, 1) for number in (1, 2))
    assert lone["hit_rate"] < 0.95 < spread["hit_rate"]


def test_lost_requests_are_noticed() -> None:
    fleet = Fleet(SMALL, Layout(0, 512), 20.0)
    fleet.run(1.0)
    fleet._places.popitem()
    with pytest.raises(CheckError):
        fleet._check()


def test_the_best_rate_meets_both_goals() -> None:
    def row(layout: Layout, rate: float, wait_s: float, gap_s: float) -> dict[str, object]:
        figures = {"p99_second_token_s": wait_s, "p99_gap_s": gap_s}
        return {"workload": SMALL.name, "layout": layout.name, "requests_per_s": rate, **figures}

    both = Layout(0, 512)
    rows = [row(both, 1, 0.1, 0.01), row(both, 2, 0.2, 0.02), row(both, 3, 0.2, 0.05), row(both, 4, 5.0, 0.02)]
    rows.append(row(Layout(1, 4096), 9, 0.1, 0.001))
    assert best(rows, SMALL, 0.03, is_split=False) == rows[1]
    assert best(rows, SMALL, 0.03, is_split=True) == rows[4]
    assert best(rows, SMALL, 0.005, is_split=False) is None
