from __future__ import annotations

import random

import pytest

from loramux.adapter_store.sandbox.lanes import HALF_LIFE_S, MAX_LONG_PARTS, Lane, Lanes, TooManyWaiting, Turn

QUICK_S, FULL_S = 0.1, 4.0


class Clock:
    def __init__(self) -> None:
        self.now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def lanes(clock: Clock) -> Lanes[str]:
    return Lanes(QUICK_S, 3, 1, 1000, clock)


def begin(lanes: Lanes[str]) -> Turn[str]:
    turn = lanes.next_turn()
    assert turn is not None
    return turn


def overrun(lanes: Lanes[str], tenant_id: str) -> None:
    """Let a request of the tenant exceed its quick turn and use up its full turn."""
    lanes.append_request(tenant_id, "long")
    lanes.end_turn(begin(lanes), QUICK_S, False)
    lanes.end_turn(begin(lanes), FULL_S, True)


def test_a_tenants_requests_run_one_at_a_time_in_order(lanes: Lanes[str]) -> None:
    for request in ("a1", "a2", "a3"):
        lanes.append_request("a", request)
    for request in ("a1", "a2", "a3"):
        turn = begin(lanes)
        assert (turn.request, lanes.next_turn()) == (request, None)
        lanes.end_turn(turn, 0.01, True)
    assert lanes.next_turn() is None


def test_a_tenant_has_a_bounded_number_of_requests(clock: Clock) -> None:
    lanes: Lanes[str] = Lanes(QUICK_S, 3, 1, 2, clock)
    lanes.append_request("a", "a1")
    turn = begin(lanes)
    lanes.append_request("a", "a2")
    with pytest.raises(TooManyWaiting):
        lanes.append_request("a", "a3")
    lanes.append_request("b", "b1")
    lanes.end_turn(turn, 0.01, True)
    lanes.append_request("a", "a3")


def test_the_tenant_that_has_used_least_goes_first(lanes: Lanes[str]) -> None:
    for tenant_id, cpu_s in (("a", 0.03), ("b", 0.01), ("c", 0.02)):
        lanes.append_request(tenant_id, tenant_id)
        lanes.end_turn(begin(lanes), cpu_s, True)
    for tenant_id in ("a", "b", "c"):
        lanes.append_request(tenant_id, tenant_id)
    assert [begin(lanes).tenant_id for _ in range(3)] == ["b", "c", "a"]


def test_tenants_that_have_used_equally_little_alternate(lanes: Lanes[str]) -> None:
    for number in range(3):
        for tenant_id in ("a", "b"):
            lanes.append_request(tenant_id, f"{tenant_id}{number}")
    order = []
    while turn := lanes.next_turn():
        order.append(turn.request)
        lanes.end_turn(turn, 0.0, True)
    assert order == ["a0", "b0", "a1", "b1", "a2", "b2"]


def test_a_flood_delays_others_by_one_turn(lanes: Lanes[str]) -> None:
    for number in range(500):
        lanes.append_request("flood", str(number))
    first = begin(lanes)
    for number in range(20):
        lanes.append_request(f"other{number}", "one")
    lanes.end_turn(first, 0.01, True)
    served = []
    for _ in range(21):
        turn = begin(lanes)
        served.append(turn.tenant_id)
        lanes.end_turn(turn, 0.01, True)
    assert served == [*(f"other{number}" for number in range(20)), "flood"]


def test_a_request_that_exceeds_its_quick_turn_gets_a_full_turn(lanes: Lanes[str]) -> None:
    lanes.append_request("a", "long")
    lanes.append_request("a", "next")
    turn = begin(lanes)
    assert turn.is_quick
    lanes.end_turn(turn, QUICK_S, False)
    turn = begin(lanes)
    assert (turn.request, turn.is_quick) == ("long", False)
    lanes.end_turn(turn, QUICK_S + 0.01, True)
    assert (begin(lanes).request, lanes.next_turn()) == ("next", None)


def test_after_a_long_request_a_tenant_skips_quick_turns_until_it_is_light(lanes: Lanes[str], clock: Clock) -> None:
    overrun(lanes, "a")
    for tenant_id in ("a", "b"):
        lanes.append_request(tenant_id, "long")
    turns = [begin(lanes), begin(lanes)]
    assert [(turn.tenant_id, turn.lane) for turn in turns] == [("b", Lane.LIGHT), ("a", Lane.FULL)]
    for turn in turns:
        lanes.end_turn(turn, QUICK_S, True)
    clock.now_s += 3 * HALF_LIFE_S
    assert (2 * QUICK_S + FULL_S) / 8 > MAX_LONG_PARTS * QUICK_S
    lanes.append_request("a", "long")
    turn = begin(lanes)
    assert turn.lane is Lane.FULL
    lanes.end_turn(turn, QUICK_S, True)
    clock.now_s += 3 * HALF_LIFE_S
    lanes.append_request("a", "long")
    assert begin(lanes).lane is Lane.LIGHT


def test_after_a_short_request_a_tenant_gets_quick_turns(lanes: Lanes[str]) -> None:
    overrun(lanes, "a")
    for lane in (Lane.FULL, Lane.BUSY):
        lanes.append_request("a", "short")
        turn = begin(lanes)
        assert turn.lane is lane
        lanes.end_turn(turn, 0.01, True)


def test_a_long_request_ends_light_turns_until_it_has_decayed(lanes: Lanes[str], clock: Clock) -> None:
    lanes.append_request("a", "long")
    lanes.end_turn(begin(lanes), 0.9 * QUICK_S, True)
    lanes.append_request("a", "another")
    turn = begin(lanes)
    # It has used no more than about one quick turn.
    assert turn.lane is Lane.LIGHT
    lanes.end_turn(turn, 0.9 * QUICK_S, True)
    lanes.append_request("a", "third")
    turn = begin(lanes)
    assert turn.lane is Lane.BUSY
    lanes.end_turn(turn, 0.9 * QUICK_S, True)
    clock.now_s += 2 * HALF_LIFE_S
    lanes.append_request("a", "later")
    assert begin(lanes).lane is Lane.LIGHT


def test_a_short_request_makes_a_tenant_light_again(lanes: Lanes[str]) -> None:
    for cpu_s, lane in ((3 * QUICK_S, Lane.LIGHT), (0.01, Lane.FULL), (0.01, Lane.LIGHT)):
        lanes.append_request("a", "one")
        turn = begin(lanes)
        assert turn.lane is lane
        lanes.end_turn(turn, cpu_s, True)


def test_short_requests_stay_light_beside_new_tenants_with_long_ones(lanes: Lanes[str]) -> None:
    """Each new tenant gets one light turn, and no more while its requests are long."""
    for _ in range(5):
        lanes.append_request("short", "one")
        lanes.end_turn(begin(lanes), 0.02, True)
    for number in range(4):
        for turn_number in range(3):
            lanes.append_request(f"long{number}", "one")
            turn = begin(lanes)
            assert (turn.lane is Lane.LIGHT) == (turn_number == 0)
            lanes.end_turn(turn, 1.6 * QUICK_S, True)
    lanes.append_request("short", "one")
    assert begin(lanes).lane is Lane.LIGHT


def test_many_short_requests_get_quick_turns(lanes: Lanes[str]) -> None:
    for _ in range(1000):
        lanes.append_request("a", "short")
        turn = begin(lanes)
        assert turn.is_quick
        lanes.end_turn(turn, 0.9 * QUICK_S, True)


def test_busy_tenants_leave_a_process_to_light_ones(clock: Clock) -> None:
    lanes: Lanes[str] = Lanes(QUICK_S, 4, 1, 10, clock)
    for number in range(8):
        overrun(lanes, f"busy{number}")
        if number % 2:  # its last request was short
            lanes.append_request(f"busy{number}", "short")
            lanes.end_turn(begin(lanes), 0.01, True)
    for number in range(8):
        lanes.append_request(f"busy{number}", "next")
    turns = [begin(lanes) for _ in range(3)]
    assert sorted(turn.lane.name for turn in turns) == ["BUSY", "BUSY", "FULL"]
    assert lanes.next_turn() is None
    lanes.append_request("light", "short")
    assert begin(lanes).lane is Lane.LIGHT
    full = next(turn for turn in turns if turn.lane is Lane.FULL)
    lanes.end_turn(full, FULL_S, True)
    assert begin(lanes).tenant_id not in ("light", full.tenant_id)


@pytest.mark.parametrize("seed", range(10))
@pytest.mark.parametrize("num_processes", [2, 4])
def test_the_wait_is_bounded(clock: Clock, num_processes: int, seed: int) -> None:
    """While a request waits, each other tenant uses at most as much as the waiting tenant had used, and one turn."""
    generator = random.Random(seed)
    lanes: Lanes[str] = Lanes(QUICK_S, num_processes, 1, 10, clock)
    tenant_ids = [f"t{number}" for number in range(8)]
    had_used = dict.fromkeys(tenant_ids, 0.0)
    used_meanwhile = {tenant_id: dict.fromkeys(tenant_ids, 0.0) for tenant_id in tenant_ids}
    for tenant_id in tenant_ids:
        lanes.append_request(tenant_id, "first")
    # Some tenants send long requests, some short ones, and some both.
    part_long = {tenant_id: generator.choice((0.0, 0.1, 1.0)) for tenant_id in tenant_ids}
    running: list[Turn[str]] = []
    for _ in range(2000):
        while len(running) < num_processes and (begun := lanes.next_turn()):
            running.append(begun)
        turn = running.pop(generator.randrange(len(running)))
        is_long = generator.random() < part_long[turn.tenant_id]
        cpu_s = QUICK_S if is_long and turn.is_quick else generator.uniform(0, FULL_S if is_long else QUICK_S)
        has_ended = not (is_long and turn.is_quick)
        clock.now_s += cpu_s / num_processes
        lanes.end_turn(turn, cpu_s, has_ended)
        for waiting in {*tenant_ids} - {turn.tenant_id, *(other.tenant_id for other in running)}:
            used_meanwhile[waiting][turn.tenant_id] += cpu_s
            # Turns that began before the wait count, too.
            assert used_meanwhile[waiting][turn.tenant_id] <= had_used[waiting] + 2 * FULL_S
        had_used[turn.tenant_id] = lanes._use(turn.tenant_id, clock.now_s).used_s
        used_meanwhile[turn.tenant_id] = dict.fromkeys(tenant_ids, 0.0)
        if has_ended:
            lanes.append_request(turn.tenant_id, "another")


def test_a_dropped_request_gets_no_turn(lanes: Lanes[str]) -> None:
    for request in ("a1", "a2", "a3"):
        lanes.append_request("a", request)
    turn = begin(lanes)
    lanes.drop_request("a", "a1")  # it is running
    lanes.drop_request("a", "a2")
    lanes.drop_request("b", "a3")  # another tenant's
    lanes.end_turn(turn, 0.01, True)
    lanes.drop_request("a", "a1")  # it has ended
    turn = begin(lanes)
    assert turn.request == "a3"
    lanes.end_turn(turn, 0.01, True)
    assert lanes.next_turn() is None


def test_a_request_can_be_dropped_between_its_turns(lanes: Lanes[str]) -> None:
    lanes.append_request("a", "long")
    lanes.append_request("a", "short")
    lanes.end_turn(begin(lanes), QUICK_S, False)
    lanes.drop_request("a", "long")
    turn = begin(lanes)
    assert (turn.request, turn.is_quick) == ("short", True)
    lanes.drop_request("a", "short")
    lanes.end_turn(turn, 0.01, True)
    assert lanes.drop_requests() == []


def test_tenants_are_forgotten_once_their_use_has_decayed(lanes: Lanes[str], clock: Clock) -> None:
    for number in range(100):
        lanes.append_request(str(number), "one")
        lanes.end_turn(begin(lanes), FULL_S, True)
    assert len(lanes._uses) == 100
    clock.now_s += 11 * HALF_LIFE_S
    lanes.append_request("new", "one")
    lanes.end_turn(begin(lanes), 0.01, True)
    assert list(lanes._uses) == ["new"]


@pytest.mark.parametrize("lane", [Lane.FULL, Lane.BUSY])
def test_turns_outside_the_light_lane_pause_in_proportion_to_their_time(clock: Clock, lane: Lane) -> None:
    lanes: Lanes[str] = Lanes(QUICK_S, 3, 1, 1000, clock, pause=1.0)
    overrun(lanes, "a")
    paused_s = FULL_S
    if lane is Lane.BUSY:
        clock.now_s += FULL_S
        lanes.append_request("a", "short")
        paused_s = QUICK_S / 2
        lanes.end_turn(begin(lanes), paused_s, True)
    lanes.append_request("a", "next")
    lanes.append_request("b", "short")
    assert lanes.pause_s() == pytest.approx(paused_s)
    assert begin(lanes).tenant_id == "b"
    assert lanes.next_turn() is None
    clock.now_s += paused_s
    assert lanes.pause_s() is None
    assert begin(lanes).lane is lane
