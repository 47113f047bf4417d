from __future__ import annotations

import pytest

from loramux.engine.pages.disk_pages import FIRST_WAIT_S, DiskPages
from loramux.engine.pages.page_index import PageCopy
from loramux.engine.protocol.messages import DiskPageCounts, ForgetPrefixes, Unload
from tests.engine.pages.test_host_pages import (
    LAYOUTS,
    MAX_LEN,
    OTHER,
    OWNER,
    answered,
    ask,
    evict_all,
    small_engine,
    tokens,
)
from tests.engine.simulated_engine import Simulation, simulate_engine, stats_of

PROMPT = tokens(150)


def disk_engine(
    layers: str = "whole", num_pages: int = 20, num_host_pages: int = 200, num_disk_pages: int = 400
) -> Simulation:
    return simulate_engine(
        num_pages=num_pages,
        adapters={"a": 1, "b": 1},
        max_model_len=MAX_LEN,
        cache=LAYOUTS[layers],
        num_host_pages=num_host_pages,
        num_disk_pages=num_disk_pages,
    )


def evict_host_pages(simulation: Simulation) -> None:
    """Evict all pages from the pool and from host memory to disk."""
    evict_all(simulation)
    host = simulation.prefixes.host
    while host._evict_for(OWNER, to_disk=True):
        continue
    host.poll()
    simulation.host_memory.forget(host.free_slots)
    host.check_integrity()
    assert len(host) == 0


def asked(layers: str = "whole", digest: str | None = None) -> Simulation:
    """An engine that has answered PROMPT, and has its pages only on disk."""
    simulation = disk_engine(layers)
    ask(simulation, "first", PROMPT, digest)
    evict_host_pages(simulation)
    assert counts_of(simulation).num_pages > 0
    return simulation


def counts_of(simulation: Simulation) -> DiskPageCounts:
    return stats_of(simulation).disk_pages


@pytest.mark.parametrize("layers", LAYOUTS)
@pytest.mark.parametrize("digest", [None, "a"])
def test_a_prefix_on_disk_is_restored_and_billed_as_cached(layers: str, digest: str | None) -> None:
    roomy = small_engine(layers, num_pages=400, num_host_pages=0)
    ask(roomy, "first", PROMPT, digest)
    expected = ask(roomy, "again", PROMPT, digest)
    assert expected > 0
    simulation = asked(layers, digest)
    assert ask(simulation, "again", PROMPT, digest) == expected
    counts, in_host = counts_of(simulation), stats_of(simulation).host_pages
    assert counts.read_tokens == in_host.restored_tokens == expected
    assert counts.num_read == in_host.num_loaded > 0


def test_pages_on_disk_follow_those_in_the_pool_and_in_host_memory() -> None:
    simulation = disk_engine(num_pages=40)
    ask(simulation, "first", PROMPT)
    evict_host_pages(simulation)
    ask(simulation, "beginning", PROMPT[:96])
    evict_all(simulation)
    ask(simulation, "start of the beginning", PROMPT[:48])
    assert [len(simulation.prefixes), len(simulation.prefixes.host)] == [3, 6]
    num_read = counts_of(simulation).num_read
    assert ask(simulation, "all", PROMPT) == 144
    assert counts_of(simulation).num_read - num_read == 3


@pytest.mark.parametrize(
    ("digest", "isolation_key"),
    [(None, OWNER), ("b", OWNER), ("a", OTHER), ("a", b"")],
    ids=["the base", "another adapter", "another owner", "an owner without a key"],
)
def test_another_adapter_or_owner_finds_nothing_on_disk(digest: str | None, isolation_key: bytes) -> None:
    simulation = asked(digest="a")
    assert ask(simulation, "other", PROMPT, digest, isolation_key) == 0
    assert counts_of(simulation).num_read == 0


def test_an_unloaded_adapters_pages_on_disk_are_erased() -> None:
    simulation = asked(digest="a")
    ask(simulation, "base", PROMPT)
    evict_host_pages(simulation)
    simulation.engine.unload(b"gateway", Unload(call_id="u", digest="a"))
    simulation.run()
    assert ask(simulation, "again", PROMPT, "a") == 0
    assert counts_of(simulation).num_pages == len(simulation.disk.contents()) == 9
    assert ask(simulation, "base again", PROMPT) == 144


def test_a_broken_adapters_pages_on_disk_are_erased() -> None:
    simulation = asked(digest="a")
    simulation.executor.not_finite_for.add("a")
    simulation.add("broken", digest="a", isolation_key=OWNER)
    simulation.run()
    assert simulation.finished["broken"].code == "not_finite"
    assert simulation.disk.contents() == []


def test_pages_on_disk_of_a_base_that_computed_nan_are_erased() -> None:
    """Without an adapter, no digest is purged, so the sequence's own pages are deleted by their keys."""
    simulation = disk_engine()
    simulation.engine.add(b"gateway", simulation.make_add("first", PROMPT, 60, isolation_key=OWNER))
    for _ in range(5):
        simulation.step()
    [sequence] = simulation.scheduler.running
    host = simulation.prefixes.host
    for cached in sequence.tables[0].cached:
        # The pages are on disk, as if they had been evicted before another sequence computed them again.
        assert cached is not None
        host.save(cached)
    while host._evict_for(OWNER, to_disk=True):
        continue
    host.poll()
    assert len(simulation.disk.contents()) > 0
    simulation.scheduler.finish(sequence, is_broken=True)
    host.poll()
    assert simulation.disk.contents() == []


@pytest.mark.parametrize("layers", LAYOUTS)
def test_a_deleted_tenants_pages_on_disk_are_erased(layers: str) -> None:
    simulation = disk_engine(layers)
    for isolation_key in (OWNER, OTHER):
        ask(simulation, f"first of {isolation_key!r}", PROMPT, isolation_key=isolation_key)
    evict_host_pages(simulation)
    num_pages = counts_of(simulation).num_pages
    simulation.engine.forget_prefixes(b"gateway", ForgetPrefixes(call_id="f", isolation_keys=(OWNER,)))
    assert counts_of(simulation).num_pages == num_pages // 2
    assert ask(simulation, "again", PROMPT) == 0
    assert len(simulation.disk.contents()) == num_pages // 2
    assert ask(simulation, "other again", PROMPT, isolation_key=OTHER) > 0


def purge_adapter(simulation: Simulation) -> None:
    simulation.prefixes.purge("a")


def purge_owner(simulation: Simulation) -> None:
    simulation.prefixes.purge_owners({OWNER})


def forget_pages(simulation: Simulation) -> None:
    disk = simulation.prefixes.host.disk
    moved = [*disk._index, *(one.page for one in (*disk._writing.values(), *disk._reading.values()))]
    for key in [page.key for page in moved]:
        simulation.prefixes.forget(key)


@pytest.mark.parametrize("delete", [purge_adapter, purge_owner, forget_pages])
def test_pages_that_are_deleted_while_they_are_written_are_erased(delete: object) -> None:
    assert callable(delete)
    simulation = disk_engine()
    ask(simulation, "first", PROMPT, "a")
    evict_all(simulation)
    simulation.disk.is_holding = True
    host = simulation.prefixes.host
    while host._evict_for(OWNER, to_disk=True):
        continue
    assert host.disk.num_writing == 9
    delete(simulation)
    simulation.disk.is_holding = False
    host.poll()
    host.poll()
    assert simulation.disk.contents() == []
    assert len(host.free_slots) == host.num_slots
    assert ask(simulation, "again", PROMPT, "a") == 0


def test_an_idle_engine_erases_pages_that_were_being_written_when_they_were_deleted() -> None:
    simulation = disk_engine()
    ask(simulation, "first", PROMPT)
    evict_all(simulation)
    simulation.disk.is_holding = True
    host = simulation.prefixes.host
    while host._evict_for(OWNER, to_disk=True):
        continue
    simulation.engine.forget_prefixes(b"gateway", ForgetPrefixes(call_id="f", isolation_keys=(OWNER,)))
    assert simulation.engine.has_work
    simulation.disk.is_holding = False
    simulation.run()
    assert len(host.free_slots) == host.num_slots
    simulation.disk.poll()
    assert simulation.disk.contents() == []


@pytest.mark.parametrize("delete", [purge_adapter, purge_owner, forget_pages])
def test_pages_that_are_deleted_while_they_are_read_are_not_used(delete: object) -> None:
    assert callable(delete)
    simulation = asked(digest="a")
    simulation.disk.is_holding = True
    add = simulation.make_add("again", PROMPT, 4, "a", isolation_key=OWNER)
    simulation.engine.add(b"gateway", add)
    for _ in range(4):
        simulation.step()
    assert len(simulation.prefixes.host.disk.busy_host_slots) == 9
    delete(simulation)
    simulation.disk.is_holding = False
    assert answered(simulation, add) == 0
    assert simulation.disk.contents() == []


def test_pages_whose_slots_on_disk_were_replaced_while_they_are_read_are_deleted() -> None:
    for delete in (purge_adapter, purge_owner, forget_pages):
        simulation = disk_engine(num_disk_pages=9)
        ask(simulation, "first", PROMPT, "a")
        evict_host_pages(simulation)
        simulation.disk.is_holding = True
        simulation.engine.add(b"gateway", simulation.make_add("again", PROMPT, 4, "a", isolation_key=OWNER))
        for _ in range(4):
            simulation.step()
        host = simulation.prefixes.host
        assert len(host.disk._reading) == 9
        for number in range(9):
            # They take the slots on disk of the pages that are being read.
            slot = host._free.pop()
            simulation.host_memory.fill(slot, [])
            assert host.disk.write(PageCopy(b"%d" % number, slot, None, OTHER))
        assert OWNER in host.owners()
        delete(simulation)
        assert OWNER not in host.owners()
        simulation.disk.is_holding = False
        host.poll()
        assert (OWNER in host.owners(), len(host)) == (False, 0)


def test_a_full_disk_replaces_the_least_recently_used_pages() -> None:
    simulation = disk_engine(num_disk_pages=12)
    for seed in range(3):
        ask(simulation, f"{seed}", tokens(100, seed), isolation_key=b"%d" % seed)
        evict_host_pages(simulation)
    counts = counts_of(simulation)
    assert (counts.num_slots, counts.num_pages, counts.num_evictions) == (12, 12, 6)
    assert len(simulation.disk.contents()) == 12
    cached = [ask(simulation, f"again {seed}", tokens(100, seed), isolation_key=b"%d" % seed) for seed in (2, 1, 0)]
    assert cached == [96, 96, 0]


def test_a_disk_without_space_loses_pages_and_nothing_else() -> None:
    simulation = disk_engine()
    ask(simulation, "first", PROMPT)
    simulation.disk.fails = True
    evict_host_pages(simulation)
    simulation.prefixes.host.poll()
    # The writes failed, and the erasures of what they may have left.
    assert counts_of(simulation).num_failed == 18
    assert len(simulation.prefixes.host.free_slots) == 200
    assert ask(simulation, "again", PROMPT) == 0


def test_a_page_that_cannot_be_read_is_computed_and_erased() -> None:
    simulation = asked()
    simulation.disk.fails = True
    assert ask(simulation, "again", PROMPT) == 0
    assert counts_of(simulation).num_failed == 18
    assert counts_of(simulation).num_pages == 0


def test_others_run_while_a_sequence_waits_for_the_disk() -> None:
    simulation = asked()
    simulation.disk.is_holding = True
    add = simulation.make_add("again", PROMPT, 4, isolation_key=OWNER)
    simulation.engine.add(b"gateway", add)
    simulation.add("other")
    for _ in range(10):
        simulation.step()
    assert list(simulation.finished)[-1] == "other"
    assert not simulation.step()
    simulation.disk.is_holding = False
    assert answered(simulation, add) == 144


@pytest.mark.parametrize("tier", ["default", "flex"])
def test_sequences_that_wait_for_the_disk_leave_their_turns_to_others(tier: str) -> None:
    simulation = asked()
    simulation.disk.is_holding = True
    adds = [
        simulation.make_add(f"again {number}", PROMPT, 4, isolation_key=OWNER, service_tier="priority", share_key="p")
        for number in range(simulation.scheduler.limits.max_sequences)
    ]
    for add in adds:
        simulation.engine.add(b"gateway", add)
    for _ in range(3):
        simulation.step()
    simulation.engine.add(b"gateway", simulation.make_add("other", tokens(40, 9), 4, service_tier=tier, share_key="o"))
    for _ in range(10):
        simulation.step()
    assert list(simulation.finished) == ["first", "other"]
    simulation.disk.is_holding = False
    simulation.run()
    assert [simulation.finished[add.sequence_id].cached_tokens for add in adds] == [144] * len(adds)


def test_a_sequence_that_ends_while_it_waits_for_the_disk_gets_no_turn() -> None:
    simulation = asked()
    simulation.disk.is_holding = True
    simulation.engine.add(b"gateway", simulation.make_add("again", PROMPT, 4, isolation_key=OWNER))
    simulation.step()
    [sequence] = simulation.scheduler.queue.sequences()
    assert sequence.awaits_disk
    simulation.scheduler.finish(sequence)
    simulation.disk.is_holding = False
    simulation.step()
    assert (simulation.scheduler.has_work, simulation.scheduler.running) == (False, [])


def test_pages_are_read_from_disk_beside_a_long_prompt() -> None:
    simulation = simulate_engine(
        num_pages=120,
        adapters={},
        max_model_len=MAX_LEN,
        cache=LAYOUTS["whole"],
        num_host_pages=200,
        num_disk_pages=400,
        max_batch_tokens=16,
    )
    ask(simulation, "first", PROMPT)
    evict_host_pages(simulation)
    simulation.engine.add(b"gateway", simulation.make_add("long", tokens(400, 7), 4, isolation_key=OTHER))
    simulation.step()
    simulation.engine.add(b"gateway", simulation.make_add("again", PROMPT, 1, isolation_key=OWNER))
    for _ in range(4):
        simulation.step()
    assert simulation.finished["again"].cached_tokens == 144
    assert "long" not in simulation.finished


def test_a_sequence_does_not_wait_longer_for_the_disk_than_computing_takes() -> None:
    simulation = asked()
    simulation.prefixes.host.note_computed(1000, 10.0)
    simulation.disk.is_holding = True
    simulation.engine.add(b"gateway", simulation.make_add("again", PROMPT, 4, isolation_key=OWNER))
    for now_s, is_waiting in ((0.0, True), (1.43, True), (1.45, False)):
        simulation.clock.now = now_s
        assert simulation.step() != is_waiting
    simulation.run()
    assert simulation.finished["again"].cached_tokens == 0
    simulation.disk.is_holding = False
    assert ask(simulation, "later", PROMPT) == 144


def test_a_hanging_disk_delays_a_sequence_by_a_bounded_time_before_prompts_are_measured() -> None:
    simulation = asked()
    simulation.disk.is_holding = True
    simulation.engine.add(b"gateway", simulation.make_add("again", PROMPT, 4, isolation_key=OWNER))
    assert not simulation.step()
    simulation.clock.now += FIRST_WAIT_S
    assert simulation.step()


@pytest.mark.parametrize(("read_s", "cached"), [(0.01, 144), (0.017, 0)])
def test_pages_are_read_only_if_that_is_faster_than_computing(read_s: float, cached: int) -> None:
    simulation = asked()
    simulation.disk.read_s = read_s
    simulation.prefixes.host.note_computed(1000, 1.0)
    assert ask(simulation, "again", PROMPT) == cached
    assert counts_of(simulation).recomputed_tokens == 144 - cached


def test_reads_that_wait_for_others_count_as_slow() -> None:
    simulation = asked()
    ask(simulation, "other", tokens(150, seed=1), isolation_key=OTHER)
    evict_host_pages(simulation)
    simulation.disk.read_s = 0.01
    simulation.prefixes.host.note_computed(1000, 1.0)
    simulation.disk.is_holding = True
    for name, seed, key in (("again", 0, OWNER), ("other again", 1, OTHER)):
        add = simulation.make_add(name, tokens(150, seed), 4, isolation_key=key)
        simulation.engine.add(b"gateway", add)
    simulation.step()
    assert [one.sequence_id for one in simulation.scheduler.running] == ["other again"]


def test_pages_are_written_once() -> None:
    simulation = asked()
    for number in range(3):
        assert ask(simulation, f"again {number}", PROMPT) == 144
        evict_host_pages(simulation)
    assert counts_of(simulation).num_written == 9


def test_host_memory_keeps_slots_for_pages_that_come() -> None:
    """Pages leave for the disk before host memory is full. Without a disk tier, it fills up."""
    for num_disk_pages, expected in ((400, (14, 2, 0)), (0, (16, 0, 0))):
        simulation = disk_engine(num_pages=60, num_host_pages=16, num_disk_pages=num_disk_pages)
        ask(simulation, "first", tokens(400))
        evict_all_slowly(simulation)
        host = simulation.prefixes.host
        assert (len(host), len(host.free_slots), counts_of(simulation).num_lost) == expected


def evict_all_slowly(simulation: Simulation) -> None:
    while simulation.adapters.reclaimer.policy.num_pages:
        simulation.adapters.reclaimer.evict_one(0)
        simulation.prefixes.host.poll()


def test_a_disk_that_is_too_slow_loses_pages() -> None:
    simulation = disk_engine(num_pages=60, num_host_pages=16)
    simulation.disk.is_holding = True
    ask(simulation, "first", tokens(400))
    evict_all(simulation)
    counts, host = counts_of(simulation), simulation.prefixes.host
    assert (host.disk.num_writing, len(host), counts.num_lost) == (2, 14, 9)
    simulation.disk.is_holding = False
    host.poll()
    host.check_integrity()
    assert len(host.free_slots) == 2


def test_a_prefix_of_half_of_host_memory_or_more_is_read_in_part() -> None:
    simulation = disk_engine(num_pages=60, num_host_pages=16)
    ask(simulation, "first", tokens(400))
    evict_all_slowly(simulation)
    evict_host_pages(simulation)
    assert ask(simulation, "again", tokens(400)) == (16 // 2 - 1) * 16


@pytest.mark.parametrize(("num_host_pages", "num_tokens"), [(8, 150), (16, 400), (20, 400)])
def test_the_end_of_a_prefix_does_not_replace_its_beginning(num_host_pages: int, num_tokens: int) -> None:
    """The end of a prefix is evicted first, so the beginning fills host memory, and the end is on disk."""
    simulation = disk_engine(num_pages=60, num_host_pages=num_host_pages)
    ask(simulation, "first", tokens(num_tokens))
    evict_all_slowly(simulation)
    num_in_host = len(simulation.prefixes.host)
    assert num_in_host == num_host_pages - max(1, num_host_pages // 8)
    assert ask(simulation, "again", tokens(num_tokens)) == num_in_host * 16


def test_a_sequence_without_room_for_its_pages_does_not_wait() -> None:
    """The pages of three tenants on disk are more than host memory has room for."""
    simulation = disk_engine(num_pages=100, num_host_pages=24)
    for tenant in range(3):
        ask(simulation, f"first {tenant}", tokens(150, tenant), isolation_key=b"%d" % tenant)
        evict_host_pages(simulation)
    for tenant in range(3):
        add = simulation.make_add(f"again {tenant}", tokens(150, tenant), 4, isolation_key=b"%d" % tenant)
        simulation.engine.add(b"gateway", add)
    simulation.run()
    assert [simulation.finished[f"again {tenant}"].cached_tokens for tenant in range(3)] == [144, 32, 0]
    assert not simulation.prefixes.host.disk._wanted


def test_pages_for_which_no_sequence_waits_any_longer_are_not_read() -> None:
    simulation = disk_engine(num_pages=100, num_host_pages=24)
    ask(simulation, "first", PROMPT)
    evict_host_pages(simulation)
    ask(simulation, "other", tokens(400, seed=1), isolation_key=OTHER)
    evict_all_slowly(simulation)
    simulation.disk.is_holding = True
    host = simulation.prefixes.host
    pages = [page for page in host.disk._index if page.owner == OWNER]
    wait = host.fetch(pages, [], 0, 144)
    num_reading, num_wanted = len(host.disk._reading), len(host.disk._wanted)
    assert num_reading + num_wanted == len(pages) == len(host.disk.awaited())
    assert num_wanted > 0
    simulation.clock.now = wait.until_s
    host.poll()
    assert not host.disk._wanted
    assert len(host.disk.awaited()) == num_reading


def test_a_preempted_sequence_resumes_from_disk() -> None:
    """It may wait again, because its pages can have gone to disk since it began."""
    simulation = disk_engine()
    add = simulation.make_add("first", PROMPT, 20, isolation_key=OWNER)
    simulation.engine.add(b"gateway", add)
    for _ in range(10):
        simulation.step()
    [sequence] = simulation.scheduler.running
    simulation.scheduler.preempt(sequence)
    evict_host_pages(simulation)
    simulation.run()
    assert simulation.tokens["first"] == simulation.expected(add)
    assert counts_of(simulation).read_tokens == 144


def test_a_tier_that_is_off_looks_for_nothing() -> None:
    simulation = small_engine()
    disk = simulation.prefixes.host.disk
    assert (disk.is_on, len(disk), disk.find(b"a"), disk.poll()) == (False, 0, None, [])
    add = simulation.make_add("first", PROMPT, 4, isolation_key=OWNER)
    simulation.engine.add(b"gateway", add)
    simulation.step()
    [sequence] = simulation.scheduler.running
    assert sequence.disk_wait is None
    assert counts_of(simulation) == DiskPageCounts() == DiskPages().counts()
