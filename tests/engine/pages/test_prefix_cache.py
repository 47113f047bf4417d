from __future__ import annotations

import random

import pytest

from loramux.engine.pages.page_pool import PageOwner
from loramux.engine.protocol.messages import Abort, Add, Unload
from tests.engine.simulated_engine import VOCAB_SIZE, Simulate, Simulation, simulate_engine, stats_of

PAGE = 16
OWNER = b"owner-a"


@pytest.fixture
def simulation(simulate: Simulate) -> Simulation:
    return simulate(num_pages=64, adapters={"a": 2, "b": 3})


def ask(
    simulation: Simulation,
    name: str,
    prompt: tuple[int, ...],
    digest: str | None = None,
    isolation_key: bytes = OWNER,
    max_tokens: int = 4,
) -> Add:
    add = simulation.make_add(name, prompt, max_tokens, digest, isolation_key=isolation_key)
    simulation.engine.add(b"gateway", add)
    return add


def answer(simulation: Simulation, *asked: Add) -> list[int]:
    """Run all requests to the end, check every answer, and return each request's number of cached prompt tokens."""
    simulation.run()
    for add in asked:
        assert simulation.tokens[add.sequence_id] == simulation.expected(add)
    return [simulation.finished[add.sequence_id].cached_tokens for add in asked]


def tokens(count: int, seed: int = 0) -> tuple[int, ...]:
    rng = random.Random(seed)
    return tuple(rng.randrange(VOCAB_SIZE) for _ in range(count))


@pytest.mark.parametrize(
    ("num_prompt", "spared"), [(15, 0), (16, 0), (17, 16), (32, 16), (33, 32), (100, 96)], ids=lambda value: str(value)
)
@pytest.mark.parametrize("digest", [None, "a"])
def test_repeated_prompt_is_cached_except_for_its_last_page(
    simulation: Simulation, num_prompt: int, spared: int, digest: str | None
) -> None:
    prompt = tokens(num_prompt)
    assert answer(simulation, ask(simulation, "first", prompt, digest)) == [0]
    assert answer(simulation, ask(simulation, "again", prompt, digest)) == [spared]
    assert stats_of(simulation).cached_tokens == spared


def test_an_answer_is_a_prefix_of_the_next_turn(simulation: Simulation) -> None:
    prompt = tokens(20)
    first = ask(simulation, "first", prompt, max_tokens=40)
    answer(simulation, first)
    turn = (*prompt, *simulation.expected(first), *tokens(5, seed=1))
    # The last token was sampled but never computed, so 59 positions have K and V, and 3 pages are full.
    assert answer(simulation, ask(simulation, "second", turn)) == [48]


@pytest.mark.parametrize(
    ("digest", "isolation_key"),
    [(None, OWNER), ("b", OWNER), ("a", b"owner-b"), ("a", b"")],
    ids=["the base", "another adapter", "another owner", "an owner without a key"],
)
def test_different_adapter_or_key_shares_nothing(
    simulation: Simulation, digest: str | None, isolation_key: bytes
) -> None:
    prompt = tokens(50)
    answer(simulation, ask(simulation, "first", prompt, "a"))
    assert answer(simulation, ask(simulation, "other", prompt, digest, isolation_key)) == [0]


def test_empty_key_disables_the_cache(simulation: Simulation) -> None:
    prompt = tokens(50)
    for name in ("first", "again"):
        assert answer(simulation, ask(simulation, name, prompt, isolation_key=b"")) == [0]
    assert len(simulation.prefixes) == 0


def test_cache_keys_are_unambiguous(simulation: Simulation) -> None:
    """Each hashed part is prefixed with its length, so moving bytes from one part to the next changes the key."""
    cache = simulation.prefixes
    assert cache.root(b"ab") != cache.root(b"a")
    page = list(range(PAGE))
    keys = {
        cache.page_key(parent, digest, page)
        for parent, digest in [(b"x" * 32, None), (b"x" * 32, "a"), (b"x" * 31, "xa"), (b"x" * 33, None)]
    }
    assert len(keys) == 4


def test_pages_are_shared_while_both_run(simulation: Simulation) -> None:
    prompt = tokens(64)
    first = ask(simulation, "first", (*prompt, 1), max_tokens=30)
    simulation.step()
    second = ask(simulation, "second", (*prompt, 2), max_tokens=30)
    simulation.step()
    running = simulation.scheduler.running
    assert running[0].tables[0].blocks[:4] == running[1].tables[0].blocks[:4]
    assert simulation.pages.num_owned(PageOwner.KV) <= 4 + 2 * 2
    assert answer(simulation, first, second) == [0, 64]


def test_a_shared_page_outlives_the_sequence_that_filled_it(simulation: Simulation) -> None:
    prompt = tokens(64)
    ask(simulation, "first", (*prompt, 1), max_tokens=30)
    simulation.step()
    second = ask(simulation, "second", (*prompt, 2), max_tokens=30)
    simulation.step()
    simulation.engine.abort(b"gateway", Abort(sequence_id="first"))
    filler = [ask(simulation, f"filler{i}", tokens(200, seed=i), isolation_key=b"") for i in range(4)]
    answer(simulation, second, *filler)


def test_prefixes_are_evicted_before_any_preemption(simulate: Simulate) -> None:
    simulation = simulate(num_pages=20, adapters={"a": 2})
    answer(simulation, ask(simulation, "first", tokens(160)))
    assert len(simulation.prefixes) == 10
    long = ask(simulation, "long", tokens(200, seed=1), max_tokens=80)
    answer(simulation, long)
    assert stats_of(simulation).num_preemptions == 0


def test_end_of_a_prefix_is_evicted_before_its_beginning(simulate: Simulate) -> None:
    simulation = simulate(num_pages=12)
    prompt = tokens(100)
    answer(simulation, ask(simulation, "first", prompt))
    answer(simulation, ask(simulation, "other", tokens(130, seed=1), isolation_key=b""))
    (spared,) = answer(simulation, ask(simulation, "again", prompt))
    assert 0 < spared < 96


def test_prefixes_of_an_evicted_adapter_stay_valid_until_unload(simulate: Simulate) -> None:
    simulation = simulate(num_pages=64, num_slots=1, adapters={"a": 2, "b": 3})
    prompt = tokens(50)
    answer(simulation, ask(simulation, "first", prompt, "a"))
    answer(simulation, ask(simulation, "evicts", tokens(4), "b"))
    assert answer(simulation, ask(simulation, "again", prompt, "a")) == [48]
    simulation.engine.unload(b"gateway", Unload(call_id="u", digest="a"))
    simulation.run()
    assert answer(simulation, ask(simulation, "later", prompt, "a")) == [0]


def test_prefixes_of_a_broken_adapter_are_forgotten(simulation: Simulation) -> None:
    prompt = tokens(50)
    answer(simulation, ask(simulation, "first", prompt, "a"))
    simulation.executor.not_finite_for.add("a")
    ask(simulation, "broken", tokens(70, seed=1), "a")
    simulation.run()
    assert simulation.finished["broken"].code == "not_finite"
    assert all(entry.digest != "a" for entry in simulation.adapters.loads())
    simulation.executor.not_finite_for.clear()
    again = [ask(simulation, "again", prompt, "a"), ask(simulation, "same", tokens(70, seed=1), "a")]
    assert answer(simulation, *again) == [0, 0]


@pytest.mark.parametrize("windows", [(None,), (20, None)])
def test_equal_prompts_are_computed_once(simulate: Simulate, windows: tuple[int | None, ...]) -> None:
    simulation = simulate(max_batch_tokens=512, windows=windows)
    prompt = tokens(100)
    adds = [ask(simulation, f"choice {number}", prompt) for number in range(5)]
    adds.append(ask(simulation, "longer", (*prompt, *tokens(90, seed=1))))
    simulation.step()
    assert len(simulation.scheduler.running) == 1
    simulation.step()
    assert len(simulation.scheduler.running) == 6
    assert answer(simulation, *adds) == [0, 96, 96, 96, 96, 96]


def test_prompts_that_share_less_than_half_do_not_wait_for_each_other(simulation: Simulation) -> None:
    system = tokens(16)
    adds = [ask(simulation, f"s{number}", (*system, *tokens(20, seed=number))) for number in (1, 2)]
    simulation.step()
    assert len(simulation.scheduler.running) == len(adds)


def test_equal_prompts_of_other_owners_and_adapters_do_not_wait_for_each_other(simulate: Simulate) -> None:
    simulation = simulate(adapters={"a": 2}, max_batch_tokens=512)
    use = ask(simulation, "use", tokens(4), "a")
    answer(simulation, use)
    prompt = tokens(50)
    adds = [
        ask(simulation, f"s{number}", prompt, digest, owner)
        for number, (digest, owner) in enumerate([(None, b"x"), (None, b"y"), ("a", b"x"), (None, b""), (None, b"")])
    ]
    simulation.step()
    assert len(simulation.scheduler.running) == len(adds)


def test_preempted_sequence_reuses_its_own_pages(simulate: Simulate) -> None:
    simulation = simulate(num_pages=12, max_batch_tokens=64)
    adds = [ask(simulation, f"s{i}", tokens(40, seed=i), max_tokens=60) for i in range(3)]
    answer(simulation, *adds)
    assert stats_of(simulation).num_preemptions > 0
    recomputed = sum(len(batch.tokens) for batch in simulation.executor.batches) - 3 * (40 + 59)
    assert recomputed < 3 * 40


def test_random_conversations_with_shared_prefixes_are_correct(simulate: Simulate) -> None:
    rng = random.Random(5)
    names = {f"adapter{i}": 1 + i % 3 for i in range(6)}
    simulation = simulate(num_pages=48, num_slots=3, adapters=names, max_sequences=6)
    conversations: list[tuple[int, ...]] = [tokens(rng.randint(1, 60), seed=i) for i in range(4)]
    asked: dict[str, Add] = {}
    for turn in range(300):
        if rng.random() < 0.6:
            prompt = rng.choice(conversations)
            digest = rng.choice([None, None, *names])
            owner = rng.choice([b"x", b"y", b""])
            asked[f"s{turn}"] = ask(simulation, f"s{turn}", prompt, digest, owner, rng.randint(1, 30))
        if rng.random() < 0.3:
            base = rng.choice(conversations)
            grown = (*base, *tokens(rng.randint(1, 40), seed=turn))[:250]
            conversations[rng.randrange(4)] = grown if rng.random() < 0.8 else tokens(8, seed=turn)
        if asked and rng.random() < 0.1:
            simulation.engine.abort(b"gateway", Abort(sequence_id=rng.choice(list(asked))))
        simulation.step()
    simulation.run()
    for name, add in asked.items():
        received = simulation.tokens[name]
        assert received == simulation.expected(add)[: len(received)]
        if simulation.finished[name].reason == "length":
            assert len(received) == add.max_tokens
    counts = stats_of(simulation)
    assert counts.cached_tokens > 0
    assert counts.num_adapter_evictions > 0


def until_preempted(simulation: Simulation, broken_step: int | None = None) -> int:
    """Run two sequences until one is preempted, and return the number of steps. The rows of one step are not finite."""
    for name in ("first", "second"):
        simulation.add(name, num_prompt=40, max_tokens=60, isolation_key=b"x")
    for step in range(100):
        simulation.executor.not_finite_for = {None} if step == broken_step else set()
        simulation.step()
        if simulation.scheduler.num_preemptions:
            return step
    raise AssertionError("no preemption")


def test_a_sequence_that_was_preempted_before_its_fault_is_known_leaves_no_pages() -> None:
    before = until_preempted(simulate_engine(num_pages=8, lookahead=True))
    simulation = simulate_engine(num_pages=8, lookahead=True)
    assert until_preempted(simulation, before - 1) == before
    simulation.run()
    assert {end.code for end in simulation.finished.values()} == {"not_finite"}
    assert len(simulation.prefixes) == 0
