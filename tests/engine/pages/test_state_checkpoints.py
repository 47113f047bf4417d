from __future__ import annotations

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


@pytest.mark.parametrize(
    ("first", "end", "num_known", "expected"),
    [
        (0, 3, 0, []),
        (0, 4, 0, [4]),
        (0, 5, 0, [4, 5]),
        (0, 32, 0, [25, 29, 31, 32]),
        (0, 32, 20, [20, 25, 29, 31, 32]),
        (0, 32, 3, [25, 29, 31, 32]),
        (0, 32, 31, [25, 29, 31, 32]),
        (20, 32, 20, [25, 29, 31, 32]),
        (25, 32, 26, [29, 31, 32]),
        (29, 32, 31, []),
    ],
)
def test_checkpoints_are_near_the_end_and_where_prompts_differ(
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

    def _state_of(self, sequence: Sequence) -> list[object]:
        return [self.contents[page] for page in sequence.state_pages]

    def _expected(self, sequence: Sequence) -> list[object]:
        known = tuple(sequence.tokens[: sequence.num_computed])
        digest = None if sequence.num_computed <= sequence.activation else sequence.add.digest
        return [(digest, known, index) for index in range(NUM_STATE_PAGES)]


def test_steps_of_a_prompt_end_at_its_checkpoints() -> None:
    bench = Bench()
    assert bench.begin(bench.sequence(TOKENS[:50])) == [20, 36, 44, 48, 50]
    assert bench.begin(bench.sequence(TOKENS[:50])) == [50]
    assert bench.begin(bench.sequence(TOKENS[:50], isolation_key=b"")) == [50]


@pytest.mark.parametrize(("num_shared", "found"), [(50, 48), (47, 44), (38, 36), (35, 20), (19, 0)])
def test_a_prompt_starts_at_the_last_checkpoint_that_it_shares(num_shared: int, found: int) -> None:
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
    assert bench.find(TOKENS, "a").num_tokens == 56
    assert bench.find(TOKENS, "b") == bench.find(TOKENS) == NO_PREFIX
    assert bench.find(TOKENS, "a", isolation_key=b"another") == NO_PREFIX
    assert bench.find((0, *TOKENS[1:]), "a") == NO_PREFIX


def test_the_state_before_an_activation_is_that_of_the_base() -> None:
    bench = Bench(num_pages=128)
    bench.run(TOKENS, "a", activation=45)
    # The checkpoints at 28 and 44 precede the activation, those at 52 and 56 do not.
    assert bench.find(TOKENS).num_tokens == bench.find(TOKENS, "b", activation=44).num_tokens == 44
    assert bench.find(TOKENS, "a", activation=45).num_tokens == 56
    assert bench.find(TOKENS, "a").num_tokens == 0
    bench.cache.purge("a")
    # The pages of K and V before the activation, and the two checkpoints among them.
    assert len(bench.cache) == 11 + 2 * NUM_STATE_PAGES
    assert bench.find(TOKENS, "a", activation=45).num_tokens == 44
    assert bench.find(TOKENS).num_tokens == 44


def test_a_checkpoint_without_one_of_its_pages_is_not_used() -> None:
    bench = Bench()
    bench.run(TOKENS)
    bench.cache.forget(bench.find(TOKENS).checkpoint[1])
    assert bench.find(TOKENS).num_tokens == 52
    # The sequence starts only a page before the lost checkpoint, so it does not save it again.
    assert bench.begin(bench.sequence(TOKENS)) == [60]


def test_an_incomplete_checkpoint_is_completed() -> None:
    bench = Bench()
    bench.run(TOKENS)
    for position in (56, 52, 44):
        prefix = bench.find(TOKENS)
        assert prefix.num_tokens == position
        bench.cache.forget(prefix.checkpoint[0])
    assert bench.find(TOKENS).num_tokens == 28
    bench.run(TOKENS)
    assert bench.find(TOKENS).num_tokens == 56
    bench.run(TOKENS)


def test_a_state_is_not_saved_if_that_needs_pages_in_use() -> None:
    bench = Bench(num_pages=15 + NUM_STATE_PAGES + 2)
    sequence = bench.sequence(TOKENS)
    assert bench.begin(sequence)[-1] == 60
    assert len(bench.cache) == 0
    bench.kv.detach(sequence)
    assert bench.pages.num_free == bench.pages.num_pages


def test_the_least_recently_used_checkpoint_is_evicted_for_another() -> None:
    bench = Bench(num_pages=15 + 2 * NUM_STATE_PAGES)
    sequence = bench.sequence(TOKENS)
    bench.begin(sequence)
    # There is room for one checkpoint at a time.
    assert len(bench.cache) == 14 + NUM_STATE_PAGES
    bench.kv.detach(sequence)
    assert bench.pages.num_owned(PageOwner.KV) == len(bench.cache) == bench.cache.num_idle
    assert bench.find(TOKENS).num_tokens == 56
    assert bench.reclaimer.make_room(bench.pages.num_free + 1, 0)
    assert bench.find(TOKENS) == Prefix(num_known=56)


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
    assert prefix.num_idle == 14 + NUM_STATE_PAGES
    # The prefix, the checkpoint, the state, and one more page of K and V.
    assert bench.kv.num_pages_to_begin(prefix, 4) == 14 + NUM_STATE_PAGES + NUM_STATE_PAGES + 1
