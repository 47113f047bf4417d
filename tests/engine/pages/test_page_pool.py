"""A page is either free or has an owner and a count of holders. Calls that would break this rule raise an error."""

from __future__ import annotations

import random

import pytest

from loramux.engine.pages.page_pool import PageOwner, PagePool


@pytest.fixture
def pool() -> PagePool:
    return PagePool(5)


def test_every_page_is_handed_out_once_and_counted_for_its_owner(pool: PagePool) -> None:
    kv, adapter = pool.alloc(2, PageOwner.KV), pool.alloc(3, PageOwner.ADAPTER)
    assert sorted(kv + adapter) == [0, 1, 2, 3, 4]
    assert (pool.num_owned(PageOwner.KV), pool.num_owned(PageOwner.ADAPTER), pool.num_free) == (2, 3, 0)
    pool.free(adapter)
    assert (pool.num_owned(PageOwner.KV), pool.num_owned(PageOwner.ADAPTER), pool.num_free) == (2, 0, 3)
    pool.check_integrity()


def test_no_more_pages_are_given_than_are_free(pool: PagePool) -> None:
    pool.alloc(3, PageOwner.KV)
    assert pool.can_alloc(2)
    assert not pool.can_alloc(3)
    with pytest.raises(AssertionError, match="3 pages requested, 2 are free"):
        pool.alloc(3, PageOwner.ADAPTER)
    assert (pool.num_free, pool.num_owned(PageOwner.ADAPTER)) == (2, 0)
    pool.check_integrity()


def test_a_full_pool_still_gives_no_pages(pool: PagePool) -> None:
    pool.alloc(5, PageOwner.KV)
    assert pool.can_alloc(0)
    assert pool.alloc(0, PageOwner.KV) == []


def test_nobody_is_given_pages_as_free_ones(pool: PagePool) -> None:
    with pytest.raises(AssertionError):
        pool.alloc(1, PageOwner.FREE)


def test_pages_that_were_freed_longest_ago_are_reused_first(pool: PagePool) -> None:
    first, second = pool.alloc(2, PageOwner.KV), pool.alloc(3, PageOwner.KV)
    pool.free(second)
    pool.free(first)
    assert pool.alloc(5, PageOwner.KV) == second + first


def test_a_shared_page_is_free_once_each_holder_has_given_it_back(pool: PagePool) -> None:
    (page,) = pool.alloc(1, PageOwner.KV)
    pool.share(page)
    pool.share(page)
    for num_free in (4, 4, 5):
        pool.free([page])
        assert pool.num_free == num_free
        pool.check_integrity()


def test_a_free_page_cannot_be_shared(pool: PagePool) -> None:
    with pytest.raises(AssertionError, match="page 2 is free and cannot be shared"):
        pool.share(2)


@pytest.mark.parametrize("num_shares", [0, 2])
def test_a_page_is_given_back_no_oftener_than_it_was_taken(pool: PagePool, num_shares: int) -> None:
    (page,) = pool.alloc(1, PageOwner.ADAPTER)
    for _ in range(num_shares):
        pool.share(page)
    pool.free([page] * (1 + num_shares))
    with pytest.raises(AssertionError, match=f"page {page} is freed twice"):
        pool.free([page])
    assert pool.num_free == 5


def test_the_check_finds_a_page_that_is_free_and_held(pool: PagePool) -> None:
    (page,) = pool.alloc(1, PageOwner.KV)
    pool._free.append(page)
    with pytest.raises(AssertionError):
        pool.check_integrity()


def test_a_random_life_keeps_every_page_accounted_for() -> None:
    rng, pool = random.Random(4), PagePool(20)
    holds: list[int] = []
    for _ in range(2000):
        match rng.randrange(3):
            case 0 if pool.can_alloc(count := rng.randint(1, 6)):
                holds += pool.alloc(count, rng.choice([PageOwner.KV, PageOwner.ADAPTER]))
            case 1 if holds:
                page = rng.choice(holds)
                pool.share(page)
                holds.append(page)
            case 2 if holds:
                pool.free([holds.pop(rng.randrange(len(holds)))])
        pool.check_integrity()
        assert pool.num_free == 20 - len(set(holds))
    pool.free(holds)
    assert pool.num_free == 20
