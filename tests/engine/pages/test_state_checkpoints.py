from __future__ import annotations

from dataclasses import dataclass

import pytest

from loramux.engine.pages.eviction import LeastRecentlyUsed, Reclaimer
from loramux.engine.pages.kv_pages import NO_PREFIX, KvPages, Prefix
from loramux.engine.pages.page_pool import PageOwner, PagePool
from loramux.engine.pages.prefix_cache import PrefixCache
from loramux.engine.pages.state_checkpoints import checkpoint_pages
from loramux.engine.protocol.messages import Add
from loramux.engine.sequences.cache_groups import CacheGroup, CacheLayout
from loramux.engine.sequences.sequence import Sequence
from tests.engine.simulated_engine import GREEDY

PAGE_TOKENS = 4
NUM_STATE_PAGES = 3
OWNER = b"owner"
TOKENS = tuple(range(100, 160))
OTHER_TOKENS = tuple(range(200, 260))


@pytest.mark.parametrize(
    ("first", "end", "num_known", "expected"),
    [
        (0, 4, 0, []),
        (0, 5, 0, [4]),
        (0, 31, 0, [30]),
        (0, 32, 0, [30]),
        (0, 128, 0, [120]),
        (0, 32, 20, [20, 30]),
        (0, 32, 3, [30]),
        (0, 32, 28, [28]),
        (0, 32, 31, [30]),
        (20, 32, 20, [30]),
        (25, 32, 30, [30]),
        (27, 32, 30, []),
    ],
)
def test_a_checkpoint_is_near_the_end_and_one_where_prompts_differ(
    first: int, end: int, num_known: int, expected: list[int]
) -> None:
    assert checkpoint_pages(first, end, num_known) == expected


class Bench:
    """`contents` has what each page of a state contains: the adapter and the tokens of the state, and the page's index
    in the state.
    """

    def __init__(self, num_pages: int = 64) -> None:
        self.pages = PagePool(num_pages)
        self.reclaimer = Reclaimer(self.pages, LeastRecentlyUsed())
        self.cache = PrefixCache(self.pages, self.reclaimer.policy, PAGE_TOKENS)
        self.contents: dict[int, object] = {}
        self.copied: list[int] = []
        layout = CacheLayout(2, (CacheGroup((1,), None, block_tokens=PAGE_TOKENS),), NUM_STATE_PAGES)
        self.kv = KvPages(self.pages, self.reclaimer, self.cache, layout, 64, self._copy)

    def sequence(
        self, tokens: tuple[int, ...], digest: str | None = None, isolation_key: bytes = OWNER, activation: int = 0
    ) -> Sequence:
        add = Add(
            sequence_id="s",
            prompt=tokens,
            max_tokens=4,
            sampling=GREEDY,
            digest=digest,
            isolation_key=isolation_key,
            activation=activation,
        )
        return Sequence(add=add, owner=b"gateway", arrival=0, seed=0)

    def find(self, *arguments: object, **fields: object) -> Prefix:
        return self.kv.find_prefix(self.sequence(*arguments, **fields))  # type: ignore[arg-type]

    def begin(self, sequence: Sequence) -> list[int]:
        """Compute a prompt, and return where its steps end."""
        prefix = self.kv.find_prefix(sequence)
        self.kv.attach(sequence, prefix)
        assert self.kv.grow(sequence, len(sequence.tokens) - prefix.num_tokens)
        self.kv.restore_state(sequence, prefix)
        if prefix.num_tokens:
            assert self._state_of(sequence) == self._expected(sequence)
        ends: list[int] = []
        while sequence.num_pending:
            sequence.num_computed += sequence.num_computable
            ends.append(sequence.num_computed)
            self.contents.update(zip(sequence.state_pages, self._expected(sequence), strict=True))
            self.kv.offer(sequence)
        return ends

    def run(self, *arguments: object, **fields: object) -> Sequence:
        sequence = self.sequence(*arguments, **fields)  # type: ignore[arg-type]
        self.begin(sequence)
        self.kv.detach(sequence)
        self.pages.check_integrity()
        return sequence

    def _copy(self, source: int, target: int) -> None:
        self.contents[target] = self.contents[source]
        self.copied.append(target)

    def _state_of(self, sequence: Sequence) -> list[object]:
        return [self.contents[page] for page in sequence.state_pages]

    def _expected(self, sequence: Sequence) -> list[object]:
        known = tuple(sequence.tokens[: sequence.num_computed])
        digest = None if sequence.num_computed <= sequence.activation else sequence.add.digest
        return [(digest, known, index) for index in range(NUM_STATE_PAGES)]


@dataclass(slots=True, eq=False)
class IdleAdapter:
    key: str = "adapter"
    num_pages: int = NUM_STATE_PAGES
    has_slot: bool = True
    cost: float = 1.0
    is_waited_for: bool = False
    is_evicted: bool = False

    def evict(self) -> None:
        self.is_evicted = True


def test_a_step_of_a_prompt_ends_at_its_checkpoint() -> None:
    bench = Bench()
    assert bench.begin(bench.sequence(TOKENS[:50])) == [44, 50]
    assert bench.begin(bench.sequence(TOKENS[:50])) == [50]
    assert bench.begin(bench.sequence(TOKENS[:50], isolation_key=b"")) == [50]


@pytest.mark.parametrize(("num_shared", "found"), [(50, 44), (44, 44), (43, 0)])
def test_a_prompt_starts_at_a_checkpoint_that_it_shares(num_shared: int, found: int) -> None:
    bench = Bench()
    bench.run(TOKENS[:50])
    prompt = (*TOKENS[:num_shared], *range(10))
    assert bench.find(prompt).num_tokens == found
    bench.run(prompt)


def test_prompts_that_differ_leave_a_checkpoint_where_they_do() -> None:
    bench = Bench()
    bench.run(TOKENS)
    for number, found in ((1, 0), (2, 24), (3, 24)):
        prompt = (*TOKENS[:26], *[1000 * number + place for place in range(60)])
        assert bench.find(prompt).num_tokens == found
        bench.run(prompt)


def test_states_are_found_only_by_the_same_owner_adapter_and_tokens() -> None:
    bench = Bench()
    bench.run(TOKENS, "a")
    assert bench.find(TOKENS, "a").num_tokens == 52
    assert bench.find(TOKENS, "b") == bench.find(TOKENS) == NO_PREFIX
    assert bench.find(TOKENS, "a", isolation_key=b"another") == NO_PREFIX
    assert bench.find((0, *TOKENS[1:]), "a") == NO_PREFIX


def test_the_state_before_an_activation_is_that_of_the_base() -> None:
    bench = Bench(num_pages=128)
    tokens = tuple(range(100))
    bench.run(tokens[:50])
    # The checkpoint of the base at 44 precedes the activation. The prompt's own checkpoint at 92 does not.
    bench.run(tokens, "a", activation=45)
    assert bench.find(tokens).num_tokens == bench.find(tokens, "b", activation=44).num_tokens == 44
    assert bench.find(tokens, "a", activation=45).num_tokens == 92
    assert bench.find(tokens, "a").num_tokens == 0
    bench.cache.purge("a")
    assert bench.find(tokens, "a", activation=45).num_tokens == 44
    assert bench.find(tokens).num_tokens == 44


def test_a_second_adapter_starts_where_the_first_was_activated() -> None:
    bench = Bench(num_pages=128)
    context = tuple(range(80))
    bench.run((*context, *range(1000, 1020)), "a", activation=82)
    question = (*context, *range(2000, 2020))
    assert bench.find(question, "b", activation=82).num_tokens == 80
    # Too little of this prompt is the base's.
    bench.run(tuple(range(3000, 3050)), "a", activation=15)
    assert bench.find(tuple(range(3000, 3050)), "b", activation=15).num_tokens == 0


@pytest.mark.parametrize("missing", range(NUM_STATE_PAGES))
def test_an_incomplete_checkpoint_is_not_used_and_is_saved_again_as_a_whole(missing: int) -> None:
    bench = Bench()
    bench.run(TOKENS)
    bench.cache.forget(bench.find(TOKENS).checkpoint[missing].key)
    assert bench.find(TOKENS) == Prefix(num_known=52)
    bench.copied.clear()
    bench.run(TOKENS)
    # All its pages come from one computation.
    assert bench.copied == [cached.page for cached in bench.find(TOKENS).checkpoint]
    assert len(bench.cache) == 13 + NUM_STATE_PAGES


def test_a_state_is_not_saved_if_that_needs_pages_in_use() -> None:
    bench = Bench(num_pages=15 + NUM_STATE_PAGES + 2)
    sequence = bench.sequence(TOKENS)
    assert bench.begin(sequence)[-1] == 60
    assert len(bench.cache) == 0
    bench.kv.detach(sequence)
    assert bench.pages.num_free == bench.pages.num_pages


def test_a_checkpoint_is_saved_over_older_prefixes_but_not_over_adapters() -> None:
    """The adapter has been idle longest. Next to it and the prefix, there is room for the prompt and its state."""
    adapter = IdleAdapter()
    bench = Bench(num_pages=adapter.num_pages + (4 + NUM_STATE_PAGES) + (15 + NUM_STATE_PAGES))
    bench.pages.alloc(adapter.num_pages, PageOwner.ADAPTER)
    bench.reclaimer.policy.add(adapter)
    bench.run(OTHER_TOKENS[:24])
    assert bench.find(OTHER_TOKENS[:24]).num_tokens == 16
    bench.run(TOKENS)
    assert bench.find(OTHER_TOKENS[:24]).num_tokens == 0
    assert bench.find(TOKENS).num_tokens == 52
    assert not adapter.is_evicted


def test_a_checkpoint_is_not_saved_if_only_an_adapter_could_make_room() -> None:
    adapter = IdleAdapter()
    bench = Bench(num_pages=adapter.num_pages + 15 + NUM_STATE_PAGES)
    bench.pages.alloc(adapter.num_pages, PageOwner.ADAPTER)
    bench.reclaimer.policy.add(adapter)
    bench.run(TOKENS)
    assert len(bench.cache) == 0
    assert not adapter.is_evicted


@pytest.mark.parametrize("is_cached", [False, True], ids=["left", "started from"])
def test_a_checkpoint_is_evicted_after_the_k_and_v_that_need_it(is_cached: bool) -> None:
    bench = Bench()
    if is_cached:
        bench.run(TOKENS)
    sequence = bench.sequence(TOKENS)
    bench.begin(sequence)
    bench.run(OTHER_TOKENS)
    bench.kv.detach(sequence)
    bench.pages.check_integrity()
    # The other prefix has been idle longer.
    assert bench.reclaimer.make_room(bench.pages.num_free + 13 + NUM_STATE_PAGES, 0)
    assert bench.find(OTHER_TOKENS) == NO_PREFIX
    assert bench.find(TOKENS).num_tokens == 52
    assert bench.reclaimer.make_room(bench.pages.num_free + 13, 0)
    assert len(bench.cache) == NUM_STATE_PAGES


@pytest.mark.parametrize("is_broken", [False, True], ids=["tainted", "broken"])
def test_a_sequence_that_is_not_finite_leaves_no_checkpoints(is_broken: bool) -> None:
    bench = Bench()
    sequence = bench.sequence(TOKENS, "a")
    sequence.is_tainted = not is_broken
    bench.begin(sequence)
    if is_broken:
        bench.kv.disown(sequence)
    bench.kv.detach(sequence)
    assert len(bench.cache) == 0
    assert bench.pages.num_free == bench.pages.num_pages


def test_a_sequence_counts_the_pages_of_a_checkpoint_until_it_is_restored() -> None:
    bench = Bench()
    bench.run(TOKENS)
    prefix = bench.find(TOKENS)
    assert prefix.num_idle == 13 + NUM_STATE_PAGES
    # The prefix, the checkpoint, the state, and one more page of K and V.
    assert bench.kv.num_pages_to_begin(prefix, 4) == 13 + NUM_STATE_PAGES + NUM_STATE_PAGES + 1
