"""Distributes test files over the processes of pytest-xdist, and keeps the files of some folders in one process."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from xdist.scheduler import LoadFileScheduling  # type: ignore[import-untyped]

TOGETHER = frozenset({"tests/conformance/demo_server"})
"""Folders whose files share a server."""


class FolderScheduling(LoadFileScheduling):
    """Each test takes the same time to schedule. pytest-xdist searches and counts thousands of tests for each."""

    def _split_scope(self, nodeid: str) -> str:
        file: str = super()._split_scope(nodeid)
        folder = file.rpartition("/")[0]
        return folder if folder in TOGETHER else file

    def add_node_collection(self, node: Any, collection: Iterable[str]) -> None:
        super().add_node_collection(node, collection)
        self.registered_collections[node] = _Tests(collection)

    def mark_test_complete(self, node: Any, item_index: int, duration: float = 0) -> None:
        nodeid = self.registered_collections[node][item_index]
        file = self._split_scope(nodeid)
        left = self.assigned_work[node][file]
        del left[nodeid]
        if not left:
            del self.assigned_work[node][file]
        self._reschedule(node)


class _Tests(list[str]):
    """The tests that a process has collected. Finding one takes the same time at the beginning and the end."""

    def __init__(self, nodeids: Iterable[str]) -> None:
        super().__init__(nodeids)
        self._positions = {nodeid: position for position, nodeid in enumerate(self)}

    def index(self, nodeid: str, *_: Any) -> int:
        return self._positions[nodeid]
