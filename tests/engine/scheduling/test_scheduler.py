from __future__ import annotations

import itertools

import pytest

from loramux.engine.adapters.adapter_pool import NOT_SHORT, AdapterPool
from loramux.engine.constraints.grammar import Grammar
from loramux.engine.pages.eviction import LeastRecentlyUsed
from loramux.engine.pages.host_pages import AnyPage
from loramux.engine.pages.kv_pages import KvPages
from loramux.engine.pages.page_pool import PagePool
from loramux.engine.pages.prefix_cache import PrefixCache
from loramux.engine.protocol.messages import Add
from loramux.engine.protocol.service_tiers import INPUT_PRICE, OUTPUT_PRICE, TIER_FACTORS
from loramux.engine.scheduling.fair_queue import FairQueue
from loramux.engine.scheduling.scheduler import Scheduler, SchedulerLimits
from loramux.engine.sequences.cache_groups import cache_layout
from loramux.engine.sequences.sequence import Sequence, SequenceState
from tests.engine.constraints.test_grammar import ALLOWED, Followed
from tests.engine.simulated_device import SimulatedPages, simulated_adapters
from tests.engine.simulated_engine import GREEDY, Simulate, Simulation, finishes, stats_of
from tests.engine.watched_stager import WatchedStager

PAGE_TOKENS = 4


class Bench:
    """A scheduler over real pages and adapters. Steps end as soon as they are scheduled and sample token 7."""

    def __init__(
        self,
        num_pages: int = 64,
        max_batch_tokens: int = 16,
        max_sequences: int = 4,
        sizes: dict[str, int] | None = None,
        num_slots: int = 4,
    ) -> None:
        self.pages = PagePool(num_pages)
        policy, queue = LeastRecentlyUsed(), FairQueue()
        self.stager, self.adapter_pages = WatchedStager(simulated_adapters(sizes or {})), SimulatedPages()
        copier = tables = self.adapter_pages
        self.adapters = AdapterPool(
            self.pages, num_slots, self.stager, copier, tables, policy, on_residency=queue.set_resident
        )
        cache = cache_layout((None,), 64, PAGE_TOKENS)
        prefixes = PrefixCache(self.pages, policy, PAGE_TOKENS)
        kv = KvPages(self.pages, self.adapters.reclaimer, prefixes, cache, max_step_tokens=64)
        limits = SchedulerLimits(max_batch_tokens, max_sequences, look_ahead=max_sequences)
        self.scheduler = Scheduler(queue, kv, self.adapters, limits)
        self._arrivals = itertools.count()

    def hold_loads(self) -> None:
        self.stager.is_holding = self.adapter_pages.is_holding = True

    def let_loads_go(self) -> None:
        self.stager.let_go()
        self.adapter_pages.let_go()

    def add(self, name: str, num_prompt: int = 3, max_tokens: int = 50, **fields: object) -> Sequence:
        add = Add(sequence_id=name, prompt=(1,) * num_prompt, max_tokens=max_tokens, sampling=GREEDY, **fields)
        sequence = Sequence(add=add, owner=b"gateway", arrival=next(self._arrivals), seed=0)
        self.scheduler.add(sequence)
        return sequence

    def step(self) -> dict[str, int]:
        """Run the next step, and return each sequence's number of rows, in the step's order."""
        self.adapters.poll(self.scheduler.order_waiting())
        scheduled = self.scheduler.schedule()
        self.scheduler.advance(scheduled)
        for sequence in [item.sequence for item in scheduled]:
            if sequence.num_computed == sequence.num_tokens:
                sequence.choose(0)
                sequence.commit(7)
                self.scheduler.queue.charge_outputs([sequence])
            sequence.has_run = True
            if sequence.has_reached_limit:
                self.scheduler.finish(sequence)
        self.pages.check_integrity()
        return {item.sequence.sequence_id: item.num_tokens for item in scheduled}

    @property
    def running(self) -> set[str]:
        return {sequence.sequence_id for sequence in self.scheduler.running}


def test_decode_rows_come_first_and_prompts_fill_the_budget() -> None:
    bench = Bench(max_batch_tokens=16)
    bench.add("short")
    assert bench.step() == {"short": 3}
    bench.add("long", num_prompt=40)
    steps = [bench.step() for _ in range(4)]
    assert [step["short"] for step in steps] == [1, 1, 1, 1]
    assert [step["long"] for step in steps] == [15, 15, 10, 1]


def test_running_prompts_leave_a_quarter_for_new_short_prompts() -> None:
    bench = Bench(max_batch_tokens=16)
    bench.add("long", num_prompt=100)
    assert bench.step() == {"long": 16}
    bench.add("short", num_prompt=3)
    assert bench.step() == {"long": 13, "short": 3}
    bench.add("larger", num_prompt=20)
    assert bench.step() == {"long": 15, "short": 1}, "unused rows go back to the long prompt"


def test_prompt_much_shorter_than_the_rest_of_another_begins_in_chunks() -> None:
    bench = Bench(num_pages=300, max_batch_tokens=64)
    bench.add("long", num_prompt=1000, share_key="other")
    bench.step()
    bench.add("short", num_prompt=60)
    bench.add("next", num_prompt=40)
    assert bench.step() == {"long": 48, "short": 16}
    assert bench.step() == {"long": 48, "short": 16}, "the next prompt is about as long as the rest of this one"
    bench.add("tiny", num_prompt=4, max_tokens=1)
    assert bench.step() == {"long": 48, "short": 12, "tiny": 4}, "a prompt that fits does not wait for it"
    assert bench.step() == {"long": 48, "short": 16}
    assert bench.step() == {"short": 1, "long": 48, "next": 15}


def test_new_prompts_leave_half_of_the_quarter_to_a_prompt_that_has_begun_in_chunks() -> None:
    bench = Bench(num_pages=300, max_batch_tokens=64)
    bench.add("long", num_prompt=1000, share_key="other")
    bench.step()
    bench.add("short", num_prompt=60)
    steps = [bench.step()]
    for number in range(5):
        for share_key in "ab":
            bench.add(f"tiny {number}", num_prompt=8, max_tokens=1, share_key=share_key)
        steps.append(bench.step())
    assert [step["long"] for step in steps] == [48] * 6
    assert [step["short"] for step in steps] == [16, 8, 8, 8, 8, 8]


def test_two_long_prompts_of_a_tenant_do_not_keep_a_much_shorter_one_out() -> None:
    bench = Bench(num_pages=2000, max_batch_tokens=64)
    bench.add("long", num_prompt=5000, share_key="other")
    bench.step()
    bench.add("second", num_prompt=1000, share_key="other")
    bench.step()
    bench.add("short", num_prompt=60)
    steps = [bench.step() for _ in range(12)]
    assert steps[0] == {"long": 48, "second": 8, "short": 8}
    assert steps[1] == {"long": 48, "second": 12, "short": 4}
    assert sum(step["short"] for step in steps) == 52


class Throttled(Followed):
    def is_awaited(self, grammar: Grammar) -> bool:
        return False

    def is_throttled(self, grammar: Grammar) -> bool:
        return True


def add_throttled(bench: Bench, num_prompt: int) -> tuple[Sequence, Grammar]:
    """Run a sequence until it waits for the mask after its first token."""
    sequence = bench.add("held", num_prompt=num_prompt, share_key="held")
    grammar = sequence.grammar = Grammar("", 50, b"", "held", Throttled())
    grammar.settle(ALLOWED)
    while len(sequence.tokens) == num_prompt:
        bench.step()
    return sequence, grammar


def test_share_pays_again_for_a_sequence_that_was_preempted_while_it_was_stalled() -> None:
    bench = Bench(num_pages=16, max_batch_tokens=64)
    held, grammar = add_throttled(bench, num_prompt=40)
    bench.add("other", num_prompt=40, max_tokens=1)
    served = bench.scheduler.queue.served(held)
    while bench.step():
        pass
    assert bench.scheduler.num_preemptions == 1, "the other sequence needed its pages"
    grammar.settle(ALLOWED)
    bench.scheduler.queue.unpark(held)
    bench.step()
    assert bench.scheduler.queue.served(held) == served + INPUT_PRICE * 41 + OUTPUT_PRICE


def test_share_does_not_pay_again_for_a_preemption_that_others_cause() -> None:
    bench = Bench(num_pages=16)
    flex = bench.add("flex", num_prompt=40, service_tier="flex", share_key="flex")
    while len(flex.tokens) == 40:
        bench.step()
    served = bench.scheduler.queue.served(flex)
    bench.add("priority", num_prompt=40, max_tokens=1, service_tier="priority")
    while bench.scheduler.num_preemptions == 0 or len(flex.tokens) == 41:
        bench.step()
    assert bench.scheduler.queue.served(flex) == served + OUTPUT_PRICE / TIER_FACTORS["flex"]


def test_sequence_with_a_token_in_flight_keeps_its_pages() -> None:
    """With lookahead, a sequence of a throttled tenant sits out after each token. The token may end it."""
    bench = Bench(num_pages=16, max_batch_tokens=64)
    held, _ = add_throttled(bench, num_prompt=40)
    held.choose(0)
    bench.add("other", num_prompt=40, max_tokens=1)
    assert bench.step() == {}
    assert bench.running == {"held"}


def test_prompt_that_is_not_much_shorter_waits_for_the_rest_of_another() -> None:
    bench = Bench(num_pages=300, max_batch_tokens=64)
    bench.add("long", num_prompt=256)
    bench.step()
    bench.add("other", num_prompt=40)
    assert [bench.step() for _ in range(4)] == [{"long": 64}] * 3 + [{"long": 1, "other": 40}]


def test_waiting_prompts_beside_a_long_one_look_up_one_page_each(
    simulate: Simulate, monkeypatch: pytest.MonkeyPatch
) -> None:
    simulation = simulate(num_pages=400, max_sequences=64, max_model_len=2048)
    cached = tuple(range(320))
    simulation.engine.add(b"", simulation.make_add("before", cached, 2, isolation_key=b"k"))
    simulation.run()
    simulation.add("long", num_prompt=1500)
    for number in range(50):
        # More tokens are left than fit beside the long prompt.
        prompt = (*cached, *range(number, number + 380))
        simulation.engine.add(b"", simulation.make_add(f"waiting {number}", prompt, 2, isolation_key=b"k"))
    simulation.step()
    simulation.step()
    find, keys = simulation.prefixes.find_anywhere, []

    def counted(key: bytes) -> AnyPage | None:
        keys.append(key)
        return find(key)

    monkeypatch.setattr(simulation.prefixes, "find_anywhere", counted)
    simulation.step()
    assert len(keys) == 50
    monkeypatch.undo()
    simulation.run()
    assert simulation.finished["waiting 0"].cached_tokens == 320


def test_number_of_running_sequences_is_limited() -> None:
    bench = Bench(max_sequences=2)
    for name in ("first", "second", "third"):
        bench.add(name, max_tokens=2)
    assert bench.step().keys() == bench.step().keys() == {"first", "second"}
    assert bench.step().keys() == {"third"}


def test_finished_sequence_releases_all_resources() -> None:
    bench = Bench(sizes={"a": 2})
    sequence = bench.add("s", num_prompt=9, max_tokens=2, digest="a")
    while sequence.state is not SequenceState.FINISHED:
        bench.step()
    assert (bench.running, bench.scheduler.has_work) == (set(), False)
    assert bench.pages.num_free == 64 - 2
    assert bench.adapters.unload("a"), "its adapter is idle"


def test_rows_of_an_adapter_are_adjacent() -> None:
    bench = Bench(max_sequences=5, sizes={"a": 1, "b": 1})
    for name, digest in [("1", "a"), ("2", "b"), ("3", None), ("4", "a"), ("5", "b")]:
        bench.add(name, digest=digest)
    for _ in range(3):
        order = list(bench.step())
    assert len(order) == 5
    assert abs(order.index("1") - order.index("4")) == abs(order.index("2") - order.index("5")) == 1


def test_sequence_with_a_loading_adapter_is_skipped() -> None:
    bench = Bench(sizes={"a": 1})
    bench.hold_loads()
    bench.add("cold", digest="a", priority=-9)
    bench.add("base")
    assert bench.step() == {"base": 3}
    bench.let_loads_go()
    for _ in range(2):
        bench.step()
    assert bench.running == {"cold", "base"}


def test_sequence_that_can_never_fit_with_its_adapter_is_reported_once() -> None:
    bench = Bench(num_pages=4, sizes={"a": 2})
    sequence = bench.add("s", num_prompt=5, max_tokens=4, digest="a")
    for _ in range(3):
        assert bench.step() == {}
    assert set(bench.scheduler.take_unfit()) == {sequence}
    assert bench.scheduler.take_unfit() == []
    assert bench.scheduler.max_tokens(num_adapter_pages=2) == 8


def test_demand_lists_adapters_in_queue_order() -> None:
    bench = Bench(max_sequences=3, sizes={"a": 1, "b": 1})
    bench.hold_loads()
    bench.add("running")
    bench.step()
    for name, digest, priority in [("1", "a", 0), ("2", "b", -1), ("3", "a", -2), ("4", None, -3)]:
        bench.add(name, digest=digest, priority=priority)
    demand = bench.scheduler.order_waiting()
    assert list(demand.queue_positions.items()) == [("a", 1), ("b", 2)]
    assert (demand.num_free_sequence_slots, demand.num_growing, demand.short_position) == (2, 1, NOT_SHORT)


def begin_all(bench: Bench, *sequences: Sequence) -> None:
    """Run the sequences until each has filled its first page and needs another."""
    for _ in range(2):
        bench.step()
    assert [len(sequence.tables[0].blocks) for sequence in sequences] == [1] * len(sequences)


@pytest.mark.parametrize(
    ("priorities", "victim"), [((0, 0, 0), "c"), ((1, 0, 0), "a"), ((0, 1, -1), "b")], ids=["youngest", "a", "b"]
)
def test_victim_is_the_youngest_with_the_lowest_priority(priorities: tuple[int, ...], victim: str) -> None:
    bench = Bench(num_pages=4)
    begin_all(bench, *(bench.add(name, priority=priority) for name, priority in zip("abc", priorities, strict=True)))
    bench.step()
    assert bench.scheduler.num_preemptions == 1
    assert bench.running == set("abc") - {victim}


def test_victim_comes_from_the_most_served_share_whatever_the_priorities() -> None:
    bench = Bench(num_pages=6)
    shares = {"1": "greedy", "2": "greedy", "3": "x", "4": "y"}
    begin_all(bench, *(bench.add(name, share_key=share, priority=int(name)) for name, share in shares.items()))
    bench.step()
    assert bench.scheduler.num_preemptions == 1
    assert bench.running == {"1", "3", "4"}


def test_step_that_preempts_admits_no_sequence() -> None:
    """Any sequence admitted in the same step, even the victim, would take the freed pages."""
    bench = Bench(num_pages=4)
    bench.add("a")
    victim = bench.add("victim", num_prompt=11, priority=1)
    for _ in range(2):
        bench.step()
    bench.add("waiting", num_prompt=2)
    assert bench.step() == {"a": 1}
    assert (victim.state, len(victim.tables[0].blocks), victim.num_computed) == (SequenceState.WAITING, 0, 0)
    assert bench.step() == {"a": 1, "waiting": 2}


def test_victim_resumes_with_room_for_all_tokens_and_recomputes_them() -> None:
    bench = Bench(num_pages=4, max_batch_tokens=8)
    bench.add("a", max_tokens=6)
    victim = bench.add("victim", num_prompt=11, priority=1)
    for _ in range(3):
        bench.step()
    assert (bench.running, victim.num_tokens) == ({"a"}, 12)
    while bench.running:
        assert "victim" not in bench.step(), "it had three pages, and only two are free"
    assert [bench.step() for _ in range(3)] == [{"victim": 8}, {"victim": 4}, {"victim": 1}]


def test_no_preemption_while_a_copy_is_about_to_become_evictable() -> None:
    bench = Bench(num_pages=3, sizes={"a": 1})
    begin_all(bench, bench.add("x"), bench.add("y"))
    bench.add("waiting", digest="a")
    bench.adapter_pages.is_holding = True
    assert bench.step() == {}, "both need a page, and the last one is being copied to"
    assert bench.scheduler.is_short_of_pages
    assert bench.running == {"x", "y"}
    bench.let_loads_go()
    assert bench.step() == {"x": 1}, "the idle adapter was evicted"


def test_sequences_of_one_adapter_are_adjacent(simulation: Simulation) -> None:
    for i, digest in enumerate(["a", "b", "a", None, "b", "a"]):
        simulation.add(f"s{i}", digest=digest, max_tokens=6)
    simulation.run()
    for batch in simulation.executor.batches:
        seen = [slot for i, slot in enumerate(batch.slots) if i == 0 or slot != batch.slots[i - 1]]
        assert len(seen) == len(set(seen))


def test_long_prompt_is_chunked_while_decode_continues(simulation: Simulation) -> None:
    short = simulation.add("short", num_prompt=4, max_tokens=12)
    simulation.step()
    long = simulation.add("long", num_prompt=300, max_tokens=3)
    received = len(simulation.tokens["short"])
    for expected in range(received + 1, received + 5):
        simulation.step()
        assert len(simulation.tokens["short"]) == expected, "decodes must not wait for the prompt"
    simulation.run()
    assert simulation.tokens["short"] == simulation.expected(short)
    assert simulation.tokens["long"] == simulation.expected(long)
    assert max(len(batch.tokens) for batch in simulation.executor.batches) <= 64


def test_base_traffic_does_not_wait_for_a_loading_adapter(simulation: Simulation) -> None:
    simulation.hold_loads()
    waiting = simulation.add("waiting", digest="a")
    base = simulation.add("base")
    for _ in range(8):
        simulation.step()
    assert simulation.tokens["base"] == simulation.expected(base)
    assert "waiting" not in simulation.finished
    simulation.let_loads_go()
    simulation.run()
    assert simulation.tokens["waiting"] == simulation.expected(waiting)


def test_preempted_sequences_are_recomputed_correctly(simulate: Simulate) -> None:
    simulation = simulate(num_pages=12, adapters={"a": 2})
    adds = [simulation.add(f"s{i}", num_prompt=20, max_tokens=60, digest="a" if i % 2 else None) for i in range(5)]
    simulation.run()
    for add in adds:
        assert simulation.tokens[add.sequence_id] == simulation.expected(add)
        assert simulation.finished[add.sequence_id].completion_tokens == 60
    assert stats_of(simulation).num_preemptions > 0


def test_adapter_misses_do_not_block_base_traffic(simulate: Simulate) -> None:
    names = {f"adapter{i}": 1 for i in range(100)}
    simulation = simulate(num_slots=4, adapters=names, max_sequences=4)
    simulation.hold_loads()
    for name in names:
        simulation.add(name, digest=name)
    base = simulation.add("base", max_tokens=3)
    for _ in range(5):
        simulation.step()
    assert simulation.tokens["base"] == simulation.expected(base)
    # The engine prefetches only as many adapters as can run next.
    assert simulation.stager.num_requests <= 5
    simulation.let_loads_go()
    simulation.run()
    assert len(simulation.finished) == 101


def test_victim_is_the_least_urgent_of_the_most_served_share(simulate: Simulate) -> None:
    simulation = simulate(num_pages=9, max_sequences=3)
    simulation.add("greedy", num_prompt=60, max_tokens=60, share_key="greedy")
    simulation.step()
    simulation.add("modest", num_prompt=20, max_tokens=80, share_key="modest", priority=9)
    simulation.add("urgent", num_prompt=20, max_tokens=60, share_key="greedy", priority=-1)
    while stats_of(simulation).num_preemptions == 0:
        simulation.step()
    assert {one.sequence_id for one in simulation.scheduler.running} == {"modest", "urgent"}
    simulation.run()
    assert {one.reason for one in simulation.finished.values()} == {"length"}


def test_short_prompt_does_not_wait_for_a_running_long_prompt(simulate: Simulate) -> None:
    simulation = simulate(max_batch_tokens=64, max_model_len=1024, num_pages=100)
    simulation.add("long", num_prompt=1000)
    simulation.step()
    simulation.add("short", num_prompt=12)
    for _ in range(3):
        simulation.step()
    assert simulation.tokens["short"]
    assert not simulation.tokens["long"]
    simulation.run()


def test_rows_unused_by_new_prompts_go_to_the_running_prompt(simulate: Simulate) -> None:
    """Do not reserve rows for waiting requests that get no pages."""
    simulation = simulate(max_batch_tokens=64, max_model_len=1024, num_pages=64)
    simulation.add("long", num_prompt=1000, max_tokens=2)
    simulation.step()
    for number in range(3):
        simulation.add(f"waiting{number}", num_prompt=500, max_tokens=9, priority=1)
    steps = 1
    while not simulation.tokens["long"]:
        simulation.step()
        steps += 1
    assert steps <= 1000 // 64 + 3
    simulation.run()


def test_chunked_prompt_progresses_while_adapters_arrive(simulate: Simulate) -> None:
    for num_pages, num_prompt, num_adapters, size, budget in itertools.product(
        (10, 12), (120, 150), (2, 4), (1, 3), (16, 32)
    ):
        names = {f"a{i}": size for i in range(num_adapters)}
        simulation = simulate(num_pages=num_pages, max_batch_tokens=budget, adapters=names)
        long = simulation.add("long", num_prompt=num_prompt, max_tokens=4)
        for name in names:
            simulation.add(name, digest=name, max_tokens=2)
            simulation.step()
        assert finishes(simulation, 300)
        assert simulation.tokens["long"] == simulation.expected(long)
