"""Chooses a replica for each request."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from random import Random
from statistics import median_low

from loramux.platform.routing.demand import AdapterDemand
from loramux.platform.routing.known_replica import KnownReplica
from loramux.platform.routing.recent_prefixes import RecentPrefixes
from loramux.platform.routing.rendezvous import RendezvousOrder
from loramux.platform.routing.share_parts import ShareParts
from loramux.platform.routing.views import NoReplica, Prefetch, ReplicaView, RoutingRequest, digest_prefix

COPY_PART = 1 / 4
"""Fraction of a replica's capacity that one copy of an adapter should serve. More demand requires more copies."""

NUM_SPARE_HOMES = 1
"""Number of homes in addition to the copies, so that each copy can be placed on the better of two homes."""

HELD_COST = 2.0
"""Cost of placing an adapter in a pool that holds the mean number of adapters, in units of load."""

LOAD_BOUND = 1.2
"""Cost above which a home's requests may go elsewhere, relative to the mean load of all replicas."""

LEAST_BOUND = 0.5
"""Cost below which no request leaves the homes of its adapter, regardless of the mean load."""

COLD_COST = 0.8
"""Cost of loading an adapter, in units of load. Smaller differences in load do not justify another copy."""

PREFIX_CREDIT = 0.5
"""Value of a cached prompt of `PREFIX_TOKENS` tokens, in units of load. Shorter prompts are worth less."""

PREFIX_TOKENS = 4096

FULL_FLEET = 0.95
"""If at least this fraction of sequence slots is used, shares over their weighted part stay on existing copies."""

MAX_CAPACITY_RATIO = 8
"""Largest capacity that is believed, relative to the median capacity of all replicas."""

MAX_LOAD_RATIO = 4.0
"""Largest load that counts towards the mean load, relative to the median load. Loads up to 1 always count."""

MAX_PREFETCHES = 8
"""Maximum number of adapters per replica that one call of `prefetches` returns."""

MAX_WANTED = 1024
"""Maximum number of adapters waiting for the next call of `prefetches`."""


class Router:
    """Sends each request to a replica that holds its adapter, unless that replica is much busier than others.

    **Homes.** An adapter needs k copies, where k is proportional to its share of the recent traffic (`AdapterDemand`).
    The router assumes that all gateways see the same share, and applies it to the sequences that the replicas report.
    The adapter's homes are the first k + 1 replicas of its rendezvous order, so gateways agree on them if they agree on
    k. A copy is placed on the cheapest home, where each adapter that a home already holds adds to its cost (the power
    of two choices; Azar et al., "Balanced allocations", 1999). If k has grown or the homes have changed, requests go to
    existing copies, and `prefetches` returns the adapters to load.

    **Choice.** A request goes to the cheaper of two random copies on the homes. The router does not choose the cheapest
    of all copies: views are up to two reports old, so all gateways would choose the same replica until the next report
    (Mitzenmacher, "How useful is old information?", 2000). The local engine and the replica that last ran the request's
    prefix are also considered, each with a credit.

    **Spill.** If the chosen replica costs more than `LOAD_BOUND` times the mean load (Mirrokni et al., "Consistent
    hashing with bounded loads", 2018), copies elsewhere and two random replicas are considered. A replica without the
    adapter must be cheaper by `COLD_COST`. If all replicas are equally overloaded, no request moves.

    **Membership.** A draining replica is not a home and receives no new requests. A new replica becomes a home of its
    share of the adapters. It loads at most `MAX_PREFETCHES` of them per gateway and report. Meanwhile, the old copies
    serve the requests, so no request waits for a load. While the new replica is idle, the choice between two random
    copies limits its request rate to twice the mean.

    **Weights and floors.** Each engine enforces weights and floors among its own requests: its fair queue orders shares
    by weight, and a floor keeps a share's adapters in the engine's host memory. The router makes these local rules
    effective across replicas. Copies follow demand, so a share's waiting requests reach as many replicas as they need.
    Homes are stable, so the floor in each engine keeps protecting the same adapters. When the fleet is full, a share
    with more than its weighted part of this gateway's requests stays on its existing copies. It gets no additional
    copies and does not spill, so its adapters cannot displace other shares' adapters.

    Clocks of different machines are never compared. The `clock` argument is used only to let demand decay.
    """

    def __init__(self, *, clock: Callable[[], float], random: Random) -> None:
        self._random = random
        self._replicas: dict[str, KnownReplica] = {}
        self._serving: list[KnownReplica] = []
        self._local: KnownReplica | None = None
        self._order = RendezvousOrder()
        self._demand = AdapterDemand(clock)
        self._shares = ShareParts()
        self._prefixes = RecentPrefixes()
        # Adapters to load, as pairs of digest and replica, in the order in which they were first wanted.
        self._wanted: dict[tuple[str, str], None] = {}
        self._num_sequences = 0.0
        self._copy_sequences = 1.0
        self._num_held = 1.0
        self._bound = LEAST_BOUND
        self._is_full = False

    def update(self, views: Sequence[ReplicaView]) -> None:
        """Replace all views. Forget replicas without a view."""
        known = self._replicas
        self._replicas = {}
        # One false report must not draw every request, or change how the other replicas are used.
        max_capacity = MAX_CAPACITY_RATIO * median_low([view.capacity for view in views] or [1])
        for view in views:
            if view.capacity > max_capacity:
                view = replace(view, capacity=max_capacity)
            replica = known.get(view.id)
            if replica is None:
                replica = KnownReplica(view)
            else:
                replica.receive(view)
            self._replicas[view.id] = replica
        self._serving = serving = [replica for replica in self._replicas.values() if not replica.view.is_draining]
        self._local = next((replica for replica in serving if replica.view.is_local), None)
        self._order.set_replicas(replica.id for replica in serving)
        capacity = sum(replica.view.capacity for replica in serving)
        max_load = max(1.0, MAX_LOAD_RATIO * median_low([replica.load for replica in serving] or [0.0]))
        self._num_sequences = sum(min(max_load, replica.load) * replica.view.capacity for replica in serving)
        self._copy_sequences = COPY_PART * capacity / max(1, len(serving))
        self._num_held = max(1.0, sum(replica.num_held for replica in serving) / max(1, len(serving)))
        self._bound = max(LEAST_BOUND, LOAD_BOUND * self._num_sequences / max(1, capacity))
        used = sum(min(1.0, replica.load) * replica.view.capacity for replica in serving)
        self._is_full = used >= FULL_FLEET * capacity

    def choose(self, request: RoutingRequest) -> str:
        """Return the id of the replica that should run the request. Raises NoReplica."""
        if not self._serving:
            raise NoReplica
        if request.digest is None:
            return self._cheapest(self._serving, request)[0].id
        return self._choose_for_adapter(request, request.digest).id

    def note_started(self, replica_id: str, request: RoutingRequest) -> None:
        """Count a request that was sent to a replica. The caller must later call `note_ended` exactly once."""
        self._demand.start(_prefix(request))
        self._shares.start(request.share_key, request.weight)
        if request.prefix_key is not None:
            self._prefixes.note(request.prefix_key, replica_id)
        if replica_id in self._replicas:
            self._replicas[replica_id].note_started()

    def note_ended(self, replica_id: str, request: RoutingRequest) -> None:
        self._demand.end(_prefix(request))
        self._shares.end(request.share_key)
        if replica_id in self._replicas:
            self._replicas[replica_id].note_ended()

    def prefetches(self) -> list[Prefetch]:
        """Return the adapters that homes should load now. Call this after each `update`, and send a Load for each."""
        prefetches = []
        num_prefetches: dict[str, int] = {}
        for digest, replica_id in self._wanted:
            replica = self._replicas.get(replica_id)
            number = num_prefetches.get(replica_id, 0)
            prefix = digest_prefix(digest)
            if replica is None or replica.view.is_draining or replica.holds(prefix) or number == MAX_PREFETCHES:
                continue
            num_prefetches[replica_id] = number + 1
            replica.expect(prefix)
            prefetches.append(Prefetch(replica_id=replica_id, digest=digest))
        # An adapter that was left out is wanted again when its next request arrives.
        self._wanted.clear()
        return prefetches

    def _choose_for_adapter(self, request: RoutingRequest, digest: str) -> KnownReplica:
        prefix = digest_prefix(digest)
        order = [self._replicas[replica_id] for replica_id in self._order.order(prefix)]
        num_copies = math.ceil(self._demand.part(prefix) * self._num_sequences / self._copy_sequences)
        num_copies = max(1, min(num_copies, len(order)))
        is_held_back = self._is_full and self._shares.has_more_than_its_part(request.share_key)
        homes = order[: num_copies + NUM_SPARE_HOMES]
        copies = [replica for replica in homes if replica.holds(prefix)]
        elsewhere = place = None
        if len(copies) < num_copies:
            # Until a home holds the adapter, a replica elsewhere that holds it runs the requests. All gateways choose
            # the first such replica in the order.
            elsewhere = next((replica for replica in order[len(homes) :] if replica.holds(prefix)), None)
            place = min((replica for replica in homes if not replica.holds(prefix)), key=self._placement_cost)
            if (copies or elsewhere) and not is_held_back and len(self._wanted) < MAX_WANTED:
                self._wanted[digest, place.id] = None
        if copies:
            chosen, cost = self._cheapest(copies, request)
        elif elsewhere is not None:
            chosen, cost = elsewhere, elsewhere.cost
        else:
            assert place is not None
            chosen, cost = place, place.cost + COLD_COST
        if chosen.cost > self._bound and not is_held_back:
            chosen = self._spill(prefix, order, chosen, cost)
        chosen.expect(prefix)
        return chosen

    def _cheapest(self, replicas: Sequence[KnownReplica], request: RoutingRequest) -> tuple[KnownReplica, float]:
        """Return the cheaper of two random `replicas`, and its cost.

        The local replica and the one that last ran the request's prefix are also considered if they are in `replicas`.
        """
        num_replicas = len(replicas)
        first = int(self._random.random() * num_replicas)
        chosen = replicas[first]
        cost = chosen.cost
        if num_replicas > 1:
            other = replicas[first - 1 - int(self._random.random() * (num_replicas - 1))]
            if other.cost < cost:
                chosen, cost = other, other.cost
            local = self._local
            if local is not None and local.cost < cost and local in replicas:
                chosen, cost = local, local.cost
        if request.prefix_key is not None:
            cached = self._replicas.get(self._prefixes.replica(request.prefix_key) or "")
            if cached is not None and cached in replicas:
                cached_cost = cached.cost - PREFIX_CREDIT * min(1.0, request.num_prompt_tokens / PREFIX_TOKENS)
                if cached_cost < cost:
                    chosen, cost = cached, cached_cost
        return chosen, cost

    def _spill(self, prefix: int, order: Sequence[KnownReplica], chosen: KnownReplica, cost: float) -> KnownReplica:
        """Return a replica that is cheaper than the overloaded `chosen`, if there is one, or `chosen`. The cost
        includes loading the adapter.
        """
        for replica in order:
            if replica.cost < cost and replica.holds(prefix):
                chosen, cost = replica, replica.cost
        for replica in self._random.choices(order, k=2):
            if replica.cost + COLD_COST < cost:
                chosen, cost = replica, replica.cost + COLD_COST
        return chosen

    def _placement_cost(self, replica: KnownReplica) -> float:
        return replica.cost + HELD_COST * replica.num_held / self._num_held


def _prefix(request: RoutingRequest) -> int | None:
    return None if request.digest is None else digest_prefix(request.digest)
