"""Service tiers in the engine: weights, and the order in which sequences are preempted and refused."""

from __future__ import annotations

from collections import Counter

import pytest
from msgspec import structs

from loramux.engine.protocol.service_tiers import FIRST_TIER_LEAD, SERVICE_TIERS, TIER_FACTORS
from loramux.engine.scheduling.fair_queue import FairQueue
from loramux.engine.sequences.sequence import Sequence, SequenceState
from tests.engine.scheduling.test_fairness import admit_next, waiting
from tests.engine.scheduling.test_scheduler import Bench
from tests.engine.simulated_engine import Simulate, Simulation, finishes, stats_of


def filled(tier: str, num_sequences: int = 4, **limits: int) -> Bench:
    bench = Bench(max_sequences=num_sequences, **limits)
    for number in range(num_sequences):
        bench.add(f"{tier} {number}", max_tokens=1000, service_tier=tier)
        bench.step()
    assert len(bench.running) == num_sequences
    return bench


def use_lead(queue: FairQueue) -> int:
    """Admit sequences until the first tier has used its lead. Returns the number of its sequences."""
    num_first = 0
    while admit_next(queue).add.service_tier == "priority":
        num_first += 1
    return num_first


@pytest.mark.parametrize("weight", [1, 1000])
def test_first_tier_goes_first_until_its_lead_is_used(weight: int) -> None:
    queue = FairQueue()
    for arrival in range(100):
        waiting(queue, arrival, "default", num_prompt=1000)
    for arrival in range(100, 200):
        waiting(queue, arrival, "priority", num_prompt=1000, service_tier="priority", weight=weight)
    assert use_lead(queue) == 1 + FIRST_TIER_LEAD // 1000


def test_lead_follows_a_weight_that_comes_with_a_parked_sequence() -> None:
    queue = FairQueue()
    for arrival in range(40):
        waiting(queue, arrival, "default", num_prompt=1000)
        waiting(queue, 100 + arrival, "priority", num_prompt=1000, service_tier="priority", weight=1000)
    for _ in range(1 + int(FIRST_TIER_LEAD) // 1000):
        admit_next(queue)
    assert queue.order(1, 0)[0].add.service_tier == "default", "the lead of a heavy share is used"
    add = structs.replace(queue.order(1, 0)[0].add, sequence_id="parked", share_key="priority", service_tier="priority")
    parked = Sequence(add=add, owner=b"", arrival=200, seed=0)
    parked.num_reserved = parked.num_tokens
    queue.add(parked)
    assert queue.order(1, 0)[0].add.service_tier == "priority", "a light share has a larger lead of its counter"


def test_service_is_proportional_to_the_factor_of_the_tier() -> None:
    queue = FairQueue()
    for arrival in range(400):
        for number, tier in enumerate(SERVICE_TIERS):
            waiting(queue, 10 * arrival + number, tier, num_prompt=1000, service_tier=tier)
    num_first = 1 + int(FIRST_TIER_LEAD) // 1000
    admitted = Counter(admit_next(queue).add.service_tier for _ in range(num_first + 105))
    admitted["priority"] -= num_first
    assert {tier: admitted[tier] / 20 for tier in SERVICE_TIERS} == TIER_FACTORS


def test_tiers_multiply_the_weight_of_the_tenant() -> None:
    queue = FairQueue()
    for arrival in range(100):
        waiting(queue, 2 * arrival, "heavy", num_prompt=1000, weight=4)
        waiting(queue, 2 * arrival + 1, "priority", num_prompt=1000, service_tier="priority")
    use_lead(queue)
    assert Counter(admit_next(queue).add.share_key for _ in range(40)) == {"heavy": 20, "priority": 20}


def test_tiers_of_a_tenant_are_shares_of_their_own() -> None:
    queue = FairQueue()
    for arrival in range(40):
        waiting(queue, arrival, "acme", service_tier="flex")
    waiting(queue, 40, "acme")
    admit_next(queue)
    assert admit_next(queue).add.service_tier == "default", "the flood of the same tenant's other tier is not before it"


@pytest.mark.parametrize("first", ["flex", "default", "priority"])
def test_short_pool_preempts_the_worst_tier(first: str) -> None:
    """Whichever came first: background sequences before flex, flex before default, default before priority."""
    tiers = [first, *(tier for tier in SERVICE_TIERS if tier != first)]
    bench = Bench(num_pages=12, max_batch_tokens=64, max_sequences=8)
    for tier in tiers:
        bench.add(tier, num_prompt=11, max_tokens=30, service_tier=tier)
        bench.step()
    bench.add("line", num_prompt=3, max_tokens=30, is_background=True)
    lost: list[str] = []
    for _ in range(40):
        before = bench.running
        bench.step()
        lost += [name for name in before - bench.running if bench.scheduler.queue.num_waiting]
        if len(bench.running) == 1:
            break
    assert list(dict.fromkeys(lost)) == ["line", "flex", "default"]
    assert bench.running == {"priority"}


def test_priority_takes_the_slot_of_the_last_flex_sequence() -> None:
    bench = filled("flex")
    bench.add("chat", service_tier="priority")
    assert bench.step()["chat"] == 3
    assert bench.running == {"chat", "flex 0", "flex 1", "flex 2"}
    assert bench.scheduler.num_preemptions == 1


@pytest.mark.parametrize(("running", "new"), [("flex", "default"), ("default", "priority"), ("priority", "priority")])
def test_other_tiers_wait_for_a_slot(running: str, new: str) -> None:
    bench = filled(running)
    bench.add("chat", service_tier=new)
    for _ in range(5):
        bench.step()
    assert "chat" not in bench.running
    assert bench.scheduler.num_preemptions == 0


def test_priority_gets_a_flex_slot_although_another_tier_is_next() -> None:
    bench = filled("flex")
    bench.add("book", service_tier="default", weight=1000, num_prompt=3)
    bench.add("chat", service_tier="priority", num_prompt=12)
    for _ in range(3):
        bench.step()
    assert "chat" in bench.running
    assert "book" not in bench.running


def test_background_sequences_make_room_before_flex_ones() -> None:
    bench = Bench(max_sequences=2, max_batch_tokens=32)
    bench.add("flex", max_tokens=1000, service_tier="flex")
    bench.step()
    bench.add("line", max_tokens=1000, is_background=True)
    for _ in range(3):
        bench.step()
    assert bench.running == {"flex", "line"}
    bench.add("chat", service_tier="priority")
    bench.step()
    assert bench.running == {"flex", "chat"}


def test_priority_gets_pages_of_flex_sequences() -> None:
    bench = Bench(num_pages=8, max_batch_tokens=32, max_sequences=4)
    for name in "ab":
        bench.add(name, num_prompt=12, service_tier="flex")
    assert bench.step() == {"a": 12, "b": 12}
    bench.add("chat", num_prompt=12, service_tier="priority")
    assert bench.step()["chat"] == 12
    assert bench.running == {"chat", "a"}


def test_full_queue_refuses_batches_then_flex_then_default(simulate: Simulate) -> None:
    simulation = simulate(max_sequences=1, max_waiting_tokens=40)
    simulation.add("running", num_prompt=5, max_tokens=5)
    simulation.step()
    for name, fields in {
        "priority": {"service_tier": "priority"},
        "default": {},
        "flex": {"service_tier": "flex"},
        "line": {"is_background": True},
    }.items():
        simulation.add(name, num_prompt=5, max_tokens=5, share_key=name, **fields)
    simulation.step()
    refused: list[str] = []
    for number in range(3):
        simulation.add(f"more {number}", num_prompt=5, max_tokens=5, share_key="more", service_tier="priority")
        simulation.step()
        new = {name for name, one in simulation.finished.items() if one.code == "overloaded"} - set(refused)
        refused += new
    assert refused == ["line", "flex", "default"]
    simulation.run()


def test_preempted_flex_sequences_give_the_same_answer(simulate: Simulate) -> None:
    simulation = simulate(max_sequences=2)
    adds = [simulation.add(f"flex{i}", num_prompt=5, max_tokens=40, service_tier="flex") for i in range(2)]
    for _ in range(4):
        simulation.step()
    adds += [simulation.add(f"chat{i}", num_prompt=5, max_tokens=5, service_tier="priority") for i in range(2)]
    simulation.run()
    assert stats_of(simulation).num_preemptions >= 2
    for add in adds:
        assert simulation.tokens[add.sequence_id] == simulation.expected(add)


def test_unknown_tier_is_refused(simulation: Simulation) -> None:
    simulation.add("one", service_tier="gold")
    simulation.run()
    assert simulation.finished["one"].code == "invalid_request"


@pytest.mark.parametrize("num_prompt", [20, 200])
def test_flex_does_not_begin_while_priority_waits(num_prompt: int) -> None:
    """Otherwise, it would be preempted at once, again and again, and its prompt would be computed each time."""
    bench = Bench(num_pages=400, max_batch_tokens=64, max_sequences=4)
    flex = bench.add("flex", num_prompt=num_prompt, max_tokens=40, service_tier="flex", share_key="other")
    rows, number = 0, 0
    for step in range(400):
        while step < 300 and bench.scheduler.queue.waiting_by_rank[0] < 3:
            bench.add(f"priority {number}", num_prompt=20, max_tokens=10, service_tier="priority")
            number += 1
        rows += bench.step().get("flex", 0)
        if step == 299:
            assert bench.scheduler.num_preemptions <= 1
            assert rows <= num_prompt + 1
    assert flex.state is SequenceState.FINISHED, "it continues afterwards"


@pytest.mark.parametrize("num_before", [3, 6])
def test_priority_behind_a_long_queue_takes_a_slot_of_flex(num_before: int) -> None:
    bench = filled("flex", num_pages=400, max_batch_tokens=64)
    bench.add("first", num_prompt=40, max_tokens=1, service_tier="priority", share_key="acme")
    bench.step()
    bench.step()
    for number in range(num_before):
        bench.add(f"default {number}", max_tokens=60, share_key=f"other {number}")
    bench.add("priority", num_prompt=12, service_tier="priority", share_key="acme")
    bench.step()
    assert "priority" in bench.running


def test_large_request_keeps_its_place_if_nothing_makes_room() -> None:
    """Otherwise, small requests of the first tier would take each page that becomes free."""
    bench = Bench(num_pages=40, max_batch_tokens=64, max_sequences=8)
    bench.add("running", num_prompt=100, max_tokens=50, share_key="other")
    bench.step()
    bench.step()
    bench.add("large", num_prompt=110, max_tokens=4, share_key="large", service_tier="priority")
    bench.add("priority", num_prompt=40, max_tokens=4, service_tier="priority", share_key="acme")
    bench.step()
    assert bench.running == {"running"}


def test_priority_gets_pages_of_flex_behind_a_large_request() -> None:
    bench = Bench(num_pages=40, max_batch_tokens=64, max_sequences=8)
    for number in range(3):
        bench.add(f"flex {number}", num_prompt=40, max_tokens=60, service_tier="flex", share_key="flex")
        bench.step()
    bench.add("large", num_prompt=100, max_tokens=4, share_key="large", weight=1000)
    bench.add("priority", num_prompt=40, max_tokens=4, service_tier="priority", share_key="acme")
    bench.step()
    assert "priority" in bench.running


def test_priority_begins_beside_a_long_flex_prompt() -> None:
    bench = Bench(num_pages=2600, max_batch_tokens=64)
    bench.add("flex", num_prompt=10_000, service_tier="flex", share_key="other")
    assert bench.step() == {"flex": 64}
    bench.add("chat", num_prompt=40, service_tier="priority")
    assert [bench.step() for _ in range(3)] == [
        {"flex": 48, "chat": 16},
        {"flex": 40, "chat": 24},
        {"flex": 63, "chat": 1},
    ]


def test_long_priority_prompt_goes_before_a_flex_prompt() -> None:
    bench = Bench(num_pages=2600, max_batch_tokens=64)
    bench.add("flex", num_prompt=400, service_tier="flex", share_key="other")
    bench.step()
    bench.add("chat", num_prompt=1000, service_tier="priority")
    steps = [bench.step() for _ in range(3)]
    assert [step["chat"] for step in steps] == [16, 48, 48]


def test_priority_prompt_does_not_wait_for_another_because_of_a_flex_prompt() -> None:
    bench = Bench(num_pages=2600, max_batch_tokens=64)
    bench.add("flex", num_prompt=400, service_tier="flex", share_key="other")
    bench.step()
    bench.add("long", num_prompt=1000, service_tier="priority")
    bench.step()
    bench.add("chat", num_prompt=40, service_tier="priority", share_key="chat")
    steps = [bench.step() for _ in range(3)]
    assert [step["chat"] for step in steps] == [8, 12, 12]
    assert [step["long"] for step in steps] == [48, 48, 48]


def behind_flex(simulation: Simulation) -> Simulation:
    """Let the share "acme" use its lead in the first tier, so that a new share of another tier comes before it."""
    simulation.add("before", share_key="acme", service_tier="priority")
    simulation.run()
    simulation.scheduler.queue.charge_time("acme", 1000.0)
    return simulation


@pytest.mark.parametrize("between", [None, 110])
def test_waiting_flex_requests_keep_no_adapter_from_priority(simulate: Simulate, between: int | None) -> None:
    """Otherwise, each of them would wait for the other on an idle engine."""
    simulation = simulate(num_pages=12, adapters={"a": 6}, max_batch_tokens=128, max_sequences=4)
    simulation.add("first", digest="a")
    behind_flex(simulation)
    adds = [simulation.add("flex", num_prompt=40, digest="a", share_key="flex", service_tier="flex")]
    if between is not None:
        adds.append(simulation.add("default", num_prompt=between, share_key="default"))
    adds.append(simulation.add("chat", num_prompt=110, share_key="acme", service_tier="priority"))
    assert finishes(simulation, 100)
    for add in adds:
        assert simulation.tokens[add.sequence_id] == simulation.expected(add)


@pytest.mark.parametrize("tier", ["default", None])
def test_priority_gets_pages_of_flex_for_its_adapter(simulate: Simulate, tier: str | None) -> None:
    simulation = simulate(num_pages=24, adapters={"a": 8, "b": 8}, max_sequences=4)
    for name in "xy":
        simulation.add(name, num_prompt=130, max_tokens=60, share_key=name, service_tier="flex")
    for _ in range(10):
        simulation.step()
    assert len(simulation.scheduler.running) == 2
    if tier is not None:
        # Its adapter comes first, and takes no pages from flex requests unless another one waits behind it.
        simulation.add("other", digest="b", share_key="other", weight=10**6, service_tier=tier)
        for _ in range(5):
            simulation.step()
        assert not simulation.tokens["other"]
    simulation.add("chat", num_prompt=5, max_tokens=3, digest="a", share_key="acme", service_tier="priority")
    for _ in range(8):
        simulation.step()
    assert simulation.tokens["chat"]
    assert finishes(simulation, 500)


def test_priority_gets_the_slot_of_an_adapter_of_flex(simulate: Simulate) -> None:
    simulation = simulate(num_slots=2, adapters={"a": 2, "b": 2, "c": 2}, max_sequences=4)
    for name in "ab":
        simulation.add(name, max_tokens=200, digest=name, share_key=name, service_tier="flex")
    for _ in range(5):
        simulation.step()
    simulation.add("chat", digest="c", share_key="acme", service_tier="priority")
    for _ in range(5):
        simulation.step()
    assert simulation.tokens["chat"]
    assert finishes(simulation, 500)


def test_priority_gets_the_pages_of_adapters_that_only_flex_uses(simulate: Simulate) -> None:
    simulation = simulate(num_pages=12, adapters={"a": 8}, max_batch_tokens=128, max_sequences=4)
    simulation.add("flex", max_tokens=50, digest="a", share_key="flex", service_tier="flex")
    for _ in range(3):
        simulation.step()
    simulation.add("chat", num_prompt=110, share_key="acme", service_tier="priority")
    for _ in range(3):
        simulation.step()
    assert simulation.tokens["chat"]
    assert finishes(simulation, 500)


def test_default_gets_no_pages_of_flex_for_its_adapter(simulate: Simulate) -> None:
    simulation = simulate(num_pages=24, adapters={"a": 8}, max_sequences=4)
    for name in "xy":
        simulation.add(name, num_prompt=130, max_tokens=60, share_key=name, service_tier="flex")
    for _ in range(10):
        simulation.step()
    simulation.add("other", digest="a", share_key="other")
    for _ in range(10):
        simulation.step()
    assert not simulation.tokens["other"]
    assert simulation.scheduler.num_preemptions == 0


def test_a_choice_that_waits_for_its_prompt_keeps_its_place(simulate: Simulate) -> None:
    simulation = simulate(max_sequences=3, num_pages=200, max_batch_tokens=128, max_model_len=512)
    simulation.add("running", max_tokens=100, share_key="other")
    simulation.step()
    prompt = tuple(range(40))
    for name in ("first", "second"):
        add = simulation.make_add(name, prompt, 50, isolation_key=b"one", share_key="acme", service_tier="priority")
        simulation.engine.add(b"gateway", add)
    simulation.add("later", max_tokens=50, share_key="another")
    for _ in range(4):
        simulation.step()
    assert simulation.tokens["first"]
    assert simulation.tokens["second"]
    assert not simulation.tokens["later"]
