"""Requests that were running when the engine died; after two deaths, a request is refused."""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import msgspec

from loramux.engine.messages import Add

MAX_DEATHS = 2
MEMORY_S = 600.0
"""A request is forgiven when it has run at no death for this long."""
MAX_REQUESTS = 4096
"""The longest ago struck are forgotten first."""


@dataclass(frozen=True, slots=True)
class Strikes:
    """How often a request ran when the engine died, and when that was last."""

    num_deaths: int
    last_s: float


class CrashStrikes:
    """Strikes by request, whoever sends it how often.

    One request is the same tenant's, for the same adapter, with the same prompt and sampling parameters. `max_tokens`
    and the seed do not tell requests apart: a retry may be granted fewer tokens or draw another seed, and is still the
    request that stopped the engine. A request that runs to its end is acquitted: one that is sent all the time was
    only there when it happened.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        # In order of the last strike.
        self._strikes: OrderedDict[bytes, Strikes] = OrderedDict()

    def __len__(self) -> int:
        return len(self._strikes)

    def strike(self, adds: Iterable[Add]) -> None:
        """The engine died while it ran these; each request counts once, however many of its choices there were."""
        self._forgive()
        for key in {request_key(add) for add in adds}:
            struck = self._strikes.pop(key, None)
            self._strikes[key] = Strikes(1 if struck is None else struck.num_deaths + 1, self._clock())
        while len(self._strikes) > MAX_REQUESTS:
            self._strikes.popitem(last=False)

    def acquit(self, add: Add) -> None:
        """It ran to its end."""
        # Almost always there are none, and then no prompt is hashed.
        if self._strikes:
            self._strikes.pop(request_key(add), None)

    def is_refused(self, add: Add) -> bool:
        """Whether it must not run any more."""
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
    """What a client's retry has in common with its first try."""
    sampling = msgspec.structs.replace(add.sampling, seed=None)
    identity = (add.share_key, add.isolation_key, add.digest, add.prompt, sampling)
    return hashlib.blake2b(msgspec.msgpack.encode(identity), digest_size=16).digest()
