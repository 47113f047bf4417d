from __future__ import annotations

import random

import pytest

from loramux.engine.pages.page_pool import PageOwner, PagePool


@pytest.fixture
def pool() -> PagePool:
    return PagePool(5)


def test_each_page_is_allocated_once_and_counted_for_its_owner(pool: PagePool) -> None:
    kv, adapter = pool.alloc(2, PageOwner.KV), pool.alloc(3, PageOwner.ADAPTER)
    assert sorted(kv + adapter) == [0, 1, 2, 3, 4]
    assert (pool.num_owned(PageOwner.KV), pool.num_owned(PageOwner.ADAPTER), pool.num_free) == (2, 3, 0)
    pool.free(adapter)
    assert (pool.num_owned(PageOwner.KV), pool.num_owned(PageOwner.ADAPTER), pool.num_free) == (2, 0, 3)
    pool.check_integrity()


def test_allocating_more_than_the_free_pages_fails(pool: PagePool) -> None:
    pool.alloc(3, PageOwner.KV)
    assert pool.can_alloc(2)
    assert not pool.can_alloc(3)
    with pytest.raises(AssertionError, match="3 pages requested, 2 are free"):
        pool.alloc(3, PageOwner.ADAPTER)
    assert (pool.num_free, pool.num_owned(PageOwner.ADAPTER)) == (2, 0)
    pool.check_integrity()


def test_full_pool_can_allocate_zero_pages(pool: PagePool) -> None:
    pool.alloc(5, PageOwner.KV)
    assert pool.can_alloc(0)
    assert pool.alloc(0, PageOwner.KV) == []


def test_pages_cannot_be_allocated_to_the_free_owner(pool: PagePool) -> None:
    with pytest.raises(AssertionError):
        pool.alloc(1, PageOwner.FREE)


def test_longest_free_pages_are_reused_first(pool: PagePool) -> None:
    first, second = pool.alloc(2, PageOwner.KV), pool.alloc(3, PageOwner.KV)
    pool.free(second)
    pool.free(first)
    assert pool.alloc(5, PageOwner.KV) == second + first


def test_shared_page_is_free_after_its_last_holder_releases_it(pool: PagePool) -> None:
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
def test_extra_release_of_a_page_is_refused(pool: PagePool, num_shares: int) -> None:
    (page,) = pool.alloc(1, PageOwner.ADAPTER)
    for _ in range(num_shares):
        pool.share(page)
    pool.free([page] * (1 + num_shares))
    with pytest.raises(AssertionError, match=f"page {page} is freed twice"):
        pool.free([page])
    assert pool.num_free == 5


def test_check_detects_a_free_page_with_holders(pool: PagePool) -> None:
    (page,) = pool.alloc(1, PageOwner.KV)
    pool._free.append(page)
    with pytest.raises(AssertionError):
        pool.check_integrity()


def test_random_operations_account_for_every_page() -> None:
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
