from __future__ import annotations

from itertools import pairwise

import pytest

from loramux.platform.accounts.change_watch import MAX_AGE_US, MAX_STALE_US, ChangeWatch
from loramux.platform.accounts.principals import Principal, PrincipalCache

FOR_EVER_US = 1 << 62
CALLER = Principal("key_1", "ten_1", "acme", frozenset({"base"}))


def is_cached(cache: PrincipalCache, now_us: int) -> bool:
    return cache.get(b"secret", now_us) is not None


def test_entry_is_trusted_again_after_each_confirmation() -> None:
    cache = PrincipalCache()
    cache.put(b"secret", CALLER, 100, FOR_EVER_US, num_changes=0)
    assert is_cached(cache, 100 + MAX_STALE_US - 1)
    assert not is_cached(cache, 100 + MAX_STALE_US)
    cache.watch.confirm(1000)
    assert is_cached(cache, 1000 + MAX_STALE_US - 1)
    assert not is_cached(cache, 1000 + MAX_STALE_US)


def test_confirmed_entries_that_were_read_together_expire_one_after_another() -> None:
    # A thousand entries, read within 0.1 s.
    times_us = range(10**15, 10**15 + 100_000, 100)
    num_fresh = []
    for part in range(11):
        watch, now_us = ChangeWatch(), times_us[-1] + part * MAX_AGE_US // 10
        watch.confirm(now_us)
        num_fresh.append(sum(watch.is_fresh(read_us, now_us) for read_us in times_us))
    assert num_fresh[:6] == [1000] * 6
    expired = [before - after for before, after in pairwise(num_fresh[5:])]
    assert all(100 <= number <= 300 for number in expired)
    assert num_fresh[-1] == 0


def test_confirmation_does_not_outlast_the_key_or_a_token_that_nobody_watches() -> None:
    cache = PrincipalCache()
    cache.put(b"secret", CALLER, 100, 2000, num_changes=0)
    cache.watch.confirm(1999)
    assert is_cached(cache, 1999)
    assert not is_cached(cache, 2000)
    cache.put(b"secret", CALLER, 100, FOR_EVER_US, num_changes=0, is_watched=False)
    assert is_cached(cache, 100 + MAX_STALE_US - 1)
    assert not is_cached(cache, 100 + MAX_STALE_US)


def test_what_was_read_before_a_change_is_not_cached() -> None:
    cache = PrincipalCache()
    before = cache.watch.num_changes
    cache.clear()
    cache.put(b"secret", CALLER, 100, FOR_EVER_US, num_changes=before)
    assert not is_cached(cache, 100)
    cache.put(b"secret", CALLER, 100, FOR_EVER_US, num_changes=cache.watch.num_changes)
    assert is_cached(cache, 100)


@pytest.mark.parametrize("now_us", [99, 50])
def test_clock_that_was_set_back_extends_no_entry(now_us: int) -> None:
    cache = PrincipalCache()
    cache.put(b"secret", CALLER, 100, FOR_EVER_US, num_changes=0)
    cache.watch.confirm(100 + MAX_STALE_US)
    assert not is_cached(cache, now_us)
    assert is_cached(cache, 101), "by the entry alone, because the confirmation lies ahead"
