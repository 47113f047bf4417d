"""Guarantees the adapters of each share an amount of host memory: the floor that the share's requests specify."""

from __future__ import annotations

import sys
from collections import OrderedDict
from collections.abc import Callable, Collection
from dataclasses import dataclass, field

MAX_MEMBERS = 4096
"""Maximum number of adapters that one share's floor protects. The most recently requested adapters are kept."""

IDLE_S = 3600.0
"""Time since a share's last request for an adapter, in seconds, after which its floor makes room for other floors."""

Protect = Callable[[str, Collection[str], int], None]
"""Protects a share's adapters up to a floor in bytes, like `HostTier.protect`. Raises ValueError if the floor does not
fit.
"""


@dataclass(slots=True)
class _Floor:
    floor_bytes: int
    noted_s: float = 0.0
    members: OrderedDict[str, None] = field(default_factory=OrderedDict)
    is_honoured: bool = False
    is_reported: bool = False
    """True if the log says that the floor does not fit."""


class HostFloors:
    """Protects each share's recently requested adapters in the host tier, up to the share's floor.

    A floor that does not fit next to the other shares' floors removes those of shares that have used no adapter for
    IDLE_S, longest idle first. Nothing else says that a share is suspended, deleted or no longer has a floor. If the
    floor still does not fit, this is logged, and the floor takes effect with a later request, once it fits.
    """

    def __init__(self, protect: Protect, clock: Callable[[], float]) -> None:
        self._protect = protect
        self._clock = clock
        # Longest idle first.
        self._floors: OrderedDict[str, _Floor] = OrderedDict()

    def note(self, share_key: str, digest: str, floor_bytes: int) -> None:
        """Record that a request of the share needs this adapter, and set the share's floor to `floor_bytes`."""
        floor = self._floors.get(share_key)
        if not floor_bytes:
            if floor is not None:
                self._drop(share_key)
            return
        if floor is None:
            floor = self._floors[share_key] = _Floor(floor_bytes)
        floor.noted_s = self._clock()
        self._floors.move_to_end(share_key)
        is_known = digest in floor.members
        floor.members[digest] = None
        floor.members.move_to_end(digest)
        if len(floor.members) > MAX_MEMBERS:
            floor.members.popitem(last=False)
        if is_known and floor.is_honoured and floor.floor_bytes == floor_bytes:
            return
        floor.floor_bytes = floor_bytes
        # If the floor does not fit, a previously granted one stays in force.
        floor.is_honoured = self._grant(share_key, floor)
        while not floor.is_honoured and self._drop_idle():
            floor.is_honoured = self._grant(share_key, floor)
        if not floor.is_honoured and not floor.is_reported:
            floor.is_reported = True
            print(
                f"the host memory floor of {floor_bytes} bytes of the tenant {share_key} does not fit beside the "
                "floors of other tenants: lower one of them or raise host_tier_bytes",
                file=sys.stderr,
            )

    def _grant(self, share_key: str, floor: _Floor) -> bool:
        """Put the share's floor in force, or return False if it does not fit."""
        try:
            self._protect(share_key, floor.members, floor.floor_bytes)
        except ValueError:
            return False
        return True

    def _drop_idle(self) -> bool:
        """Remove the floor of the longest idle share, or return False if no share has been idle for IDLE_S."""
        share_key, floor = next(iter(self._floors.items()))
        if self._clock() - floor.noted_s < IDLE_S:
            return False
        self._drop(share_key)
        return True

    def _drop(self, share_key: str) -> None:
        del self._floors[share_key]
        self._protect(share_key, (), 0)


def no_floors(_group: str, _digests: Collection[str], _floor_bytes: int) -> None:
    """A `Protect` that does nothing, for a store without a host tier."""
