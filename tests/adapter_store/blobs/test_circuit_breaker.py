from __future__ import annotations

import threading

from loramux.adapter_store.blobs.circuit_breaker import CircuitBreaker
from loramux.adapter_store.blobs.retry_budget import RetryBudget


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def make_breaker() -> tuple[CircuitBreaker, Clock]:
    clock = Clock()
    return CircuitBreaker(max_failures=3, first_open_s=1.0, max_open_s=3.0, clock=clock), clock


def fail(breaker: CircuitBreaker, times: int) -> None:
    for _ in range(times):
        assert breaker.enter() is None
        breaker.failed()


def test_opens_only_after_consecutive_failures() -> None:
    breaker, _ = make_breaker()
    fail(breaker, 2)
    breaker.succeeded()
    fail(breaker, 2)
    assert (breaker.state, breaker.enter()) == ("closed", None)
    breaker.failed()
    assert (breaker.state, breaker.enter()) == ("open", 1.0)


def test_open_breaker_reports_the_remaining_time() -> None:
    breaker, clock = make_breaker()
    fail(breaker, 3)
    clock.now += 0.25
    assert breaker.enter() == 0.75


def test_successful_trial_closes_the_breaker() -> None:
    breaker, clock = make_breaker()
    fail(breaker, 3)
    clock.now += 1.0
    assert breaker.state == "half_open"
    assert breaker.enter() is None
    assert breaker.enter() == 1.0, "the second caller waits for the first one's verdict"
    breaker.succeeded()
    assert (breaker.state, breaker.enter()) == ("closed", None)


def test_each_failed_trial_doubles_the_pause_up_to_a_maximum() -> None:
    breaker, clock = make_breaker()
    fail(breaker, 3)
    pauses = []
    for _ in range(4):
        clock.now += 10
        fail(breaker, 1)
        pauses.append(breaker.enter())
    assert pauses == [2.0, 3.0, 3.0, 3.0]
    clock.now += 10
    assert breaker.enter() is None
    breaker.succeeded()
    fail(breaker, 3)
    assert breaker.enter() == 1.0, "a success resets the pause"


def test_trial_without_a_result_does_not_block_forever() -> None:
    breaker, clock = make_breaker()
    fail(breaker, 3)
    clock.now += 1.0
    assert breaker.enter() is None
    clock.now += 1.0
    assert breaker.enter() is None


def test_earlier_calls_do_not_prolong_the_open_state() -> None:
    breaker, clock = make_breaker()
    fail(breaker, 3)
    clock.now += 0.5
    breaker.failed()
    assert breaker.enter() == 0.5


def test_only_one_of_many_threads_gets_the_trial() -> None:
    breaker, clock = make_breaker()
    fail(breaker, 3)
    clock.now += 1.0
    let_in = []
    threads = [threading.Thread(target=lambda: let_in.append(breaker.enter() is None)) for _ in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sum(let_in) == 1


def test_retry_budget_is_refilled_by_success_and_time() -> None:
    clock = Clock()
    budget = RetryBudget(capacity=2, per_success=0.25, refill_per_s=0.5, clock=clock)
    assert [budget.take_retry() for _ in range(3)] == [True, True, False]
    for _ in range(4):
        budget.succeeded()
    assert [budget.take_retry() for _ in range(2)] == [True, False]
    clock.now += 2
    assert [budget.take_retry() for _ in range(2)] == [True, False]
    clock.now += 1000
    assert [budget.take_retry() for _ in range(3)] == [True, True, False], "the budget never exceeds its capacity"
