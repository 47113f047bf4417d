"""An EngineClient for this server's engine and other servers' engines. A router chooses one for each sequence."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import time
from array import array
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from typing import Protocol

import msgspec
import structlog

from loramux.engine.messages import AdapterState, Add, EngineReady, Finished, SequenceOutput, Stats
from loramux.platform.engine_link.engine_client import EngineClient, EngineUnavailable
from loramux.platform.routing.views import NoReplica, Prefetch, ReplicaView, RoutingRequest, digest_prefix

MAX_MOVES = 2
"""Maximum number of times that a sequence is submitted again because its replica was lost before its first output.

Refusals by draining replicas do not count.
"""
PREFETCH_WAIT_S = 60.0
"""Timeout, in seconds, for loading an adapter before requests need it."""
PREFIX_TOKENS = 64
"""Prompts that start with this many identical tokens probably share cached pages."""

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


class _Route:
    """Where one sequence runs."""

    def __init__(self, add: Add, now_s: float) -> None:
        self.add = add
        self.request = routing_request(add)
        self.replica_id = ""
        self.engine: EngineClient | None = None
        self.max_tokens = add.max_tokens
        self.has_started = False
        self.is_aborted = False
        self.num_losses = 0
        self.has_moved = False
        self._begin_s = now_s

    def add_now(self, now_s: float) -> Add:
        """The sequence with its current limits. Time spent on a lost replica counts towards the deadline."""
        if not self.has_moved:
            return self.add
        timeout_s = self.add.timeout_s
        left_s = None if timeout_s is None else max(0.0, timeout_s - (now_s - self._begin_s))
        return msgspec.structs.replace(self.add, max_tokens=self.max_tokens, timeout_s=left_s)


class RoutedEngine:
    """Runs sequences on the replicas that the router chooses. `load`, `unload`, `pin` and `stats` use the local engine.

    If a replica refuses a sequence because the replica is draining, or is lost before the sequence is known to have
    run, the sequence is submitted elsewhere under the same id. A sequence that has started ends with
    `engine_unavailable`. A sequence that was running when its engine died is not moved, because it may have killed the
    engine. Only the last Finished reaches the caller, so nothing is charged twice.

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
        self._routes: dict[str, _Route] = {}
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
        route = _Route(add, self._clock())
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

    async def _follow(self, route: _Route, stream: Stream) -> Stream:
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

    def _place(self, route: _Route) -> Stream:
        """Submit the sequence to the chosen replica. Raises EngineUnavailable if no replica is ready."""
        while True:
            replica_id = self._choose(route)
            engine = self._engines[replica_id]
            try:
                stream = engine.submit(route.add_now(self._clock()))
            except EngineUnavailable:
                if replica_id == self._local_id and not any(view.id == self._local_id for view in self._views):
                    raise
                self._leave_out(replica_id)
                continue
            route.replica_id, route.engine = replica_id, engine
            self._routes[route.add.sequence_id] = route
            self._router.note_started(replica_id, route.request)
            return stream

    def _choose(self, route: _Route) -> str:
        try:
            replica_id = self._router.choose(route.request)
        except NoReplica:
            # This server may be draining, but it still runs the requests that it has accepted.
            return self._local_id
        info = self._engines[replica_id].info
        fits = info is not None and len(route.add.prompt) + route.max_tokens <= info.max_model_len
        return replica_id if fits or not self._local.is_ready else self._local_id

    def _move(self, route: _Route, end: Finished) -> Stream | None:
        """Submit the sequence elsewhere if its replica was lost before it ran. Return None if its end is final."""
        is_lost = end.code in LOST_CODES and end.prompt_tokens == 0
        if not is_lost or route.has_started or route.is_aborted:
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

    def _leave(self, route: _Route) -> None:
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

    def _note_outcome(self, route: _Route, end: Finished) -> None:
        if route.replica_id != self._local_id:
            is_lost = end.code in LOST_CODES
            self._count_forwarded("lost" if is_lost else "failed" if end.reason == "error" else "completed")


def routing_request(add: Add) -> RoutingRequest:
    prefix_key = None
    if add.isolation_key and len(add.prompt) >= PREFIX_TOKENS:
        start = array("q", add.prompt[:PREFIX_TOKENS]).tobytes()
        prefix_key = hashlib.blake2b(start, digest_size=16, key=add.isolation_key[:64]).digest()
    return RoutingRequest(
        digest=add.digest,
        prefix_key=prefix_key,
        share_key=add.share_key,
        weight=add.weight,
        num_prompt_tokens=len(add.prompt),
        max_tokens=add.max_tokens,
    )
