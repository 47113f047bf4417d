"""Compares the adapters that other servers claim to hold with the adapters that their engines report."""

from __future__ import annotations

import time
from collections.abc import Callable, Set

import structlog

from loramux.engine.protocol.messages import Stats
from loramux.platform.routing.views import digest_prefix

MIN_CLAIMS = 4
"""Minimum number of claims to check. A server with fewer claims passes the check."""
MAX_FALSE_SHARE = 0.5
"""A check fails if more than this share of the claims is false.

Some claims of an honest server are false too, because they can be seconds old.
"""
MAX_FAILURES = 3
"""A server's claims are ignored after this many failed checks in a row."""
DISTRUST_S = 60.0
"""How long the claims are then ignored, in seconds."""

log = structlog.get_logger()


class ClaimChecks:
    """Decides which servers' claims to trust.

    Claims are hints, but a server with false claims would attract requests for adapters that it has yet to load.
    """

    def __init__(self, count_refusal: Callable[[str], None], clock: Callable[[], float] = time.monotonic) -> None:
        self._count_refusal = count_refusal
        self._clock = clock
        self._failures: dict[str, int] = {}
        self._distrusted_until_s: dict[str, float] = {}

    def is_trusted(self, replica_id: str) -> bool:
        return self._clock() >= self._distrusted_until_s.get(replica_id, 0.0)

    def note(self, replica_id: str, claims: Set[int], stats: Stats) -> None:
        """Compare a server's claims with the statistics of its engine."""
        resident = {digest_prefix(one.digest) for one in stats.adapters}
        num_false = sum(claim not in resident for claim in claims)
        if len(claims) < MIN_CLAIMS or num_false <= MAX_FALSE_SHARE * len(claims):
            self._failures.pop(replica_id, None)
            return
        self._failures[replica_id] = self._failures.get(replica_id, 0) + 1
        if self._failures[replica_id] >= MAX_FAILURES:
            del self._failures[replica_id]
            self._distrusted_until_s[replica_id] = self._clock() + DISTRUST_S
            log.warning("a replica's claims are ignored for a while", replica=replica_id, false=num_false)
            self._count_refusal("claims")

    def forget_all_but(self, replicas: Set[str]) -> None:
        self._failures = {name: count for name, count in self._failures.items() if name in replicas}
        until = self._distrusted_until_s
        self._distrusted_until_s = {name: end_s for name, end_s in until.items() if name in replicas}
