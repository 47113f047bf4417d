"""Ports on loopback for servers that have to be told theirs."""

from __future__ import annotations

import itertools
import random
import socket

# Systems pick the ports of those that name none from above: nobody is given one of these between here and its use.
_FIRST, _END = 10_000, 30_000
_candidates = itertools.count(random.SystemRandom().randrange(_END - _FIRST))


def free_port() -> int:
    """One that nobody uses and that was not returned before."""
    for candidate in itertools.islice(_candidates, _END - _FIRST):
        port = _FIRST + candidate % (_END - _FIRST)
        with socket.socket() as listener:
            try:
                listener.bind(("127.0.0.1", port))
            except OSError:
                continue
        return port
    raise OSError("no port of loopback is free")
