"""Adds the statistics of engines up, so that several engines look like one to metrics and to background work."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import reduce
from typing import TypeVar

from msgspec import Struct, structs

from loramux.adapter_store.tiers.tier_contents import KeptAdapter, TierContents
from loramux.adapter_store.tiers.tier_figures import LoadCounts, added, of_the_past
from loramux.engine.protocol.messages import ResidentAdapter, Stats, StepTimes

S = TypeVar("S", bound=Struct)

DISK = "disk"

COUNTERS = (
    *("num_steps", "mixed_steps", "num_rows", "num_step_sequences", "num_preemptions", "num_prefix_evictions"),
    *("given_up_steps", "prompt_tokens", "completion_tokens", "cached_tokens", "recomputed_tokens"),
    *("num_adapter_loads", "num_adapter_evictions", "num_ended", "prefill_tokens", "prefill_s"),
)
GAUGES = (
    *(
        "num_running",
        "num_waiting",
        "num_background_running",
        "num_background_waiting",
        "num_pages",
        "num_free_pages",
        "num_kv_pages",
        "num_adapter_pages",
    ),
    *("num_prefix_pages", "num_idle_prefix_pages", "num_pinned_pages", "num_slots", "max_sequences", "num_engines"),
)

PAGE_GAUGES = frozenset({"num_slots", "num_pages"})
"""The gauges of HostPageCounts and DiskPageCounts. All other fields are counters."""


class SummedStats:
    """The sum of engines' statistics. Counts of an engine that is gone, or has restarted, stay in the sum, so that
    counters never decrease.

    With `shares_disk`, all engines have the same disk tier.
    """

    def __init__(self, shares_disk: bool = False) -> None:
        self._shares_disk = shares_disk
        self._last: dict[str, Stats] = {}
        self._retired: list[Stats] = []

    def note(self, engine_id: str, stats: Stats) -> None:
        last = self._last.get(engine_id)
        if last is not None and stats.num_steps < last.num_steps:
            self._retire(last)
        self._last[engine_id] = stats

    def forget(self, engine_id: str) -> None:
        """Note that an engine is gone. Its counters keep its name, because it can answer late or be listed again."""
        last = self._last.get(engine_id)
        if last is not None:
            self._last[engine_id] = structs.replace(last, adapters=(), tiers=())

    def holds(self, engine_id: str, digest: str) -> bool:
        """True if the engine held the adapter when it last answered."""
        last = self._last.get(engine_id)
        return last is not None and any(adapter.digest == digest for adapter in last.adapters)

    def total(self, engine_ids: Iterable[str]) -> Stats | None:
        """Return the sum over these engines, or None if none of them has reported.

        An engine that does not answer counts as it last answered. Of other engines, only the counters count.
        """
        listed = set(engine_ids)
        live = [stats for name, stats in self._last.items() if name in listed]
        others = [stats for name, stats in self._last.items() if name not in listed]
        return combined(live, [*self._retired, *others], self._shares_disk) if live else None

    def _retire(self, stats: Stats) -> None:
        self._retired = [combined([stats], self._retired)]


def combined(live: Sequence[Stats], retired: Sequence[Stats] = (), shares_disk: bool = False) -> Stats:
    """Add statistics up. Of `retired`, only the counters are added.

    An adapter that several engines hold is listed once. `is_pinned` then says whether every engine has pinned it.
    """
    every = [*live, *retired]
    sums = {name: sum(getattr(one, name) for one in every) for name in COUNTERS}
    gauges = {name: sum(getattr(one, name) for one in live) for name in GAUGES}
    by_rank = zip(*(one.service_tiers for one in live), strict=True)
    return structs.replace(
        live[0],
        **sums,
        **gauges,
        waiting=_sum([one.waiting for one in live]),
        service_tiers=tuple(map(_sum, by_rank)),
        graphs=_sum([one.graphs for one in live]),
        grammars=_sum([one.grammars for one in every]),
        drafts=_sum([one.drafts for one in every]),
        host_pages=_sum([one.host_pages for one in live], [one.host_pages for one in retired]),
        disk_pages=_sum([one.disk_pages for one in live], [one.disk_pages for one in retired]),
        decode_reads=structs.replace(
            _sum([one.decode_reads for one in every]), bandwidth=max(one.decode_reads.bandwidth for one in live)
        ),
        max_adapters_in_step=max(one.max_adapters_in_step for one in every),
        step_times=_step_times([one.step_times for one in every]),
        loading=_loading(live, retired, shares_disk),
        adapters=tuple(_adapters(live)),
        tiers=tuple(_tiers(live, shares_disk)),
    )


def _sum(live: Sequence[S], retired: Sequence[S] = ()) -> S:
    """Add the fields of records up. The page gauges of `retired` do not count."""
    every = [*live, *retired]
    sums = {
        name: sum(getattr(one, name) for one in (live if name in PAGE_GAUGES else every))
        for name in live[0].__struct_fields__
    }
    return structs.replace(live[0], **sums)


def _step_times(times: Sequence[StepTimes]) -> StepTimes:
    bounds = next((one.bounds_s for one in times if one.bounds_s), ())
    alike = [one for one in times if one.bounds_s == bounds]
    return StepTimes(
        bounds_s=bounds,
        counts=tuple(sum(counts) for counts in zip(*(one.counts for one in alike), strict=True)),
        seconds=sum(one.seconds for one in alike),
    )


def _adapters(live: Sequence[Stats]) -> Iterable[ResidentAdapter]:
    found: dict[str, list[ResidentAdapter]] = {}
    for stats in live:
        for adapter in stats.adapters:
            found.setdefault(adapter.digest, []).append(adapter)
    for copies in found.values():
        yield structs.replace(
            copies[0],
            num_pages=sum(copy.num_pages for copy in copies),
            num_users=sum(copy.num_users for copy in copies),
            is_pinned=len(copies) == len(live) and all(copy.is_pinned for copy in copies),
            is_pinned_somewhere=any(copy.is_pinned or copy.is_pinned_somewhere for copy in copies),
            idle_s=min(copy.idle_s for copy in copies),
        )


def _tiers(live: Sequence[Stats], shares_disk: bool) -> Iterable[TierContents]:
    found: dict[str, list[TierContents]] = {}
    for stats in live:
        for tier in stats.tiers:
            found.setdefault(tier.tier, []).append(tier)
    for name, tiers in found.items():
        add_up: Callable[[Iterable[int]], int] = max if shares_disk and name == DISK else sum
        adapters: dict[str, KeptAdapter] = {}
        for adapter in sorted((adapter for tier in tiers for adapter in tier.adapters), key=lambda one: one.idle_s):
            adapters.setdefault(adapter.digest, adapter)
        yield replace(
            tiers[0],
            used_bytes=add_up(tier.used_bytes for tier in tiers),
            max_bytes=add_up(tier.max_bytes for tier in tiers),
            num_adapters=add_up(tier.num_adapters for tier in tiers),
            num_evictions=sum(tier.num_evictions for tier in tiers),
            adapters=tuple(adapters.values()),
        )


def _loading(live: Sequence[Stats], retired: Sequence[Stats], shares_disk: bool) -> LoadCounts:
    # Only live engines use memory.
    total = reduce(added, [one.loading for one in live] + [of_the_past(one.loading) for one in retired])
    if not shares_disk:
        return total
    disk_bytes = max((tier.used_bytes for one in live for tier in one.loading.tiers if tier.tier == DISK), default=0)
    tiers = (replace(tier, used_bytes=disk_bytes) if tier.tier == DISK else tier for tier in total.tiers)
    return replace(total, tiers=tuple(tiers))
