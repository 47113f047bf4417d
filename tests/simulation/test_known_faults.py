"""Regression tests for faults that users of other engines have reported, on the simulated device.

Tests for faults that need real weights are in `tests/conformance/test_known_faults.py`.
"""

from __future__ import annotations

import pytest

from loramux.engine.protocol.messages import Abort, Unload
from tests.engine.simulated_engine import Simulation, simulate_engine, stats_of

KEY = b"tenant"


@pytest.fixture(params=[False, True], ids=["at once", "lookahead"])
def lookahead(request: pytest.FixtureRequest) -> bool:
    return bool(request.param)


def run_and_check(simulation: Simulation) -> None:
    simulation.run()
    for name, finished in simulation.finished.items():
        assert finished.reason == "length", (name, finished)


def test_hot_load_does_not_take_a_running_requests_slot(lookahead: bool) -> None:
    """Reported fault: a hot load took the slot of a running request's adapter, and decoding used the wrong adapter."""
    names = {f"other{i}": 1 for i in range(30)}
    simulation = simulate_engine(num_pages=200, num_slots=2, adapters={"mine": 1, **names}, lookahead=lookahead)
    mine = simulation.add("mine", digest="mine", max_tokens=100)
    for name in names:
        simulation.add(name, digest=name, max_tokens=2)
    run_and_check(simulation)
    assert simulation.tokens["mine"] == simulation.expected(mine)
    assert stats_of(simulation).num_adapter_evictions >= 28


def test_new_version_does_not_reuse_the_old_versions_prefix_pages(lookahead: bool) -> None:
    """Reported fault: after an adapter was reloaded under the same name, stale prefix pages were used.

    Here, each version has its own digest.
    """
    simulation = simulate_engine(adapters={"support, version 1": 2, "support, version 2": 2}, lookahead=lookahead)
    prompt = tuple(range(50))
    for version in ("support, version 1", "support, version 2"):
        add = simulation.make_add(version, prompt, 5, version, isolation_key=KEY)
        simulation.engine.add(b"gateway", add)
        simulation.run()
        assert simulation.tokens[version] == simulation.expected(add)
        assert simulation.finished[version].cached_tokens == 0
        simulation.engine.unload(b"gateway", Unload(call_id="u", digest=version))
        simulation.run()


def test_adapters_do_not_share_prefix_pages(lookahead: bool) -> None:
    """Reported fault: cached K and V of one adapter answered requests for another, since keys left the adapter out."""
    simulation = simulate_engine(adapters={"a": 2, "b": 2}, lookahead=lookahead)
    prompt = tuple(range(50))
    for number, digest in enumerate(["a", "b", None, "a", "b", None]):
        add = simulation.make_add(str(number), prompt, 5, digest, isolation_key=KEY)
        simulation.engine.add(b"gateway", add)
        simulation.run()
        assert simulation.tokens[add.sequence_id] == simulation.expected(add)
        assert (simulation.finished[add.sequence_id].cached_tokens > 0) == (number >= 3)


@pytest.mark.parametrize(
    ("first", "second"),
    [((b"salt", "x"), (b"saltx", None)), ((b"a", None), (b"a", "None")), ((b"k", "a"), (b"k", "aa"))],
)
def test_adapter_name_and_owner_key_do_not_collide(
    first: tuple[bytes, str | None], second: tuple[bytes, str | None]
) -> None:
    """Reported fault: adapter name and cache salt were joined without lengths, so two owners got the same key."""
    adapters = {digest: 1 for _, digest in (first, second) if digest is not None}
    simulation = simulate_engine(adapters=adapters)
    prompt = tuple(range(50))
    for index, (key, digest) in enumerate((first, second)):
        add = simulation.make_add(str(index), prompt, 4, digest, isolation_key=key)
        simulation.engine.add(b"gateway", add)
        simulation.run()
        assert simulation.finished[str(index)].cached_tokens == 0
        assert simulation.tokens[str(index)] == simulation.expected(add)


@pytest.mark.parametrize("num_slots", [1, 2, 8])
def test_adapter_without_a_free_slot_waits_and_runs(num_slots: int, lookahead: bool) -> None:
    """Reported fault: with N slots, adapter N + 1 failed an assertion."""
    names = {f"adapter{i}": 1 for i in range(num_slots + 1)}
    simulation = simulate_engine(num_slots=num_slots, adapters=names, lookahead=lookahead)
    adds = [simulation.add(name, digest=name, max_tokens=6) for name in names]
    run_and_check(simulation)
    assert [simulation.tokens[add.sequence_id] for add in adds] == [simulation.expected(add) for add in adds]


@pytest.mark.parametrize("end", ["runs out", "is aborted"])
def test_unload_completes_after_a_request_with_several_choices(end: str, lookahead: bool) -> None:
    """Reported fault: requests with n > 1 counted one use too many, so unloading waited forever."""
    simulation = simulate_engine(adapters={"a": 3}, lookahead=lookahead)
    for choice in range(4):
        simulation.add(f"choice{choice}", digest="a", max_tokens=5 + choice)
    for _ in range(3):
        simulation.step()
    simulation.engine.unload(b"gateway", Unload(call_id="u", digest="a"))
    if end == "is aborted":
        for choice in range(4):
            simulation.engine.abort(b"gateway", Abort(sequence_id=f"choice{choice}"))
    simulation.run()
    assert stats_of(simulation).num_adapter_pages == 0
    assert not simulation.engine.has_work


def test_base_requests_do_not_wait_for_adapters(lookahead: bool) -> None:
    """Reported fault: requests for the base waited behind requests with adapters that were still loading."""
    names = {f"adapter{i}": 1 for i in range(200)}
    simulation = simulate_engine(adapters=names, max_sequences=4, lookahead=lookahead)
    simulation.hold_loads()
    for name in names:
        simulation.add(name, digest=name)
    adds = [simulation.add(f"base{i}", max_tokens=3) for i in range(8)]
    for _ in range(20):
        simulation.step()
    assert [simulation.tokens[add.sequence_id] for add in adds] == [simulation.expected(add) for add in adds]
    simulation.let_loads_go()
    run_and_check(simulation)


def test_nan_in_one_row_ends_only_that_request(lookahead: bool) -> None:
    """Reported fault: one broken adapter's NaN spread to other rows in the batch."""
    simulation = simulate_engine(adapters={"broken": 2, "sound": 2}, lookahead=lookahead)
    simulation.executor.not_finite_for.add("broken")
    sound = [simulation.add(f"s{i}", digest=digest, max_tokens=20) for i, digest in enumerate([None, "sound", None])]
    simulation.add("broken", digest="broken", max_tokens=20)
    simulation.run()
    assert simulation.finished["broken"].code == "not_finite"
    assert [simulation.tokens[add.sequence_id] for add in sound] == [simulation.expected(add) for add in sound]
