"""An EngineClient for this server's engine and other servers' engines. A router chooses one for each sequence."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from typing import Protocol

import structlog

from loramux.engine.messages import AdapterState, Add, EngineReady, Finished, SequenceOutput, Stats
from loramux.platform.engine_link.engine_client import EngineClient, EngineUnavailable
from loramux.platform.replicas.route import Route
from loramux.platform.routing.views import NoReplica, Prefetch, ReplicaView, RoutingRequest, digest_prefix

MAX_MOVES = 2
"""Maximum number of times that a sequence is submitted again because its replica was lost before its first output.

Refusals by draining replicas do not count.
"""
PREFETCH_WAIT_S = 60.0
"""Timeout, in seconds, for loading an adapter before requests need it."""

LOST_CODES = ("engine_unavailable", "replica_draining")

log = structlog.get_logger()

Stream = AsyncIterator[SequenceOutput | Finished]


class RequestRouter(Protocol):
    """The part of `routing.router.Router` that RoutedEngine uses."""

    def update(self, views: Sequence[ReplicaView]) -> None: ...

    def choose(self, request: RoutingRequest) -> str: ...

    def note_started(self, replica_id: str, request: RoutingRequest) -> None: ...

    def note_ended(self, replica_id: str, request: RoutingRequest) -> None: ...

    def prefetches(self) -> Sequence[Prefetch]: ...


class RoutedEngine:
    """Runs sequences on the replicas that the router chooses. `load`, `unload`, `pin` and `stats` use the local engine.

    If a replica refuses a sequence because the replica is draining, or is lost before the sequence is known to have
    run, the sequence is submitted elsewhere under the same id. A sequence that has started ends with
    `engine_unavailable`. A sequence that was running when its engine died is not moved, because it may have killed the
    engine. A sequence that an overloaded engine refused moves to a replica with free sequence slots, if there is one.
    Only the last Finished reaches the caller, so nothing is charged twice.

    `count_forwarded` receives the outcome of each forwarded sequence: `completed`, `failed` or `lost`. It also receives
    `moved` for each move away from another server.
    """

    def __init__(
        self,
        local: EngineClient,
        local_id: str,
        router: RequestRouter,
        count_forwarded: Callable[[str], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._local = local
        self._local_id = local_id
        self._router = router
        self._count_forwarded = count_forwarded
        self._clock = clock
        self._engines: Mapping[str, EngineClient] = {local_id: local}
        self._views: Sequence[ReplicaView] = ()
        self._routes: dict[str, Route] = {}
        self._prefetching: set[asyncio.Task[None]] = set()
        self._info: EngineReady | None = None

    def update(self, views: Sequence[ReplicaView], peers: Mapping[str, EngineClient]) -> None:
        """Replace the views of all replicas. `peers` contains an engine for each view of another server."""
        self._engines = {self._local_id: self._local, **peers}
        self._info = self._local.info or self._info
        self._show([view for view in views if self._engines[view.id].is_ready])
        for prefetch in self._router.prefetches():
            self._prefetch(prefetch)

    def holds_elsewhere(self, digest: str) -> bool:
        """True if another replica that accepts new requests claims to hold the adapter."""
        prefix = digest_prefix(digest)
        return any(prefix in view.holds for view in self._views if not view.is_local and not view.is_draining)

    @property
    def info(self) -> EngineReady | None:
        """The latest announcement of this server's engine, even if only other servers' engines are ready now."""
        return (self._local.info or self._info) if self.is_ready else None

    @property
    def is_ready(self) -> bool:
        return any(engine.is_ready for engine in self._engines.values())

    @property
    def is_live(self) -> bool:
        return self._local.is_live

    @property
    def trouble(self) -> str | None:
        return self._local.trouble

    def submit(self, add: Add) -> Stream:
        route = Route(add, self._clock())
        return self._follow(route, self._place(route))

    def abort(self, sequence_id: str, keep: int | None = None) -> None:
        route = self._routes.get(sequence_id)
        if route is not None and route.engine is not None:
            route.is_aborted = True
            route.engine.abort(sequence_id, keep)

    def extend(self, sequence_id: str, max_tokens: int) -> None:
        route = self._routes.get(sequence_id)
        if route is not None and route.engine is not None:
            route.max_tokens = max(route.max_tokens, max_tokens)
            route.engine.extend(sequence_id, max_tokens)

    async def load(self, digest: str, timeout_s: float) -> AdapterState:
        return await self._local.load(digest, timeout_s)

    async def unload(self, digest: str, timeout_s: float) -> AdapterState:
        return await self._local.unload(digest, timeout_s)

    async def pin(self, digest: str, is_pinned: bool, timeout_s: float) -> AdapterState:
        return await self._local.pin(digest, is_pinned, timeout_s)

    async def stats(self, timeout_s: float, with_tiers: bool = False) -> Stats:
        return await self._local.stats(timeout_s, with_tiers)

    async def close(self) -> None:
        await self._local.close()

    async def _follow(self, route: Route, stream: Stream) -> Stream:
        try:
            while True:
                end: Finished | None = None
                async for item in stream:
                    if isinstance(item, Finished):
                        end = item
                        break
                    route.has_started = True
                    yield item
                assert end is not None
                moved = self._move(route, end)
                if moved is None:
                    break
                stream = moved
            self._note_outcome(route, end)
            self._leave(route)
            yield end
        finally:
            self._leave(route)

    def _prefetch(self, prefetch: Prefetch) -> None:
        engine = self._engines[prefetch.replica_id]

        async def load() -> None:
            # If requests still need the adapter, the router asks for it again.
            with contextlib.suppress(EngineUnavailable, TimeoutError):
                await engine.load(prefetch.digest, PREFETCH_WAIT_S)

        task = asyncio.create_task(load(), name="prefetch")
        self._prefetching.add(task)
        task.add_done_callback(self._prefetching.discard)

    def _place(self, route: Route) -> Stream:
        """Submit the sequence to the chosen replica. Raises EngineUnavailable if no replica is ready."""
        while True:
            replica_id = self._choose(route)
            try:
                return self._submit_to(replica_id, route)
            except EngineUnavailable:
                if replica_id == self._local_id and not any(view.id == self._local_id for view in self._views):
                    raise
                self._leave_out(replica_id)

    def _submit_to(self, replica_id: str, route: Route) -> Stream:
        engine = self._engines[replica_id]
        stream = engine.submit(route.add_now(self._clock()))
        route.replica_id, route.engine = replica_id, engine
        self._routes[route.add.sequence_id] = route
        self._router.note_started(replica_id, route.request)
        return stream

    def _choose(self, route: Route) -> str:
        try:
            replica_id = self._router.choose(route.request)
        except NoReplica:
            # This server may be draining, but it still runs the requests that it has accepted.
            return self._local_id
        return replica_id if self._fits(route, replica_id) or not self._local.is_ready else self._local_id

    def _fits(self, route: Route, replica_id: str) -> bool:
        info = self._engines[replica_id].info
        return info is not None and len(route.add.prompt) + route.max_tokens <= info.max_model_len

    def _move(self, route: Route, end: Finished) -> Stream | None:
        """Submit the sequence elsewhere if its replica refused it or was lost before it ran. Return None if its end is
        final.
        """
        if end.prompt_tokens or route.has_started or route.is_aborted:
            return None
        if end.code == "overloaded":
            return self._move_to_free_slot(route)
        if end.code not in LOST_CODES:
            return None
        if end.code == "engine_unavailable":
            # The sequence may have killed the engine. A draining server, by contrast, never ran the sequence.
            route.num_losses += 1
            if route.num_losses > MAX_MOVES:
                return None
        lost_id = route.replica_id
        self._leave(route)
        self._leave_out(lost_id)
        route.has_moved = True
        try:
            stream = self._place(route)
        except EngineUnavailable:
            return None
        log.warning("a sequence runs elsewhere", lost=lost_id, replica=route.replica_id, id=route.add.sequence_id)
        if lost_id != self._local_id:
            self._count_forwarded("moved")
        return stream

    def _move_to_free_slot(self, route: Route) -> Stream | None:
        full_id = route.replica_id
        route.overloaded_ids.add(full_id)
        free = [
            view
            for view in self._views
            if view.id not in route.overloaded_ids
            and not view.is_draining
            and view.num_running + view.num_waiting < view.capacity
            and self._fits(route, view.id)
        ]
        if not free:
            return None
        self._leave(route)
        route.has_moved = True
        try:
            stream = self._submit_to(min(free, key=lambda view: view.num_running / view.capacity).id, route)
        except EngineUnavailable:
            return None
        if full_id != self._local_id:
            self._count_forwarded("moved")
        return stream

    def _leave(self, route: Route) -> None:
        if route.engine is not None:
            self._router.note_ended(route.replica_id, route.request)
            self._routes.pop(route.add.sequence_id, None)
            route.engine = None

    def _leave_out(self, replica_id: str) -> None:
        """Send no sequences to a lost replica until the next update."""
        self._show([view for view in self._views if view.id != replica_id])

    def _show(self, views: Sequence[ReplicaView]) -> None:
        self._views = views
        self._router.update(views)

    def _note_outcome(self, route: Route, end: Finished) -> None:
        if route.replica_id != self._local_id:
            is_lost = end.code in LOST_CODES
            self._count_forwarded("lost" if is_lost else "failed" if end.reason == "error" else "completed")
