from __future__ import annotations

from loramux.engine.adapters.adapter_changes import MAX_CHANGES, AdapterChanges
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
