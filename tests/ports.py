"""Loopback ports for servers that need a fixed port."""

from __future__ import annotations

import itertools
import os
import random
import socket

# Stay below the ephemeral range, so that the system does not assign a port before its test binds it. Each process of
# pytest-xdist has a part of its own.
_NUM_PARTS = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
_PART = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw")) % _NUM_PARTS
_FIRST, _END = (10_000 + 20_000 * part // _NUM_PARTS for part in (_PART, _PART + 1))
_candidates = itertools.count(random.SystemRandom().randrange(_END - _FIRST))


def free_port() -> int:
    """Return a port that is not in use and has not been returned before."""
    for candidate in itertools.islice(_candidates, _END - _FIRST):
        port = _FIRST + candidate % (_END - _FIRST)
        with socket.socket() as listener:
            try:
                listener.bind(("127.0.0.1", port))
            except OSError:
                continue
        return port
    raise OSError("no loopback port is free")
