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

Protect = Callable[[str, Collection[str], int], int]
"""Protects a share's adapters up to a floor in bytes, like `HostTier.protect`. Returns the number of bytes that are
missing for the floor. If it is not 0, nothing is changed.
"""


@dataclass(slots=True)
class _Floor:
    granted_bytes: int = 0
    """The floor in force. If the current one does not fit, it is an earlier one, for the adapters of that time."""
    is_honoured: bool = False
    noted_s: float = 0.0
    members: OrderedDict[str, None] = field(default_factory=OrderedDict)
    is_reported: bool = False
    """True if the log says that the floor does not fit."""


class HostFloors:
    """Protects each share's recently requested adapters in the host tier, up to the share's floor.

    A floor that fits only without those of shares that have used no adapter for IDLE_S removes as many of these as
    necessary, longest idle first. Nothing else says that a share is suspended, deleted or no longer has a floor. A
    floor that does not fit is logged, and takes effect with a later request, once it fits.
    """

    def __init__(self, protect: Protect, clock: Callable[[], float]) -> None:
        self._protect = protect
        self._clock = clock
        # Longest idle first.
        self._floors: OrderedDict[str, _Floor] = OrderedDict()

    def note(self, share_key: str, digest: str, floor_bytes: int) -> None:
        """Record that a request of the share needs this adapter, and set the share's floor to `floor_bytes`."""
        floor = self._floors.get(share_key)
        if floor_bytes <= 0:
            if floor is not None:
                self._drop(share_key)
            return
        if floor is None:
            floor = self._floors[share_key] = _Floor()
        floor.noted_s = self._clock()
        self._floors.move_to_end(share_key)
        is_known = digest in floor.members
        floor.members[digest] = None
        floor.members.move_to_end(digest)
        if len(floor.members) > MAX_MEMBERS:
            floor.members.popitem(last=False)
        if is_known and floor.is_honoured and floor.granted_bytes == floor_bytes:
            return
        missing_bytes = self._protect(share_key, floor.members, floor_bytes)
        if missing_bytes and self._drop_idle(missing_bytes):
            missing_bytes = self._protect(share_key, floor.members, floor_bytes)
        floor.is_honoured = not missing_bytes
        if floor.is_honoured:
            floor.granted_bytes = floor_bytes
        elif not floor.is_reported:
            floor.is_reported = True
            print(
                f"the host memory floor of {floor_bytes} bytes of the tenant {share_key} does not fit beside the "
                "floors of other tenants: lower one of them or raise host_tier_bytes",
                file=sys.stderr,
            )

    def _drop_idle(self, num_bytes: int) -> bool:
        """Remove floors of `num_bytes` bytes of shares that have been idle for IDLE_S. If these shares have less,
        remove none and return False.
        """
        now_s = self._clock()
        dropped: list[str] = []
        for share_key, floor in self._floors.items():
            if num_bytes <= 0:
                break
            if now_s - floor.noted_s < IDLE_S:
                return False
            dropped.append(share_key)
            num_bytes -= floor.granted_bytes
        for share_key in dropped:
            self._drop(share_key)
        return True

    def _drop(self, share_key: str) -> None:
        del self._floors[share_key]
        self._protect(share_key, (), 0)


def no_floors(_group: str, _digests: Collection[str], _floor_bytes: int) -> int:
    """A `Protect` that does nothing, for a store without a host tier."""
    return 0
