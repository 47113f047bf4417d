from __future__ import annotations

import random
from itertools import pairwise

import pytest

from loramux.engine.pages.host_pages import HostPages
from loramux.engine.protocol.messages import Add, ForgetPrefixes, Unload
from loramux.engine.sequences.cache_groups import CacheLayout, cache_layout, hybrid_layout
from loramux.engine.sequences.cached_page import CachedPage
from tests.engine.simulated_engine import VOCAB_SIZE, Simulation, simulate_engine, stats_of

OWNER = b"owner-a"
OTHER = b"owner-b"
MAX_LEN = 512
LAYOUTS: dict[str, CacheLayout] = {
    "whole": cache_layout((None,), MAX_LEN),
    "sliding": cache_layout((40, 40), MAX_LEN),
    "mixed": cache_layout((40, 40, None, 40, 40, None), MAX_LEN),
    "state": hybrid_layout(3, (1, 2), 2),
}


class NotedMemory:
    """Notes which page was saved in each slot, and which slot was loaded."""

    def __init__(self, num_slots: int, load_s: float = 0.0) -> None:
        self.num_slots = num_slots
        self.load_s = load_s
        self.saved: dict[int, int] = {}
        self.num_saved = 0
        self.loaded: list[tuple[int, int]] = []

    def save(self, page: int, slot: int) -> None:
        self.saved[slot] = page
        self.num_saved += 1

    def load(self, slot: int, page: int) -> None:
        self.loaded.append((slot, page))


class NoCache:
    def evict(self, page: CachedPage) -> None:
        raise NotImplementedError


def page_of(key: str, page: int = 0, owner: bytes = OWNER, digest: str | None = None) -> CachedPage:
    return CachedPage(NoCache(), key.encode(), page, digest, owner)


def keys(host: HostPages, names: str) -> str:
    return "".join(name for name in names if host.find(name.encode()) is not None)


def test_the_least_recently_used_page_is_replaced() -> None:
    memory = NotedMemory(3)
    host = HostPages(memory)
    for name in "abc":
        host.save(page_of(name, owner=name.encode()))
    found = host.find(b"a")
    assert found is not None
    host.touch(found)
    host.save(page_of("d"))
    host.check_integrity()
    assert keys(host, "abcd") == "acd"
    assert (len(host), host.counts().num_evictions) == (3, 1)


def test_a_page_with_a_copy_is_not_copied_again_and_counts_as_used() -> None:
    memory = NotedMemory(2)
    host = HostPages(memory)
    for name in "aba":
        host.save(page_of(name))
    assert memory.num_saved == 2
    host.save(page_of("c", owner=OTHER))
    assert keys(host, "abc") == "ac"


def test_an_owner_with_half_of_a_full_tier_replaces_its_own_pages() -> None:
    host = HostPages(NotedMemory(8))
    for number in range(4):
        host.save(page_of("abcd"[number], owner=f"small {number}".encode()))
    for number in range(100):
        host.save(page_of(f"large {number}", owner=OWNER))
    host.check_integrity()
    assert keys(host, "abcd") == "abcd"
    assert [host.find(f"large {number}".encode()) is not None for number in (95, 96, 99)] == [False, True, True]


def test_an_owner_alone_uses_the_whole_tier_until_others_come() -> None:
    host = HostPages(NotedMemory(8))
    for number in range(20):
        host.save(page_of(f"first {number}"))
    assert len(host) == 8
    for number in range(20):
        host.save(page_of(f"second {number}", owner=OTHER))
    assert sum(host.find(f"first {number}".encode()) is not None for number in range(20)) == 4
    host.check_integrity()


def test_held_pages_keep_their_slots_even_if_the_tier_is_full() -> None:
    memory = NotedMemory(2)
    host = HostPages(memory)
    host.save(page_of("a", page=1))
    host.save(page_of("b", page=2))
    held = [host.find(b"a"), host.find(b"b")]
    for page in held:
        assert page is not None
        host.hold(page)
    host.save(page_of("c", page=3))
    assert sorted(memory.saved.values()) == [1, 2]
    for page in held:
        assert page is not None
        host.put_back(page)
    host.check_integrity()
    assert keys(host, "abc") == "ab"


def test_purged_and_forgotten_pages_free_their_slots() -> None:
    host = HostPages(NotedMemory(4))
    for name, digest in (("a", "x"), ("b", "x"), ("c", "y"), ("d", None)):
        host.save(page_of(name, digest=digest))
    host.purge("x")
    host.forget(b"d")
    host.forget(b"unknown")
    host.check_integrity()
    assert keys(host, "abcd") == "c"
    assert len(host.free_slots) == 3


def test_a_tier_without_memory_keeps_nothing() -> None:
    host = HostPages()
    host.save(page_of("a"))
    assert (len(host), host.find(b"a")) == (0, None)


@pytest.mark.parametrize(
    ("load_s", "num_pages", "expected"), [(0.01, 2, True), (0.01, 4, False), (0.04, 1, False), (0.0, 100, True)]
)
def test_copying_pays_if_it_is_faster_than_computing(load_s: float, num_pages: int, expected: bool) -> None:
    host = HostPages(NotedMemory(8, load_s))
    assert host.pays(num_pages, 32), "nothing has been measured"
    host.note_computed(1000, 1.0)
    assert host.pays(num_pages, 32) == expected


def test_the_time_of_a_token_follows_the_last_steps() -> None:
    host = HostPages(NotedMemory(8, load_s=0.1))
    host.note_computed(1000, 10.0)
    assert host.pays(1, 16)
    for _ in range(20):
        host.note_computed(1000, 1.0)
    assert not host.pays(1, 16)


def tokens(count: int, seed: int = 0) -> tuple[int, ...]:
    rng = random.Random(seed)
    return tuple(rng.randrange(VOCAB_SIZE) for _ in range(count))


def small_engine(layers: str = "whole", num_pages: int = 20, num_host_pages: int = 200) -> Simulation:
    return simulate_engine(
        num_pages=num_pages,
        adapters={"a": 1, "b": 1},
        max_model_len=MAX_LEN,
        cache=LAYOUTS[layers],
        num_host_pages=num_host_pages,
    )


def ask(
    simulation: Simulation,
    name: str,
    prompt: tuple[int, ...],
    digest: str | None = None,
    isolation_key: bytes = OWNER,
    max_tokens: int = 4,
) -> int:
    """Answer one request, check its tokens, and return its number of cached prompt tokens."""
    add = simulation.make_add(name, prompt, max_tokens, digest, isolation_key=isolation_key)
    simulation.engine.add(b"gateway", add)
    return answered(simulation, add)


def answered(simulation: Simulation, add: Add) -> int:
    simulation.run()
    assert simulation.tokens[add.sequence_id] == simulation.expected(add)
    return simulation.finished[add.sequence_id].cached_tokens


def evict_all(simulation: Simulation) -> None:
    """Evict all idle adapters and cached prefixes."""
    reclaimer = simulation.adapters.reclaimer
    while reclaimer.policy.num_pages:
        assert reclaimer.evict_one(0)
    assert len(simulation.prefixes) == 0


@pytest.mark.parametrize("layers", LAYOUTS)
@pytest.mark.parametrize("digest", [None, "a"])
def test_an_evicted_prefix_is_restored_and_billed_as_cached(layers: str, digest: str | None) -> None:
    prompt = tokens(150)
    roomy = small_engine(layers, num_pages=400, num_host_pages=0)
    ask(roomy, "first", prompt, digest)
    expected = ask(roomy, "again", prompt, digest)
    assert expected > 0
    for num_host_pages, cached in ((200, expected), (0, 0)):
        simulation = small_engine(layers, num_host_pages=num_host_pages)
        ask(simulation, "first", prompt, digest)
        evict_all(simulation)
        assert ask(simulation, "again", prompt, digest) == cached
        assert stats_of(simulation).host_pages.restored_tokens == cached


@pytest.mark.parametrize(
    ("digest", "isolation_key"),
    [(None, OWNER), ("b", OWNER), ("a", OTHER), ("a", b"")],
    ids=["the base", "another adapter", "another owner", "an owner without a key"],
)
def test_another_adapter_or_owner_finds_no_copies(digest: str | None, isolation_key: bytes) -> None:
    simulation, prompt = small_engine(), tokens(100)
    ask(simulation, "first", prompt, "a")
    evict_all(simulation)
    assert stats_of(simulation).host_pages.num_pages > 0
    assert ask(simulation, "other", prompt, digest, isolation_key) == 0
    assert stats_of(simulation).host_pages.num_loaded == 0


def test_an_unloaded_adapters_copies_are_deleted() -> None:
    simulation, prompt = small_engine(), tokens(100)
    ask(simulation, "first", prompt, "a")
    ask(simulation, "base", prompt)
    evict_all(simulation)
    simulation.engine.unload(b"gateway", Unload(call_id="u", digest="a"))
    simulation.run()
    assert ask(simulation, "again", prompt, "a") == 0
    evict_all(simulation)
    assert ask(simulation, "base again", prompt) == 96


def test_a_broken_adapters_copies_are_deleted() -> None:
    simulation, prompt = small_engine(), tokens(100)
    ask(simulation, "first", prompt, "a")
    evict_all(simulation)
    simulation.executor.not_finite_for.add("a")
    simulation.add("broken", digest="a", isolation_key=OWNER)
    simulation.run()
    assert simulation.finished["broken"].code == "not_finite"
    simulation.executor.not_finite_for.clear()
    assert ask(simulation, "again", prompt, "a") == 0


@pytest.mark.parametrize("layers", LAYOUTS)
def test_a_deleted_tenants_pages_are_deleted_everywhere(layers: str) -> None:
    simulation, prompt = small_engine(layers, num_pages=80), tokens(100)
    for isolation_key in (OWNER, b"also", OTHER):
        ask(simulation, f"first of {isolation_key!r}", prompt, isolation_key=isolation_key)
    evict_all(simulation)
    ask(simulation, "in the pool", prompt[:60], isolation_key=OWNER)
    keys = (OWNER, b"also", b"without pages")
    simulation.engine.forget_prefixes(b"gateway", ForgetPrefixes(call_id="f", isolation_keys=keys))
    simulation.run()
    assert [(one.call_id, one.state) for one in simulation.answers] == [("f", "absent")]
    assert ask(simulation, "again", prompt) == 0
    assert ask(simulation, "also again", prompt, isolation_key=b"also") == 0
    assert ask(simulation, "other again", prompt, isolation_key=OTHER) > 0


def test_copies_of_a_base_that_computed_nan_are_deleted() -> None:
    """Without an adapter, no digest is purged, so the sequence's own pages are deleted by their keys."""
    simulation, prompt = small_engine(), tokens(100)
    add = simulation.make_add("first", prompt, 60, isolation_key=OWNER)
    simulation.engine.add(b"gateway", add)
    for _ in range(4):
        simulation.step()
    [sequence] = simulation.scheduler.running
    # The first page is copied, as if it had been evicted before another sequence computed it again.
    cached = sequence.tables[0].cached[0]
    assert cached is not None
    simulation.prefixes.host.save(cached)
    simulation.scheduler.finish(sequence, is_broken=True)
    assert (len(simulation.prefixes), len(simulation.prefixes.host)) == (0, 0)


def test_a_conversation_continues_from_pool_and_host_memory() -> None:
    simulation = small_engine(num_pages=24)
    prompt = tokens(60)
    for turn in range(4):
        name = f"turn {turn}"
        add = simulation.make_add(name, prompt, 20, "a", isolation_key=OWNER)
        simulation.engine.add(b"gateway", add)
        assert answered(simulation, add) == (0 if turn == 0 else (len(prompt) - 11) // 16 * 16)
        prompt = (*prompt, *simulation.tokens[name], *tokens(10, seed=turn))
        evict_all(simulation)


def test_making_room_for_copies_does_not_lose_them() -> None:
    """The host tier is full of the prefix to restore, and the pool of pages that want its slots."""
    simulation, prompt = small_engine(num_pages=16, num_host_pages=9), tokens(150)
    ask(simulation, "first", prompt)
    evict_all(simulation)
    ask(simulation, "other", tokens(150, seed=1), isolation_key=OTHER)
    assert len(simulation.prefixes.host) == 9
    assert ask(simulation, "again", prompt) == 144


def test_a_prefix_is_computed_if_copying_is_slower() -> None:
    simulation, prompt = small_engine(), tokens(150)
    ask(simulation, "first", prompt)
    evict_all(simulation)
    simulation.host_memory.load_s = 1.0
    simulation.prefixes.host.note_computed(1000, 1.0)
    assert ask(simulation, "again", prompt) == 0
    counts = stats_of(simulation).host_pages
    assert (counts.num_loaded, counts.restored_tokens, counts.recomputed_tokens) == (0, 0, 144)


@pytest.mark.parametrize("layers", ["whole", "mixed"])
def test_the_pages_before_the_first_copy_are_used_if_copying_is_slower(layers: str) -> None:
    """Pages after an evicted one are in the pool, too, but are of no use without it."""
    simulation, prompt = small_engine(layers, num_pages=80), tokens(150)
    simulation.engine.add(b"gateway", simulation.make_add("first", prompt, 4, isolation_key=OWNER))
    simulation.step()
    simulation.step()
    simulation.step()
    [sequence] = simulation.scheduler.running
    third = sequence.page_keys[(2 + 1) * LAYOUTS[layers].groups[0].num_blocks - 1]
    simulation.run()
    cached = simulation.prefixes.find(third)
    assert cached is not None
    simulation.prefixes.evict(cached)
    simulation.host_memory.load_s = 1.0
    simulation.prefixes.host.note_computed(1000, 1.0)
    page_tokens = LAYOUTS[layers].groups[0].page_tokens
    assert ask(simulation, "again", prompt) == 2 * page_tokens
    assert stats_of(simulation).host_pages.recomputed_tokens == (149 // page_tokens - 2) * page_tokens


def test_a_preempted_sequence_resumes_from_its_copies() -> None:
    """Without host memory, most of the victim's tokens are computed again."""
    recomputed = []
    for num_host_pages in (0, 100):
        simulation = small_engine(num_pages=14, num_host_pages=num_host_pages)
        adds = [simulation.make_add(f"s{index}", tokens(60, seed=index), 70, isolation_key=OWNER) for index in range(3)]
        for add in adds:
            simulation.engine.add(b"gateway", add)
        simulation.run()
        assert [simulation.tokens[add.sequence_id] for add in adds] == [simulation.expected(add) for add in adds]
        stats = stats_of(simulation)
        assert stats.num_preemptions > 0
        assert stats.cached_tokens == 0, "tokens restored after a preemption are not billed as cached"
        recomputed.append(stats.recomputed_tokens)
    assert recomputed[1] < 0.5 * recomputed[0]
    assert stats.host_pages.restored_tokens > 0


def test_a_checkpoint_is_saved_again_as_a_whole_if_a_copy_is_missing() -> None:
    simulation, prompt = small_engine("state", num_pages=24), tokens(200)
    ask(simulation, "first", prompt)
    evict_all(simulation)
    host = simulation.prefixes.host
    states = [page.key for page in host._index if b"state" in page.key]
    assert len(states) == 2
    host.forget(states[0])
    assert ask(simulation, "again", prompt) == 0
    evict_all(simulation)
    assert ask(simulation, "third", prompt) > 0


@pytest.mark.parametrize("num_steps", [20, 36, 52])
def test_copies_that_a_victim_offers_meanwhile_are_not_restored_again(num_steps: int) -> None:
    """With lookahead, a victim's page can become complete when it makes room for a sequence with the same text."""
    simulation = simulate_engine(num_pages=60, max_model_len=512, num_host_pages=100, lookahead=True, max_sequences=1)
    prompt = tokens(32)
    simulation.engine.add(b"gateway", simulation.make_add("first", prompt, 100, isolation_key=OWNER))
    simulation.run()
    evict_all(simulation)
    victim = simulation.make_add("victim", prompt, 100, isolation_key=OWNER, is_background=True)
    simulation.engine.add(b"gateway", victim)
    for _ in range(num_steps):
        simulation.step()
    text = prompt + tuple(simulation.tokens["first"][:90])
    other = simulation.make_add("other", text, 4, isolation_key=OWNER)
    simulation.engine.add(b"gateway", other)
    simulation.run()
    for add in (victim, other):
        assert simulation.tokens[add.sequence_id] == simulation.expected(add)


def test_copies_of_several_sequences_are_divided_among_steps() -> None:
    """Otherwise, sequences that begin together would stop all others until all of their pages are copied."""
    simulation = simulate_engine(num_pages=700, max_model_len=2048, num_host_pages=2000, max_batch_tokens=64)
    prompts = [tokens(1600, seed=index) for index in range(5)]
    for name in ("first", "again"):
        for index, prompt in enumerate(prompts):
            add = simulation.make_add(f"{name}{index}", prompt, 4, isolation_key=b"owner %d" % index)
            simulation.engine.add(b"gateway", add)
        if name == "first":
            simulation.run()
            evict_all(simulation)
            simulation.host_memory.load_s = 0.001
            simulation.prefixes.host.note_computed(1000, 1.0)
    loaded = [0]
    while len(simulation.finished) < 2 * len(prompts):
        simulation.step()
        loaded.append(stats_of(simulation).host_pages.num_loaded)
    most = max(after - before for before, after in pairwise(loaded))
    assert (most, loaded[-1]) == (99, 5 * 99)
    assert all(simulation.finished[f"again{index}"].cached_tokens == 1584 for index in range(5))
