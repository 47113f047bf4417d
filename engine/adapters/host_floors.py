"""Floors of host memory, as requests ask for them: what a tenant's adapters keep when others' adapters come."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Collection
from dataclasses import dataclass, field

MAX_MEMBERS = 4096
"""Adapters of one share that its floor may protect: those that were asked for last."""

Protect = Callable[[str, Collection[str], int], None]
"""Sets a group's adapters and floor in bytes, as `HostTier.protect` does; ValueError where it does not fit."""


@dataclass(slots=True)
class _Floor:
    floor_bytes: int
    members: OrderedDict[str, None] = field(default_factory=OrderedDict)
    is_honoured: bool = False


class HostFloors:
    """Tells the host tier which adapters each share's floor protects: those that its requests name.

    Floors that do not fit into the tier beside those that came before are not honoured before these are lowered.
    """

    def __init__(self, protect: Protect) -> None:
        self._protect = protect
        self._floors: dict[str, _Floor] = {}

    def note(self, share_key: str, digest: str, floor_bytes: int) -> None:
        """A request of the share, whose floor is `floor_bytes` from now on, names this adapter."""
        floor = self._floors.get(share_key)
        if not floor_bytes:
            if floor is not None:
                del self._floors[share_key]
                self._protect(share_key, (), 0)
            return
        if floor is None:
            floor = self._floors[share_key] = _Floor(floor_bytes)
        is_known = digest in floor.members
        floor.members[digest] = None
        floor.members.move_to_end(digest)
        if len(floor.members) > MAX_MEMBERS:
            floor.members.popitem(last=False)
        if is_known and floor.is_honoured and floor.floor_bytes == floor_bytes:
            return
        floor.floor_bytes = floor_bytes
        try:
            self._protect(share_key, floor.members, floor_bytes)
        except ValueError:
            # What it was granted before, if anything, stays.
            floor.is_honoured = False
        else:
            floor.is_honoured = True


def no_floors(_group: str, _digests: Collection[str], _floor_bytes: int) -> None:
    """Of a store that keeps nothing in host memory."""
