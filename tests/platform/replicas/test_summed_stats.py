from __future__ import annotations

from msgspec import structs

from loramux.adapter_store.tiers.tier_contents import KeptAdapter, TierContents
from loramux.engine.protocol.messages import (
    DecodeReads,
    DiskPageCounts,
    DraftCounts,
    HostPageCounts,
    ResidentAdapter,
    Stats,
    StepTimes,
    TierLoad,
)
from loramux.platform.replicas.summed_stats import COUNTERS, GAUGES, SummedStats, combined
from tests.platform.cluster.test_replica_report import stats


def numbered(number: int) -> Stats:
    fields = dict.fromkeys((*COUNTERS, *GAUGES), number)
    times = StepTimes(bounds_s=(0.1,), counts=(number, 1), seconds=float(number))
    return structs.replace(stats(), **fields, step_times=times, max_adapters_in_step=number)


def test_every_number_of_the_statistics_is_added_up_or_named_here() -> None:
    others = {
        *("call_id", "max_adapters_in_step", "page_bytes", "step_times", "waiting", "loading", "adapters", "graphs"),
        *("grammars", "drafts", "host_pages", "disk_pages", "tiers", "decode_reads", "changes", "service_tiers"),
    }
    assert set(Stats.__struct_fields__) == {*COUNTERS, *GAUGES, *others}


def test_counters_of_a_lost_replica_stay_and_its_gauges_go() -> None:
    cluster = SummedStats()
    assert cluster.total(["a"]) is None
    cluster.note("a", numbered(5))
    cluster.note("b", numbered(7))
    total = cluster.total(["a", "b"])
    assert total is not None
    assert {getattr(total, name) for name in (*COUNTERS, *GAUGES)} == {12}
    assert total.step_times == StepTimes(bounds_s=(0.1,), counts=(12, 2), seconds=12.0)
    assert total.max_adapters_in_step == 7
    for forget in (lambda: None, lambda: cluster.forget("a")):
        forget()
        total = cluster.total(["b"])
        assert total is not None
        assert {getattr(total, name) for name in COUNTERS} == {12}
        assert {getattr(total, name) for name in GAUGES} == {7}
    # An engine that restarted counts from zero.
    cluster.note("b", numbered(2))
    total = cluster.total(["b"])
    assert total is not None
    assert (total.num_steps, total.num_pages) == (14, 2)


def test_loads_of_service_tiers_are_added_up() -> None:
    cluster = SummedStats()
    for name, number in (("a", 1), ("b", 2)):
        loads = tuple(TierLoad(num_running=number, num_waiting=rank, prompt_tokens=10 * number) for rank in range(4))
        cluster.note(name, structs.replace(numbered(number), service_tiers=loads))
    total = cluster.total(["a", "b"])
    assert total is not None
    assert total.service_tiers == tuple(
        TierLoad(num_running=3, num_waiting=2 * rank, prompt_tokens=30) for rank in range(4)
    )


def test_drafts_are_added_up() -> None:
    drafts = DraftCounts(text_tokens=5, accepted_text_tokens=3, prediction_tokens=4, grammar_tokens=7, wasted_s=0.5)
    total = combined([structs.replace(numbered(1), drafts=drafts)], [structs.replace(numbered(2), drafts=drafts)])
    assert total.drafts == DraftCounts(
        text_tokens=10, accepted_text_tokens=6, prediction_tokens=8, grammar_tokens=14, wasted_s=1.0
    )


def test_pages_in_host_memory_are_added_up_while_their_engine_lives() -> None:
    counts = HostPageCounts(
        num_slots=9, num_pages=8, num_saved=7, num_loaded=6, num_evictions=5, restored_tokens=4, recomputed_tokens=3
    )
    with_counts = [structs.replace(numbered(number), host_pages=counts) for number in range(3)]
    assert combined(with_counts[:2], with_counts[2:]).host_pages == HostPageCounts(
        num_slots=18,
        num_pages=16,
        num_saved=21,
        num_loaded=18,
        num_evictions=15,
        restored_tokens=12,
        recomputed_tokens=9,
    )


def test_pages_on_disk_are_added_up_while_their_engine_lives() -> None:
    counts = DiskPageCounts(num_slots=9, num_pages=8, num_written=7, num_lost=6, read_tokens=5)
    with_counts = [structs.replace(numbered(number), disk_pages=counts) for number in range(3)]
    assert combined(with_counts[:2], with_counts[2:]).disk_pages == DiskPageCounts(
        num_slots=18, num_pages=16, num_written=21, num_lost=18, read_tokens=15
    )


def test_adapters_and_tiers_are_listed_once() -> None:
    def with_adapter(users: int, pinned: bool) -> Stats:
        adapter = ResidentAdapter(digest="d", slot=1, num_pages=2, num_users=users, is_pinned=pinned, idle_s=users)
        kept = KeptAdapter(digest="d", num_bytes=1, idle_s=0.0)
        tier = TierContents(tier="host", used_bytes=1, max_bytes=4, num_adapters=1, num_evictions=0, adapters=(kept,))
        return structs.replace(stats(), adapters=(adapter,), tiers=(tier,))

    total = combined([with_adapter(1, True), with_adapter(2, True)])
    (adapter,) = total.adapters
    assert (adapter.num_pages, adapter.num_users, adapter.is_pinned, adapter.idle_s) == (4, 3, True, 1)
    (tier,) = total.tiers
    assert (tier.used_bytes, tier.max_bytes, tier.num_adapters, len(tier.adapters)) == (2, 8, 2, 1)
    assert not combined([with_adapter(1, True), with_adapter(1, False)]).adapters[0].is_pinned
    assert not combined([with_adapter(1, True), stats()]).adapters[0].is_pinned


def test_reads_of_decode_steps_are_added_up_and_the_bandwidth_is_that_of_a_live_replica() -> None:
    def reading(number: int) -> Stats:
        reads = DecodeReads(num_bytes=number, seconds=float(number), bandwidth=float(number))
        return structs.replace(stats(), decode_reads=reads)

    total = combined([reading(1), reading(2)], [reading(4)])
    assert total.decode_reads == DecodeReads(num_bytes=7, seconds=7.0, bandwidth=2.0)


def test_a_late_answer_of_a_lost_replica_counts_once() -> None:
    cluster = SummedStats()
    cluster.note("a", numbered(5))
    cluster.note("b", numbered(7))
    cluster.forget("a")
    cluster.note("a", numbered(6))
    total = cluster.total(["b"])
    assert total is not None
    assert total.num_steps == 13
