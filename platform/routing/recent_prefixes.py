"""Remembers where prompts with the same prefix last ran."""

from __future__ import annotations

from collections import OrderedDict

MAX_PREFIXES = 65_536
"""Maximum number of prefixes to remember. The least recently used is forgotten first."""


class RecentPrefixes:
    """Maps each prefix to the replica that last ran a prompt with it, and that probably still caches the prefix's
    pages.

    The entries come from this gateway's own requests, and no replica confirms them. A wrong entry costs only a prefill.
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
