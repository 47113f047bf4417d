"""Finds shares with more than their weighted part of this gateway's requests in flight."""

from __future__ import annotations


class _Share:
    __slots__ = ("num_in_flight", "weight")

    def __init__(self) -> None:
        self.num_in_flight = 0
        self.weight = 0


class ShareParts:
    """Requests in flight and weights of active shares. A share's part is its weight divided by the sum of weights."""

    def __init__(self) -> None:
        self._shares: dict[str, _Share] = {}
        self._num_in_flight = 0
        self._weight = 0

    def start(self, share_key: str, weight: int) -> None:
        share = self._shares.setdefault(share_key, _Share())
        # The latest weight applies, because an operator can change it while requests run.
        self._weight += weight - share.weight
        share.weight = weight
        share.num_in_flight += 1
        self._num_in_flight += 1

    def end(self, share_key: str) -> None:
        share = self._shares.get(share_key)
        if share is None:
            return
        share.num_in_flight -= 1
        self._num_in_flight -= 1
        if not share.num_in_flight:
            del self._shares[share_key]
            self._weight -= share.weight

    def has_more_than_its_part(self, share_key: str) -> bool:
        share = self._shares.get(share_key)
        return share is not None and share.num_in_flight * self._weight > self._num_in_flight * share.weight
