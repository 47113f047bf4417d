"""The order in which replicas become homes of an adapter."""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Iterable

MAX_ORDERS = 16_384
"""Maximum number of keys whose orders are cached. The least recently used is evicted first."""

_MASK = (1 << 64) - 1


class RendezvousOrder:
    """Highest random weight hashing (Thaler and Ravishankar, "Using name-based mappings to increase hit rates", 1998).

    Each replica draws a pseudo-random weight for each key, and a key's homes are the replicas with the highest weights.
    The order depends only on the key and the replicas' ids, so all gateways agree on it without communicating. If a
    replica leaves, the relative order of the other replicas stays the same, so only its own keys move. A new replica
    takes over about an equal share of keys from each existing replica.
    """

    def __init__(self, replica_ids: Iterable[str] = ()) -> None:
        self._salts: dict[str, int] = {}
        self._orders: OrderedDict[int, tuple[str, ...]] = OrderedDict()
        self.set_replicas(replica_ids)

    def set_replicas(self, replica_ids: Iterable[str]) -> None:
        salts = {replica_id: _salt(replica_id) for replica_id in replica_ids}
        if salts != self._salts:
            self._salts = salts
            self._orders.clear()

    def order(self, key: int) -> tuple[str, ...]:
        """Return the ids of all replicas, in the order in which they become homes of the key."""
        order = self._orders.get(key)
        if order is not None:
            self._orders.move_to_end(key)
            return order
        weights = [(_mixed(key ^ salt), replica_id) for replica_id, salt in self._salts.items()]
        weights.sort(reverse=True)
        order = self._orders[key] = tuple(replica_id for _, replica_id in weights)
        if len(self._orders) > MAX_ORDERS:
            self._orders.popitem(last=False)
        return order


def _salt(replica_id: str) -> int:
    return int.from_bytes(hashlib.sha256(replica_id.encode()).digest()[:8], "big")


def _mixed(value: int) -> int:
    """SplitMix64's finaliser (Steele et al., 2014): flipping an input bit flips each output bit half of the time."""
    value = (value ^ (value >> 30)) * 0xBF58476D1CE4E5B9 & _MASK
    value = (value ^ (value >> 27)) * 0x94D049BB133111EB & _MASK
    return value ^ (value >> 31)
