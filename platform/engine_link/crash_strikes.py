"""Counts how often the engine dies while it is running a request, and refuses the request after two deaths."""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import msgspec

from loramux.engine.protocol.messages import Add

MAX_DEATHS = 2
MEMORY_S = 600.0
"""How long a request's strikes are remembered after the last one, in seconds."""
MAX_REQUESTS = 4096
"""Maximum number of requests remembered. The request whose last strike is oldest is forgotten first."""


@dataclass(frozen=True, slots=True)
class Strikes:
    num_deaths: int
    last_s: float


class CrashStrikes:
    """Counts strikes per request. Retries of a request count as the same request.

    Two requests are the same if they have the same tenant, adapter, prompt and sampling parameters. `max_tokens` and
    the seed are ignored, because they can change in a retry. A request that completes loses its strikes, so that a
    frequent request is not refused merely because it was running during crashes.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        # Ordered by last strike, oldest first.
        self._strikes: OrderedDict[bytes, Strikes] = OrderedDict()

    def __len__(self) -> int:
        return len(self._strikes)

    def strike(self, adds: Iterable[Add]) -> None:
        """Record that the engine died while running these sequences. A request with several choices counts once."""
        self._forgive()
        for key in {request_key(add) for add in adds}:
            struck = self._strikes.pop(key, None)
            self._strikes[key] = Strikes(1 if struck is None else struck.num_deaths + 1, self._clock())
        while len(self._strikes) > MAX_REQUESTS:
            self._strikes.popitem(last=False)

    def acquit(self, add: Add) -> None:
        # Strikes are rare, so usually no prompt has to be hashed.
        if self._strikes:
            self._strikes.pop(request_key(add), None)

    def is_refused(self, add: Add) -> bool:
        """Return whether the request must be refused because engines died while running it."""
        self._forgive()
        struck = self._strikes.get(request_key(add)) if self._strikes else None
        return struck is not None and struck.num_deaths >= MAX_DEATHS

    def _forgive(self) -> None:
        now_s = self._clock()
        while self._strikes:
            oldest = next(iter(self._strikes))
            if now_s - self._strikes[oldest].last_s < MEMORY_S:
                return
            del self._strikes[oldest]


def request_key(add: Add) -> bytes:
    """A key that is the same for a request and its retries."""
    sampling = msgspec.structs.replace(add.sampling, seed=None)
    identity = (add.share_key, add.isolation_key, add.digest, add.prompt, sampling)
    return hashlib.blake2b(msgspec.msgpack.encode(identity), digest_size=16).digest()
