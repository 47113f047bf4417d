from __future__ import annotations

import pytest

from loramux.platform.accounts.change_watch import MAX_AGE_US, MAX_STALE_US
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


def test_no_confirmation_keeps_an_entry_for_longer_than_a_minute() -> None:
    cache = PrincipalCache()
    cache.put(b"secret", CALLER, 100, FOR_EVER_US, num_changes=0)
    cache.watch.confirm(100 + MAX_AGE_US - 1)
    assert is_cached(cache, 100 + MAX_AGE_US - 1)
    assert not is_cached(cache, 100 + MAX_AGE_US)


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
