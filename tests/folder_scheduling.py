"""Distributes test files over the processes of pytest-xdist, and keeps the files of some folders in one process."""

from __future__ import annotations

from xdist.scheduler import LoadFileScheduling  # type: ignore[import-untyped]

TOGETHER = frozenset({"tests/conformance/demo_server"})
"""Folders whose files share a server."""


class FolderScheduling(LoadFileScheduling):
    def _split_scope(self, nodeid: str) -> str:
        file: str = super()._split_scope(nodeid)
        folder = file.rpartition("/")[0]
        return folder if folder in TOGETHER else file
