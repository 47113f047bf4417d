"""Wrong keys are taken slowly: a few at once from one address, then one every so often."""

from __future__ import annotations

import ipaddress
import math
import time
from collections import OrderedDict
from collections.abc import Callable

BURST = 5
REFILL_S = 12.0
MAX_ADDRESSES = 10_000


class LoginThrottle:
    """Counts wrong keys by the client's address; of IPv6, by the /64, which is what one client has at least."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._failures: OrderedDict[str, tuple[float, float]] = OrderedDict()

    def wait_s(self, address: str) -> int:
        """How long the address must wait before it may try again; 0 when it may now."""
        excess = self._level(_origin(address)) - (BURST - 1)
        return max(0, math.ceil(excess * REFILL_S)) if excess > 0 else 0

    def note_failure(self, address: str) -> None:
        origin = _origin(address)
        self._failures[origin] = (self._level(origin) + 1, self._clock())
        self._failures.move_to_end(origin)
        if len(self._failures) > MAX_ADDRESSES:
            self._failures.popitem(last=False)

    def _level(self, origin: str) -> float:
        level, noted_s = self._failures.get(origin, (0.0, 0.0))
        return max(0.0, level - (self._clock() - noted_s) / REFILL_S) if level else 0.0


def _origin(address: str) -> str:
    try:
        found = ipaddress.ip_address(address)
    except ValueError:
        return address[:64]
    if isinstance(found, ipaddress.IPv6Address):
        return str(ipaddress.ip_network((found, 64), strict=False))
    return str(found)
