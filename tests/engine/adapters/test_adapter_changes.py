from __future__ import annotations

from loramux.engine.adapters.adapter_changes import MAX_CHANGES, AdapterChanges, unseen
from tests.engine.adapters.test_adapter_pool import Bench


def test_only_later_changes_are_returned_and_the_oldest_are_forgotten() -> None:
    changes = AdapterChanges(first_number=100)
    for number in range(MAX_CHANGES + 3):
        changes.note(str(number), "loaded")
    assert len(changes.after(0)) == MAX_CHANGES
    assert changes.after(0)[0].number == 103
    assert [one.digest for one in changes.after(100 + MAX_CHANGES + 1)] == [str(MAX_CHANGES + 2)]


def test_numbers_of_a_later_engine_are_higher() -> None:
    earlier = AdapterChanges()
    earlier.note("a", "loaded")
    last = earlier.after(0)[-1].number
    later = AdapterChanges()
    later.note("a", "loaded")
    assert [one.digest for one in later.after(last)] == ["a"]


def test_pool_notes_loads_and_evictions() -> None:
    bench = Bench()
    bench.bring("a")
    bench.bring("large")
    kinds = [(one.digest, one.kind) for one in bench.pool.changes.after(0)]
    assert kinds == [("a", "loaded"), ("a", "evicted"), ("large", "loaded")]


def test_no_change_is_lost_if_the_clock_was_set_back_before_a_restart() -> None:
    earlier, later = AdapterChanges(first_number=1000), AdapterChanges(first_number=100)
    earlier.note("a", "loaded")
    seen = earlier.after(0)[-1].number
    assert later.after(seen) == ()
    for digest in "bc":
        later.note(digest, "loaded")
    new = unseen(later.after(seen), seen)
    assert [one.digest for one in new] == ["b", "c"]
    seen = new[-1].number
    later.note("c", "evicted")
    assert [one.kind for one in unseen(later.after(seen), seen)] == ["evicted"]


def test_repeated_changes_are_not_new() -> None:
    changes = AdapterChanges(first_number=100)
    for digest in "abc":
        changes.note(digest, "loaded")
    assert [one.digest for one in unseen(changes.after(0), 101)] == ["c"]
    assert list(unseen(changes.after(0), 102)) == []
