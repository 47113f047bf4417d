"""`loramux serve` with another engine: `python -m benchmarks.cluster.server DOCUMENT`. DOCUMENT is a Server as JSON."""

from __future__ import annotations

import sys
from contextlib import ExitStack
from typing import Any
from unittest.mock import patch

import msgspec

from benchmarks.cluster.handle_engine import HandleMember
from benchmarks.cluster.served_gateway import read_settings
from loramux.admin.serving import serve


class Server(msgspec.Struct, frozen=True, kw_only=True):
    settings: dict[str, Any]
    command: tuple[str, ...] = ()
    """The command line that starts the engine, for a server with an engine of its own."""
    is_by_handle: bool = False
    """True if Ray Serve's router chooses the replica of each request."""
    is_multiplexed: bool = False


def main(document: str) -> None:
    told = msgspec.json.decode(document, type=Server)
    settings = read_settings(told.settings)
    with ExitStack() as stack:
        if told.is_by_handle:
            assert settings.cluster is not None
            member = HandleMember(settings.cluster, told.is_multiplexed)
            stack.enter_context(patch.object(serve, "_engine", lambda *_: (member, None)))
        serve.run(settings, told.command)


if __name__ == "__main__":
    main(sys.argv[1])
