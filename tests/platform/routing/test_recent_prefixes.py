from __future__ import annotations

import pytest

from loramux.platform.routing import recent_prefixes
from loramux.platform.routing.recent_prefixes import RecentPrefixes


def test_last_replica_is_remembered_and_memory_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recent_prefixes, "MAX_PREFIXES", 2)
    prefixes = RecentPrefixes()
    for key, replica_id in ((b"a", "one"), (b"b", "one"), (b"a", "two"), (b"c", "three")):
        prefixes.note(key, replica_id)
    assert [prefixes.replica(key) for key in (b"a", b"b", b"c", b"d")] == ["two", None, "three", None]
