"""The ten policies that refuse most, whatever their number."""

from __future__ import annotations

from loramux.platform.telemetry.metrics import MAX_POLICIES, REFUSALS_WINDOW_S, TopRefusals


def test_only_the_most_refusing_are_shown_and_they_are_forgotten() -> None:
    now = [0.0]
    refusals = TopRefusals(num_shown=2, clock=lambda: now[0])
    for policy, times in (("a", 3), ("b", 1), ("c", 2)):
        for _ in range(times):
            refusals.count(policy)
    assert refusals.top() == [("a", 3), ("c", 2)]
    now[0] += REFUSALS_WINDOW_S
    refusals.count("b")
    assert refusals.top() == [("a", 3), ("b", 2)], "what happened in the window before still counts"
    now[0] += REFUSALS_WINDOW_S
    assert refusals.top() == [("b", 1)]
    now[0] += 5 * REFUSALS_WINDOW_S
    assert refusals.top() == []


def test_a_flood_of_policies_takes_bounded_memory() -> None:
    refusals = TopRefusals(clock=lambda: 0.0)
    for number in range(MAX_POLICIES + 100):
        refusals.count(f"qta_{number}")
    refusals.count("qta_0")
    assert refusals.top()[0] == ("qta_0", 2)
    assert refusals.top()[-1][1] == 1
    assert len(refusals._current) == MAX_POLICIES
