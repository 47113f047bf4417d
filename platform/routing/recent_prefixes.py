"""Where prompts with the same prefix last ran."""

from __future__ import annotations

from collections import OrderedDict

MAX_PREFIXES = 65_536
"""Maximum number of prefixes that are remembered. The least recently used are forgotten."""


class RecentPrefixes:
    """The replica that last ran each prefix and so probably still caches its pages.

    The memory is this gateway's own. It is never reported or confirmed, so a wrong entry costs only a prefill.
    """

    def __init__(self) -> None:
        self._replicas: OrderedDict[bytes, str] = OrderedDict()

    def note(self, key: bytes, replica_id: str) -> None:
        self._replicas[key] = replica_id
        self._replicas.move_to_end(key)
        if len(self._replicas) > MAX_PREFIXES:
            self._replicas.popitem(last=False)

    def replica(self, key: bytes) -> str | None:
        return self._replicas.get(key)
