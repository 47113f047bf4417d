from __future__ import annotations

import msgspec
import pytest

from loramux.engine.protocol.messages import EngineReady, ResidentAdapter, Stats
from loramux.platform.cluster.replica_report import (
    CoarseState,
    HeldState,
    ReplicaIdentity,
    ReportRefused,
    as_values,
    read_identity,
    read_state,
)
from loramux.platform.routing.views import digest_prefix

READY = EngineReady(max_model_len=64, num_pages=800, page_tokens=16, device="cpu", dtype="float32")


def stats(
    num_running: int = 0, num_waiting: int = 0, num_free_pages: int = 800, digests: tuple[str, ...] = ()
) -> Stats:
    return Stats(
        call_id="",
        num_steps=0,
        num_running=num_running,
        num_waiting=num_waiting,
        num_pages=800,
        num_free_pages=num_free_pages,
        num_kv_pages=0,
        num_adapter_pages=0,
        num_prefix_pages=0,
        prompt_tokens=0,
        completion_tokens=0,
        cached_tokens=0,
        num_adapter_loads=0,
        num_adapter_evictions=0,
        num_preemptions=0,
        mixed_steps=0,
        max_adapters_in_step=0,
        adapters=tuple(ResidentAdapter(digest=digest, slot=0, num_pages=1, num_users=1) for digest in digests),
    )


def test_small_changes_are_not_reported() -> None:
    coarse = CoarseState(ReplicaIdentity.of(READY, 64))
    first = coarse.observe(stats(num_running=20, num_free_pages=500))
    assert (first.num_sequences, first.num_free_pages) == (16, 500 // 100 * 100)
    # Half a step in either direction, again and again, changes nothing.
    for num_running in (23, 12, 9, 23):
        assert coarse.observe(stats(num_running=num_running, num_free_pages=599)) == first
    assert coarse.observe(stats(num_running=24, num_free_pages=500)).num_sequences == 24
    assert coarse.observe(stats(num_running=0)).num_sequences == 0
    assert coarse.observe(stats(num_running=64, num_waiting=100)).num_sequences == 160


def test_adapters_are_reported_by_eight_bytes_each() -> None:
    digests = tuple(f"{number:064x}"[::-1] for number in range(1, 4))
    state = CoarseState(ReplicaIdentity.of(READY, 64)).observe(stats(digests=digests))
    assert len(state.holds) == 24
    read, holds = read_state(as_values(state))
    assert read == state
    assert holds == {digest_prefix(digest) for digest in digests}


def test_before_the_first_report_a_replica_holds_nothing() -> None:
    assert read_state({}) == (HeldState(), frozenset())


@pytest.mark.parametrize(
    "values",
    [{"holds": b"1234567"}, {"holds": "x"}, {"num_sequences": -1}, {"num_sequences": 1 << 40}, {"holds": b"\1" * 16}],
    ids=["cut", "text", "negative", "huge", "unsorted"],
)
def test_a_report_that_no_replica_writes_is_refused(values: dict[str, object]) -> None:
    with pytest.raises(ReportRefused):
        read_state(values)


def test_an_identity_of_another_program_is_refused() -> None:
    identity = ReplicaIdentity.of(READY, 8)
    assert read_identity(as_values(identity)) == identity
    for values in ({}, {**as_values(identity), "capacity": 0}, {**as_values(identity), "host": "h" * 300}):
        with pytest.raises(ReportRefused):
            read_identity(values)
    assert msgspec.json.decode(msgspec.json.encode(as_values(identity)), type=ReplicaIdentity) == identity
