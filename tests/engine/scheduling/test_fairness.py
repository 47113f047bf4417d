from __future__ import annotations

import itertools
import random
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from loramux.engine.constraints.grammar import Grammar
from loramux.engine.protocol.messages import Add
from loramux.engine.scheduling.fair_queue import MAX_COST_RATIO, MAX_ROUNDS, ROUNDS_BETWEEN_CHECKS, FairQueue
from loramux.engine.scheduling.shares import FairShare, place
from loramux.engine.sequences.sequence import Sequence, SequenceState
from tests.engine.constraints.test_grammar import Followed
from tests.engine.simulated_engine import GREEDY, Simulate, Simulation


def waiting(queue: FairQueue, arrival: int, share: str = "", num_prompt: int = 10, **fields: object) -> Sequence:
    add = Add(
        sequence_id=str(arrival), prompt=(0,) * num_prompt, max_tokens=10, sampling=GREEDY, share_key=share, **fields
    )
    sequence = Sequence(add=add, owner=b"", arrival=arrival, seed=0)
    queue.add(sequence)
    return sequence


def admit_next(queue: FairQueue) -> Sequence:
    (sequence,) = queue.order(1, 0)
    queue.admit(sequence, sequence.num_tokens)
    return sequence


def test_shares_take_turns_regardless_of_arrival() -> None:
    queue = FairQueue()
    for arrival in range(6):
        waiting(queue, arrival, "flood")
    waiting(queue, 6, "polite")
    waiting(queue, 7, "polite")
    assert [one.add.share_key for one in queue.order(8, 0)] == ["flood", "polite"] * 2 + ["flood"] * 4
    assert [admit_next(queue).add.share_key for _ in range(5)] == ["flood", "polite", "flood", "polite", "flood"]


def test_input_and_output_are_charged() -> None:
    queue = FairQueue()
    waiting(queue, 0, "long", num_prompt=100)
    for arrival in range(1, 8):
        waiting(queue, arrival, "short", num_prompt=10)
    waiting(queue, 9, "long", num_prompt=100)
    first = admit_next(queue)
    assert first.add.share_key == "long"
    assert [admit_next(queue).add.share_key for _ in range(3)] == ["short"] * 3
    (short,) = queue.order(1, 0)
    assert short.add.share_key == "short"
    for _ in range(40):
        # The cost of 80 output tokens and 30 prompt tokens exceeds the other share's 100.
        queue.charge_outputs([short])
    assert admit_next(queue).add.share_key == "long"


@pytest.mark.parametrize("weight", [1, 2, 5])
def test_service_is_proportional_to_weight(weight: int) -> None:
    queue = FairQueue()
    for arrival in range(300):
        waiting(queue, arrival, "heavy", weight=weight)
        waiting(queue, 1000 + arrival, "light")
    served = Counter(admit_next(queue).add.share_key for _ in range(60 * (weight + 1) // weight))
    assert served["heavy"] / served["light"] == pytest.approx(weight, rel=0.1)


def test_idle_shares_accumulate_no_credit() -> None:
    queue = FairQueue()
    for arrival in range(40):
        waiting(queue, arrival, "busy")
    for _ in range(20):
        admit_next(queue)
    for arrival in range(40, 60):
        waiting(queue, arrival, "late")
    served = [admit_next(queue).add.share_key for _ in range(10)]
    assert Counter(served) == {"busy": 5, "late": 5}


def test_equally_served_share_with_fewest_running_goes_first() -> None:
    """A share that arrives during a flood is served equally. By age alone, it would wait behind the flood."""
    queue = FairQueue()
    for arrival in range(40):
        waiting(queue, arrival, "flood")
    for _ in range(8):
        admit_next(queue)
    waiting(queue, 40, "polite")
    assert admit_next(queue).add.share_key == "polite"


def test_brief_idleness_does_not_reset_service() -> None:
    queue = FairQueue()
    greedy = waiting(queue, 0, "greedy", num_prompt=1000)
    waiting(queue, 1, "other", num_prompt=5)
    admit_next(queue)
    queue.leave(greedy)
    waiting(queue, 2, "greedy", num_prompt=5)
    waiting(queue, 3, "other", num_prompt=5)
    assert [admit_next(queue).arrival for _ in range(3)] == [1, 3, 2]


def test_preempted_sequence_of_a_share_that_has_had_little_lets_nobody_overtake() -> None:
    queue = FairQueue()
    little = waiting(queue, 0, "little", num_prompt=10)
    admit_next(queue)
    for arrival in range(1, 4):
        waiting(queue, arrival, "much", num_prompt=100)
    admit_next(queue)
    waiting(queue, 4, "first", num_prompt=10)
    queue.leave(little)
    little.state, little.has_run = SequenceState.WAITING, True
    queue.add(little)
    waiting(queue, 5, "second", num_prompt=10)
    assert [one.arrival for one in queue.order(3, 0)] == [0, 4, 5]


def test_lower_priority_value_goes_first_within_a_share() -> None:
    queue = FairQueue()
    for arrival, priority in enumerate([0, 5, -1, 0, -1]):
        waiting(queue, arrival, priority=priority)
    assert [one.arrival for one in queue.order(5, 0)] == [2, 4, 0, 3, 1]


def test_priority_changes_nothing_for_other_shares() -> None:
    plain, urgent = FairQueue(), FairQueue()
    for queue, priority in ((plain, 0), (urgent, -9)):
        for arrival in range(6):
            waiting(queue, arrival, "a")
        for arrival in range(6, 12):
            waiting(queue, arrival, "b", priority=priority * arrival)
    turns = [[admit_next(queue) for _ in range(12)] for queue in (plain, urgent)]
    assert [one.add.share_key for one in turns[0]] == [one.add.share_key for one in turns[1]] == ["a", "b"] * 6
    assert [one.arrival for one in turns[1] if one.add.share_key == "b"] == [11, 10, 9, 8, 7, 6]


def test_full_queue_refuses_the_newest_of_a_shares_least_urgent_sequences() -> None:
    queue = FairQueue()
    for arrival, priority in enumerate([3, 7, 7, -2]):
        waiting(queue, arrival, "large", priority=priority)
    waiting(queue, 4, "small", priority=1000)
    candidate = queue.shed_candidate()
    assert candidate is not None
    assert candidate.arrival == 2


@pytest.mark.parametrize(("num_prompt", "bound"), [(1, MAX_ROUNDS), (5000, MAX_COST_RATIO * MAX_ROUNDS)])
def test_wait_is_bounded_whatever_other_shares_do(num_prompt: int, bound: int) -> None:
    """The bound is MAX_ROUNDS admissions from other shares. Very costly requests have a higher bound."""
    queue, arrivals = FairQueue(), itertools.count()
    for _ in range(2 * bound):
        waiting(queue, next(arrivals), "pushy", num_prompt=1, digest="a")
    # While the other share's adapter is loading, this share is served until its counter is far ahead.
    for _ in range(1 + 2 * bound // num_prompt):
        waiting(queue, next(arrivals), "patient", num_prompt=num_prompt)
        admit_next(queue)
    waiting(queue, next(arrivals), "patient", num_prompt=num_prompt)
    queue.set_resident("a", True)
    order = [admit_next(queue).add.share_key for _ in range(bound + ROUNDS_BETWEEN_CHECKS + 1)]
    assert bound <= order.index("patient") <= bound + ROUNDS_BETWEEN_CHECKS


@pytest.mark.parametrize("num_shares", [10, 200])
def test_costly_requests_get_only_their_share(num_shares: int) -> None:
    """Aging must not turn fairness by tokens into fairness by requests."""
    queue, arrivals = FairQueue(), itertools.count()

    def ask(share: int) -> None:
        waiting(queue, next(arrivals), str(share), num_prompt=500 if share < num_shares // 2 else 10)

    for share in range(num_shares):
        ask(share)
    tokens: Counter[int] = Counter()
    for _ in range(60 * num_shares):
        sequence = admit_next(queue)
        queue.leave(sequence)
        ask(int(sequence.add.share_key))
        tokens[int(sequence.add.share_key)] += sequence.num_tokens
    dear = sum(tokens[share] for share in range(num_shares // 2))
    cheap = sum(tokens[share] for share in range(num_shares // 2, num_shares))
    assert 0.7 < dear / cheap < 1.4


class PlainOrder:
    """The expected order, sorted from scratch. The queue must produce the same order with and without its heaps."""

    def __init__(self, queue: FairQueue, num_ready: int, num_cold: int) -> None:
        self.turns: list[tuple[tuple[float, ...], int]] = []
        for share in queue._waiting:
            rounds = queue._num_admissions - share.waits_since if share in queue._late else 0
            for is_ready, count in ((True, num_ready), (False, num_cold)):
                if count:
                    self.go_through(share, is_ready, rounds)
        kept = {True: num_ready, False: num_cold}
        self.arrivals: list[int] = []
        resident = {one.arrival for share in queue._waiting for one in share.ready}
        for _, arrival in sorted(self.turns):
            if kept[arrival in resident]:
                kept[arrival in resident] -= 1
                self.arrivals.append(arrival)
            if num_ready and not kept[True] and len(resident) > num_ready:
                break

    def go_through(self, share: FairShare, is_ready: bool, rounds: int) -> None:
        served, running = share.served, share.num_running
        for one in sorted(share.ready if is_ready else share.ready + share.cold, key=place):
            if one in share.line(is_ready):
                late = (0, -rounds, 0, one.arrival)
                fair = (1, served, running, one.arrival)
                self.turns.append((late if rounds else fair, one.arrival))
            served += one.num_tokens / share.weight
            running += 1
            rounds = 0


@given(st.data())
@settings(max_examples=40, deadline=None)
def test_queue_order_equals_sorting_all_waiting_sequences(data: st.DataObject) -> None:
    queue, arrivals, running = FairQueue(), itertools.count(), []
    rng = random.Random(data.draw(st.integers(0, 2**32)))
    num_shares = data.draw(st.sampled_from([2, 20]))
    for _ in range(300):
        match rng.choice(["add", "add", "admit", "admit", "output", "leave", "remove", "residency"]):
            case "add":
                waiting(
                    queue,
                    next(arrivals),
                    str(rng.randrange(num_shares)),
                    num_prompt=rng.choice([1, 10, 300]),
                    weight=rng.choice([1, 1, 3]),
                    priority=rng.choice([0, 0, 0, 2]),
                    digest=rng.choice([None, "a", "b", "c"]),
                )
            case "admit" if ready := queue.order(1, 0):
                queue.admit(ready[0], ready[0].num_tokens)
                running.append(ready[0])
            case "output" if running:
                queue.charge_outputs([rng.choice(running)])
            case "leave" if running:
                queue.leave(running.pop(rng.randrange(len(running))))
            case "remove" if all_waiting := queue.sequences():
                queue.remove(rng.choice(all_waiting))
            case "residency":
                queue.set_resident(rng.choice("abc"), rng.random() < 0.5)
        num_ready, num_cold = rng.choice([(1, 0), (4, 4), (0, 3), (50, 50)])
        found = [one.arrival for one in queue.order(num_ready, num_cold)]
        assert found == PlainOrder(queue, num_ready, num_cold).arrivals


def test_queue_keeps_nothing_of_shares_that_no_longer_wait() -> None:
    queue = FairQueue()
    for number in range(40):
        waiting(queue, number, str(number), digest="a")
    assert len(queue.order(1, 1)) == 1
    for number in range(40, 80):
        waiting(queue, number, str(number))
    # The heaps are not needed here, so they are not updated.
    assert len(queue.order(100, 100)) == 80
    for sequence in queue.sequences():
        queue.remove(sequence)
    assert queue.order(1, 1) == []
    assert not queue._outdated
    assert not any(heap._current for heap in queue._heads.values())


def test_flood_does_not_age_to_the_front() -> None:
    """Age counts per share: ten thousand old requests of a share count as a single wait."""
    queue = FairQueue()
    for arrival in range(10_000):
        waiting(queue, arrival, "flood")
    for _ in range(2 * MAX_ROUNDS):
        admit_next(queue)
    waiting(queue, 10_000, "polite")
    assert "polite" in [admit_next(queue).add.share_key for _ in range(2)]


@given(st.integers(2, 6), st.integers(0, 2**32))
@settings(max_examples=15, deadline=None)
def test_wait_bound_applies_to_any_traffic(shares: int, seed: int) -> None:
    queue, arrival, rng = FairQueue(), 0, random.Random(seed)
    unserved: dict[str, int] = {}
    # Some shares are silent for long, or always have the same weight and priority.
    rates = [1.0, *(rng.choice([0.05, 0.5, 1.0]) for _ in range(shares - 1))]
    weights = [rng.choice([(1,), (4,), (1, 4)]) for _ in range(shares)]
    priorities = [rng.choice([(0,), (3,), (0, 0, 3)]) for _ in range(shares)]
    for _ in range(150):
        for share in range(shares):
            if rng.random() < rates[share]:
                waiting(
                    queue,
                    arrival,
                    str(share),
                    num_prompt=rng.choice([40, 50, 60]),
                    weight=rng.choice(weights[share]),
                    priority=rng.choice(priorities[share]),
                )
                unserved.setdefault(str(share), 0)
                arrival += 1
        served = admit_next(queue).add.share_key
        still_waiting = {one.add.share_key for one in queue.sequences()}
        unserved = {key: 0 if key == served else count + 1 for key, count in unserved.items() if key in still_waiting}
        assert max(unserved.values(), default=0) <= MAX_ROUNDS + ROUNDS_BETWEEN_CHECKS + shares


def test_sequences_are_ready_while_their_adapter_is_resident() -> None:
    queue = FairQueue()
    for arrival, digest in enumerate(["a", None, "b", "a"]):
        waiting(queue, arrival, digest=digest)
    assert ([one.arrival for one in queue.order(9, 0)], queue.num_cold) == ([1], 3)
    queue.set_resident("a", True)
    assert ([one.arrival for one in queue.order(9, 0)], queue.num_cold) == ([0, 1, 3], 1)
    assert [one.arrival for one in queue.order(9, 9)] == [0, 1, 2, 3]
    queue.set_resident("a", False)
    assert [one.arrival for one in queue.order(9, 2)] == [0, 1, 2]
    for sequence in queue.sequences():
        queue.remove(sequence)
    assert (queue.num_waiting, queue.num_cold, queue.num_waiting_tokens) == (0, 0, 0)


def unready(queue: FairQueue, arrival: int, **fields: object) -> tuple[Sequence, Grammar]:
    """A waiting sequence whose first mask is still being computed."""
    sequence = waiting(queue, arrival, **fields)
    queue.remove(sequence)
    grammar = sequence.grammar = Grammar("", 50, b"", "", Followed())
    queue.add(sequence)
    return sequence, grammar


def test_sequences_without_masks_take_no_place_in_the_order() -> None:
    queue = FairQueue()
    queue.set_resident("a", True)
    pairs = [unready(queue, arrival, digest=digest) for arrival, digest in enumerate([None, "a", "b"])]
    waiting(queue, 3)
    assert [one.arrival for one in queue.order(1, 0)] == [3]
    assert (queue.num_waiting, queue.num_ready, queue.num_cold, queue.num_paused) == (4, 1, 1, 0)
    queue.set_resident("b", True)
    assert (queue.num_ready, queue.num_cold) == (1, 0), "it still has no mask"
    for sequence, grammar in pairs:
        queue.unpark(sequence)
        assert sequence not in queue.order(9, 0)
        grammar.settle(b"\x06")
        queue.unpark(sequence)
    assert [one.arrival for one in queue.order(9, 0)] == [0, 1, 2, 3]
    for sequence in queue.sequences():
        queue.remove(sequence)
    assert (queue.num_waiting, queue.num_ready, queue.num_waiting_tokens) == (0, 0, 0)


def test_share_saves_up_no_credit_while_its_masks_are_computed() -> None:
    queue = FairQueue()
    slow, grammar = unready(queue, 0, share="slow")
    for arrival in range(1, 60):
        waiting(queue, arrival, "other")
    for _ in range(20):
        admit_next(queue)
    grammar.settle(b"\x06")
    queue.unpark(slow)
    for arrival in range(60, 80):
        waiting(queue, arrival, "slow")
    assert Counter(admit_next(queue).add.share_key for _ in range(10)) == {"slow": 5, "other": 5}


class Watched(Sequence):
    """Counts how often a queue asks whether the sequence has run."""

    __slots__ = ()
    num_asked = 0

    @property
    def has_run(self) -> bool:
        Watched.num_asked += 1
        return False

    @has_run.setter
    def has_run(self, value: bool) -> None:
        pass


@pytest.mark.parametrize("is_ready", [True, False], ids=["ready", "without masks"])
def test_refusing_one_of_a_flood_does_not_look_at_all_of_it(is_ready: bool) -> None:
    queue = FairQueue()
    for arrival in range(1000):
        add = Add(sequence_id=str(arrival), prompt=(0,), max_tokens=1, sampling=GREEDY, share_key=str(arrival % 2))
        sequence = Watched(add=add, owner=b"", arrival=arrival, seed=0)
        if not is_ready:
            sequence.grammar = Grammar("", 50, b"", "", Followed())
        queue.add(sequence)
    Watched.num_asked = 0
    refused = [queue.shed_candidate() for _ in range(2)]
    assert [one and one.arrival for one in refused] == [998, 998]
    assert Watched.num_asked == 2


def test_flood_barely_delays_a_polite_share(simulate: Simulate) -> None:
    def first_token_steps(flood_share: str) -> list[int]:
        rng = random.Random(1)
        simulation = simulate(num_pages=400, max_sequences=8, max_batch_tokens=128)
        steps: list[int] = []
        asked_at, polite = 0, 0
        simulation.add("polite0", num_prompt=20, max_tokens=4, share_key="polite")
        for step in range(1500):
            while simulation.scheduler.queue.num_waiting < 30:
                number = rng.getrandbits(60)
                share = flood_share or f"share{number % 30}"
                simulation.add(f"other{number}", rng.randint(10, 60), rng.randint(4, 20), share_key=share)
            simulation.step()
            name = f"polite{polite}"
            if len(simulation.tokens[name]) == 1 and len(steps) == polite:
                steps.append(step - asked_at)
            if name in simulation.finished:
                polite += 1
                asked_at = step
                simulation.add(f"polite{polite}", num_prompt=20, max_tokens=4, share_key="polite")
        return sorted(steps)

    beside_flood, beside_many = first_token_steps("flood"), first_token_steps("")
    assert len(beside_flood) > 50

    def p99(steps: list[int]) -> int:
        return steps[int(0.99 * len(steps))]

    assert p99(beside_flood) <= 1.25 * p99(beside_many)


def test_equal_work_gives_equal_counters(simulate: Simulate) -> None:
    simulation: Simulation = simulate(num_pages=14, max_sequences=4)
    for i in range(12):
        simulation.add(f"s{i}", num_prompt=30, max_tokens=20, share_key="xy"[i % 2], isolation_key=b"k")
    simulation.run()
    queue = simulation.scheduler.queue
    served = {share.key[0]: share.served for share in queue._idle.values()}
    assert served["x"] == pytest.approx(served["y"], abs=40)


def test_new_and_returning_shares_start_level_on_an_idle_engine(simulate: Simulate) -> None:
    simulation = simulate(num_pages=400, max_sequences=4)
    for i in range(30):
        simulation.add(f"old{i}", num_prompt=60, max_tokens=40, share_key="old")
    simulation.run()
    for i in range(60):
        simulation.add(f"new{i}", num_prompt=10, max_tokens=10, share_key="new")
    simulation.step()
    for i in range(10):
        simulation.add(f"again{i}", num_prompt=10, max_tokens=10, share_key="old")
    simulation.finished.clear()
    simulation.run()
    ends = list(simulation.finished)
    assert max(ends.index(f"again{i}") for i in range(10)) < 40


def test_weights_apply_with_any_number_of_waiting_shares() -> None:
    queue, arrival = FairQueue(), 0
    num_shares = 2 * MAX_ROUNDS
    for _ in range(60):
        for share in range(num_shares):
            waiting(queue, arrival, str(share), weight=5 if share == 0 else 1)
            arrival += 1
    served = Counter(admit_next(queue).add.share_key for _ in range(10 * num_shares))
    assert 3 * served["1"] <= served["0"] <= 7 * served["1"]
