"""Several engines on this machine that one gateway uses: data parallelism."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import structlog

from loramux.engine.protocol.messages import EngineReady, Stats, StatsRequest
from loramux.platform.engine_link.engine_client import EngineClient, EngineUnavailable
from loramux.platform.replicas.engine_group import NO_ENGINE_ID, EngineGroup
from loramux.platform.replicas.reports import ReplicaReport, UnknownReplica, report_of
from loramux.platform.replicas.routed_engine import RoutedEngine
from loramux.platform.routing.routers import RequestRouter
from loramux.platform.routing.views import ReplicaView, digest_prefix

BEAT_S = 1.0
"""Interval, in seconds, at which the router gets new views of the engines."""
STARTING_BEAT_S = 0.1
"""The interval, in seconds, while an engine is not ready. An engine takes requests after the next beat."""
STATS_WAIT_S = 1.0

NONE_READY = "no engine is ready"

log = structlog.get_logger()


def engine_name(number: int) -> str:
    """Return the name of an engine of this machine, which operators see. The first has the number 0."""
    return f"engine-{number}"


class _Member:
    """One engine, as it last described itself."""

    def __init__(self, name: str, engine: EngineClient, since_s: float) -> None:
        self.name = name
        self.engine = engine
        self.since_s = since_s
        self._stats: Stats | None = None
        self._holds: set[int] = set()

    def observe(self, stats: Stats, now_s: float) -> None:
        self._stats, self.since_s = stats, now_s
        self._holds = {digest_prefix(adapter.digest) for adapter in stats.adapters}

    def note_resident(self, digest: str) -> None:
        self._holds.add(digest_prefix(digest))

    def forget(self) -> None:
        self._stats = None
        self._holds = set()

    def view(self) -> ReplicaView | None:
        """Return None while the engine is not ready."""
        info, stats = self.engine.info, self._stats
        if info is None:
            return None
        num_running = 0 if stats is None else stats.num_running - stats.num_background_running
        num_waiting = 0 if stats is None else stats.num_waiting - stats.num_background_waiting
        return ReplicaView(
            id=self.name,
            is_local=False,
            num_running=num_running,
            num_waiting=num_waiting,
            capacity=max(1, info.max_sequences),
            pages_free_fraction=min(1.0, self._num_free_pages(info) / max(1, info.num_pages)),
            is_draining=False,
            holds=frozenset(self._holds),
            since_s=self.since_s,
        )

    def report(self, now_s: float) -> ReplicaReport:
        info, view = self.engine.info, self.view()
        if info is None or view is None:
            return ReplicaReport(
                id=self.name,
                address=None,
                base_id=None,
                is_own=True,
                state="unreachable",
                reason=self.engine.trouble or "it is starting",
            )
        # The router gets views without the base, because all engines serve the same.
        view = replace(view, base_id=info.base_sha256)
        pages = info.num_pages, self._num_free_pages(info)
        return report_of(view, info.device, "serving", now_s - self.since_s, *pages, is_own=True)

    def _num_free_pages(self, info: EngineReady) -> int:
        return info.num_pages if self._stats is None else self._stats.num_reclaimable_pages


class DataParallelEngines:
    """Several engines of one base, each with all of its weights, that look like one engine to a gateway.

    `engine` runs each sequence on the engine that a router chooses, as between servers that share requests. If an
    engine dies, its sequences that have not started run on the others. The owner starts the engines, and then calls
    `follow`. `close` ends them.

    This takes the place of `Sharing` in a server that shares no requests with other servers.
    """

    address = None
    # There are no other servers to tell about this one.
    open_presence = None

    def __init__(
        self,
        engines: Mapping[str, EngineClient],
        new_router: Callable[[], RequestRouter],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.engines = self.measured = engines
        self._clock = clock
        self._members = {name: _Member(name, engine, clock()) for name, engine in engines.items()}
        self._group = EngineGroup(NONE_READY, self._note_resident, shares_disk=True)
        self.engine = RoutedEngine(self._group, NO_ENGINE_ID, new_router, lambda outcome: None, lambda: None)
        self._beats: asyncio.Task[None] | None = None

    @property
    def info(self) -> EngineReady | None:
        return self._group.info

    def capacity(self) -> int:
        """Return how many sequences the ready engines can run at once."""
        found = [engine.info for engine in self.engines.values()]
        return sum(info.max_sequences for info in found if info is not None)

    async def follow(self) -> None:
        """Show the engines to the router now, and again every second until `close`."""
        await self.beat()
        self._beats = asyncio.create_task(self._beat_forever(), name="engines-beat")

    async def beat(self) -> None:
        """Ask each engine for its state, and tell the router."""
        await asyncio.gather(*(self._look(member) for member in self._members.values()))
        self._show()

    async def close(self) -> None:
        """End the engines. Closing again does nothing."""
        if self._beats is not None:
            self._beats.cancel()
            await asyncio.wait({self._beats})
        await asyncio.gather(*(engine.close() for engine in self.engines.values()))

    def reports(self) -> Sequence[ReplicaReport]:
        """Implements `Fleet.reports`: one report for each engine."""
        now_s = self._clock()
        return [member.report(now_s) for member in self._members.values()]

    async def stats_of(self, replica_id: str, timeout_s: float, with_tiers: bool) -> Stats:
        """Implements `Fleet.stats_of`."""
        engine = self.engines.get(replica_id)
        if engine is None:
            raise UnknownReplica(replica_id)
        return await engine.call(StatsRequest(with_tiers=with_tiers), timeout_s)

    async def _look(self, member: _Member) -> None:
        try:
            stats = await member.engine.call(StatsRequest(), STATS_WAIT_S)
        except EngineUnavailable:
            member.forget()
            self._group.stats.forget(member.name)
        except TimeoutError:
            # A busy engine that answers late must not look idle.
            return
        else:
            member.observe(stats, self._clock())
            self._group.stats.note(member.name, stats)

    def _note_resident(self, name: str, digest: str) -> None:
        # The next requests for the adapter must not go to an engine without it.
        self._members[name].note_resident(digest)
        self._show()

    def _show(self) -> None:
        troubles = [(name, engine.trouble) for name, engine in self.engines.items() if not engine.is_ready]
        sentences = [f"{name}: {trouble}" for name, trouble in troubles if trouble is not None]
        self._group.show(self.engines, f"{NONE_READY}: {'; '.join(sentences)}" if sentences else None)
        views = [view for member in self._members.values() if (view := member.view()) is not None]
        self.engine.update(views, self.engines)

    async def _beat_forever(self) -> None:
        while True:
            is_starting = not all(engine.is_ready for engine in self.engines.values())
            await asyncio.sleep(STARTING_BEAT_S if is_starting else BEAT_S)
            try:
                await self.beat()
            except Exception:
                # Requests do not depend on this loop, so an error here must not end the server.
                log.exception("a beat failed")
