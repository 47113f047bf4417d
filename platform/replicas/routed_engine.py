"""An EngineClient for this server's engine and other servers' engines. A router chooses one for each sequence."""

from __future__ import annotations

import asyncio
import contextlib
from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Collection, Mapping, Sequence

import structlog

from loramux.engine.protocol.messages import Add, AnswerT, EngineCall, EngineReady, Finished, Load, SequenceOutput
from loramux.platform.base_draw import BaseOrder
from loramux.platform.engine_link.engine_client import EngineClient, EngineUnavailable
from loramux.platform.replicas.base_replicas import BaseReplicas
from loramux.platform.replicas.route import Route
from loramux.platform.routing.routers import RequestRouter
from loramux.platform.routing.views import NoReplica, Prefetch, ReplicaView, digest_prefix

MAX_MOVES = 2
"""Maximum number of times that a sequence is submitted again because its replica was lost before the sequence's first
output.

Refusals by draining replicas do not count.
"""
PREFETCH_WAIT_S = 60.0
"""Timeout, in seconds, for loading an adapter before requests need it."""

LOST_CODES = ("engine_unavailable", "replica_draining")

log = structlog.get_logger()

Stream = AsyncIterator[SequenceOutput | Finished]


class RoutedEngine:
    """Runs sequences on the replicas that a router chooses. `call` uses the local engine.

    A sequence runs on this server's base, `base_id`, unless it comes with an order of bases. Then it runs on the first
    base with a replica that can run it. Each base has its own router, which `new_router` creates.

    If a replica refuses a sequence because the replica is draining, or is lost before the sequence is known to have
    run, the sequence is submitted elsewhere under the same id. A sequence that has started ends with
    `engine_unavailable`. A sequence that was running when its engine died is not moved, because it may have killed the
    engine. A sequence that an overloaded engine refused moves to a replica with free sequence slots, if there is one.
    Only the last Finished reaches the caller, so nothing is charged twice.

    `drawn_bases` returns the bases that requests can be divided between.

    With `is_own_only`, sequences of this server's base run only on the local engine, because a router in front of the
    servers has chosen this server. Sequences of other bases still run on servers of these bases.

    `count_forwarded` receives the outcome of each forwarded sequence: `completed`, `failed` or `lost`. It also receives
    `moved` for each move away from another server. `count_fallback` is called once for each sequence that runs on a
    base other than the one that the weights chose.
    """

    def __init__(
        self,
        local: EngineClient,
        local_id: str,
        new_router: Callable[[], RequestRouter],
        count_forwarded: Callable[[str], None],
        count_fallback: Callable[[], None],
        base_id: str | None = None,
        is_own_only: bool = False,
        drawn_bases: Callable[[], Collection[str]] = lambda: (),
    ) -> None:
        self._local = local
        self._local_id = local_id
        self._new_router = new_router
        self._count_forwarded = count_forwarded
        self._count_fallback = count_fallback
        self._engines: Mapping[str, EngineClient] = {local_id: local}
        self._is_own_only = is_own_only
        self._drawn_bases = drawn_bases
        self._own = BaseReplicas(base_id, new_router())
        self._views_of_own_base: Sequence[ReplicaView] = ()
        self._bases: Mapping[str | None, BaseReplicas] = {base_id: self._own}
        self._routes: dict[str, Route] = {}
        self._prefetching: set[asyncio.Task[None]] = set()
        self._info: EngineReady | None = None

    def update(self, views: Sequence[ReplicaView], peers: Mapping[str, EngineClient]) -> None:
        """Replace the views of all replicas. `peers` contains an engine for each view of another server."""
        self._engines = {self._local_id: self._local, **peers}
        self._info = self._local.info or self._info
        ready: dict[str | None, list[ReplicaView]] = defaultdict(list, {self._own.base_id: []})
        for view in views:
            if self._engines[view.id].is_ready:
                ready[view.base_id].append(view)
        self._views_of_own_base = ready[self._own.base_id]
        if self._is_own_only:
            ready[self._own.base_id] = [view for view in self._views_of_own_base if view.is_local]
        self._bases = {name: self._bases.get(name) or BaseReplicas(name, self._new_router()) for name in ready}
        for name, base in self._bases.items():
            base.show(ready[name])
            for prefetch in base.router.prefetches():
                self._prefetch(prefetch)

    def holds_elsewhere(self, digest: str, base_id: str | None = None) -> bool:
        """True if another replica that accepts new requests claims to hold the adapter.

        Only replicas of the base `base_id` count, or of this server's own base if it is None.
        """
        prefix = digest_prefix(digest)
        base = self._own if base_id is None else self._bases.get(base_id)
        views = () if base is None else base.views
        return any(prefix in view.holds for view in views if not view.is_local and not view.is_draining)

    @property
    def info(self) -> EngineReady | None:
        """The latest announcement of this server's engine, even if only other servers' engines are ready now."""
        return (self._local.info or self._info) if self.is_ready else None

    @property
    def is_ready(self) -> bool:
        """True if a sequence that is submitted now would run, here or on a server that accepts new requests."""
        if self._local.is_ready or self._is_own_only:
            return self._local.is_ready
        drawn = (self._bases[base_id] for base_id in self._drawn_bases() if base_id in self._bases)
        views = (view for base in (self._own, *drawn) for view in base.views)
        return any(self._engines[view.id].is_ready for view in views if not view.is_draining)

    @property
    def is_own_ready(self) -> bool:
        return self._local.is_own_ready

    @property
    def is_live(self) -> bool:
        return self._local.is_live

    @property
    def trouble(self) -> str | None:
        return self._local.trouble

    def submit(self, add: Add, order: BaseOrder | None = None) -> Stream:
        route = Route(add, order)
        return self._follow(route, self._place(route))

    def abort(self, sequence_id: str) -> None:
        route = self._routes.get(sequence_id)
        if route is not None and route.engine is not None:
            route.is_aborted = True
            route.engine.abort(sequence_id)

    def extend(self, sequence_id: str, max_tokens: int) -> None:
        route = self._routes.get(sequence_id)
        if route is not None and route.engine is not None:
            route.max_tokens = max(route.max_tokens, max_tokens)
            route.engine.extend(sequence_id, max_tokens)

    async def call(self, message: EngineCall[AnswerT], timeout_s: float) -> AnswerT:
        return await self._local.call(message, timeout_s)

    async def load_elsewhere(self, digest: str, predecessors: Collection[str], timeout_s: float) -> None:
        """Have the other servers that hold one of `predecessors` load an adapter, and wait until they have.

        A server that fails to, or that takes longer than `timeout_s`, loads the adapter when a request needs it.
        """
        held = {digest_prefix(one) for one in predecessors}
        others = (view for view in self._views_of_own_base if not view.is_local and not view.is_draining)
        engines = [self._engines[view.id] for view in others if not held.isdisjoint(view.holds)]
        await asyncio.gather(*(_load(engine, digest, timeout_s) for engine in engines))

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
        # If a load fails and requests still need the adapter, the router asks for it again.
        load = _load(self._engines[prefetch.replica_id], prefetch.digest, PREFETCH_WAIT_S)
        task = asyncio.create_task(load, name="prefetch")
        self._prefetching.add(task)
        task.add_done_callback(self._prefetching.discard)

    def _place(self, route: Route) -> Stream:
        """Submit the sequence to the chosen replica. Raises EngineUnavailable if no replica is ready."""
        while True:
            base, replica_id = self._choose(route)
            try:
                return self._submit_to(base, replica_id, route)
            except EngineUnavailable:
                if replica_id == self._local_id and not any(view.id == self._local_id for view in base.views):
                    raise
                base.leave_out(replica_id)

    def _submit_to(self, base: BaseReplicas, replica_id: str, route: Route) -> Stream:
        engine = self._engines[replica_id]
        stream = engine.submit(route.add_now())
        route.base, route.replica_id, route.engine = base, replica_id, engine
        self._routes[route.add.sequence_id] = route
        base.router.note_started(replica_id, route.request)
        if route.order is not None and base.base_id != route.order.drawn and not route.has_fallen_back:
            route.has_fallen_back = True
            self._count_fallback()
        return stream

    def _bases_of(self, route: Route) -> Sequence[BaseReplicas]:
        """Return the bases that may run the sequence and have a replica, in order of preference. This server's own base
        is always included if it may run the sequence.
        """
        if route.order is None:
            return (self._own,)
        return [self._bases[base_id] for base_id in route.order.bases if base_id in self._bases]

    def _choose(self, route: Route) -> tuple[BaseReplicas, str]:
        """Choose a base and a replica. Raises EngineUnavailable if no base that may run the sequence has a replica."""
        bases = self._bases_of(route)
        too_small: tuple[BaseReplicas, str] | None = None
        for base in bases:
            try:
                replica_id = base.router.choose(route.request)
            except NoReplica:
                continue
            if self._fits(route, replica_id):
                return base, replica_id
            too_small = too_small or (base, replica_id)
        if self._own in bases and (too_small is None or self._local.is_ready):
            # This server may be draining, but it still runs the requests that it has accepted.
            return self._own, self._local_id
        if too_small is None:
            raise EngineUnavailable("no server of a base that may run the request is ready")
        return too_small

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
        base, lost_id = route.base, route.replica_id
        assert base is not None
        self._leave(route)
        base.leave_out(lost_id)
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
        # The preferred base comes first, then the least busy of its replicas.
        free = [
            (position, view.num_running / view.capacity, base, view.id)
            for position, base in enumerate(self._bases_of(route))
            for view in base.views
            if view.id not in route.overloaded_ids
            and not view.is_draining
            and view.num_running + view.num_waiting < view.capacity
            and self._fits(route, view.id)
        ]
        if not free:
            return None
        self._leave(route)
        route.has_moved = True
        _, _, base, replica_id = min(free, key=lambda found: found[:2])
        try:
            stream = self._submit_to(base, replica_id, route)
        except EngineUnavailable:
            return None
        if full_id != self._local_id:
            self._count_forwarded("moved")
        return stream

    def _leave(self, route: Route) -> None:
        if route.engine is not None and route.base is not None:
            route.base.router.note_ended(route.replica_id, route.request)
            self._routes.pop(route.add.sequence_id, None)
            route.engine = None

    def _note_outcome(self, route: Route, end: Finished) -> None:
        if route.replica_id != self._local_id:
            is_lost = end.code in LOST_CODES
            self._count_forwarded("lost" if is_lost else "failed" if end.reason == "error" else "completed")


async def _load(engine: EngineClient, digest: str, timeout_s: float) -> None:
    with contextlib.suppress(EngineUnavailable, TimeoutError):
        await engine.call(Load(digest=digest), timeout_s)
