from __future__ import annotations

import pytest

from benchmarks.sharing.stamping_engine import AdapterSlots, StampScript, passed_s, stamp


def slots(**script: float) -> AdapterSlots:
    return AdapterSlots(StampScript(load_s=1.0, num_slots=2, **script))  # type: ignore[arg-type]


def want(pool: AdapterSlots, *digests: str) -> list[str]:
    """Ask for adapters. Their digests appear in the list once they are resident."""
    found: list[str] = []
    for digest in digests:
        pool.when_resident(digest, lambda digest=digest: found.append(digest))  # type: ignore[misc]
    return found


def test_a_load_takes_its_time() -> None:
    pool = slots()
    found = want(pool, "a")
    pool.advance(10.0)
    assert (found, pool.next_s, pool.num_loads) == ([], 11.0, 1)
    pool.advance(10.9)
    assert not pool.holds("a")
    pool.advance(11.0)
    assert found == ["a"]
    assert want(pool, "a") == ["a"]
    assert pool.num_loads == 1


def test_loads_wait_for_one_another_and_for_room() -> None:
    pool = slots(parallel_loads=1)
    found = want(pool, "a", "b", "c", "a")
    for now_s in (0.0, 1.0, 2.0, 3.0):
        pool.advance(now_s)
    # The third adapter replaces the least recently used one.
    assert found == ["a", "a", "b", "c"]
    assert [pool.holds(one) for one in "abc"] == [False, True, True]
    assert pool.num_evictions == 1


@pytest.mark.parametrize("is_pinned", [False, True])
def test_adapters_in_use_are_not_evicted(is_pinned: bool) -> None:
    pool = slots()
    want(pool, "a", "b")
    pool.advance(0.0)
    pool.advance(1.0)
    for digest in "ab":
        if is_pinned:
            pool.pin(digest, True)
        else:
            pool.use(digest)
    found = want(pool, "c")
    pool.advance(2.0)
    pool.advance(9.0)
    assert not found
    if is_pinned:
        pool.pin("b", False)
    else:
        pool.leave("b")
    pool.advance(10.0)
    pool.advance(11.0)
    assert found == ["c"]
    assert [pool.holds(one) for one in "abc"] == [True, False, True]


def test_stamps_tell_the_time_that_has_passed() -> None:
    for now_s in (0.0, 999.999, 1000.0, 123_456.789):
        assert passed_s(stamp(now_s), now_s + 0.25) == pytest.approx(0.25)
        assert -1000 < stamp(now_s) <= 0
