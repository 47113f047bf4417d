"""Guarantees the adapters of each share an amount of host memory: the floor that the share's requests specify."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Collection
from dataclasses import dataclass, field

MAX_MEMBERS = 4096
"""Maximum number of adapters that one share's floor protects. The most recently requested adapters are kept."""

Protect = Callable[[str, Collection[str], int], None]
"""Protects a share's adapters up to a floor in bytes, like `HostTier.protect`. Raises ValueError if the floor does not
fit.
"""


@dataclass(slots=True)
class _Floor:
    floor_bytes: int
    members: OrderedDict[str, None] = field(default_factory=OrderedDict)
    is_honoured: bool = False


class HostFloors:
    """Protects each share's recently requested adapters in the host tier, up to the share's floor.

    A floor that does not fit next to the other shares' floors takes effect with a later request, once it fits.
    """

    def __init__(self, protect: Protect) -> None:
        self._protect = protect
        self._floors: dict[str, _Floor] = {}

    def note(self, share_key: str, digest: str, floor_bytes: int) -> None:
        """Record that a request of the share needs this adapter, and set the share's floor to `floor_bytes`."""
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
            # A previously granted floor stays in force.
            floor.is_honoured = False
        else:
            floor.is_honoured = True


def no_floors(_group: str, _digests: Collection[str], _floor_bytes: int) -> None:
    """A `Protect` that does nothing, for a store without a host tier."""
