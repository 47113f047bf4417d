"""Limits each listener's connections, so that enough file descriptors remain for the database, the engine and files."""

from __future__ import annotations

import resource
from dataclasses import dataclass

import structlog

from loramux.admin.errors import StartRefused

KEEP_ALIVE_S = 75
"""How long a connection stays open after a response if no other request begins, in seconds."""
MAX_ADMIN_CONNECTIONS = 512
"""Maximum connections of the admin listener."""
RESERVED_DESCRIPTORS = 512
"""Number of file descriptors reserved for the database's connections (up to three files each), uploads and downloads,
the object store's connections, the engine's pipes and socket, and logs.
"""
PEER_DESCRIPTORS = 768
"""Number of file descriptors reserved for sharing requests with 128 other servers. Each needs six: one for the
connection that it opens, four for that connection's socket to the engine, and one for the connection to the other
server.
"""
MIN_CONNECTIONS = 64
"""A server starts only if both listeners together can accept at least this many connections."""

log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class ConnectionLimits:
    """One listener's limits on connections, in total and per address."""

    max_connections: int = 4096
    max_per_address: int = 1024


@dataclass(frozen=True, slots=True)
class ListenerLimits:
    """The limits of the OpenAI and admin listeners."""

    openai: ConnectionLimits
    admin: ConnectionLimits


def make_room(max_connections: int, max_per_address: int, has_peers: bool = False) -> ListenerLimits:
    """Raise the soft limit on open files to what the connections need, up to the hard limit.

    If that is not enough, the listeners accept fewer connections and a warning is logged. Raises StartRefused if fewer
    than MIN_CONNECTIONS would be left. `has_peers` is true if the server shares requests with other servers.
    """
    reserved = RESERVED_DESCRIPTORS + (PEER_DESCRIPTORS if has_peers else 0)
    wanted = reserved + max_connections + MAX_ADMIN_CONNECTIONS
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        soft = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    room = (wanted if soft == resource.RLIM_INFINITY else min(wanted, soft)) - reserved
    if room < MIN_CONNECTIONS:
        raise StartRefused(
            f"this process can open only {soft} files, which leaves no room for connections: "
            f"raise the hard limit (ulimit -Hn, LimitNOFILE) to {wanted}"
        )
    num_openai = min(max_connections, room - min(MAX_ADMIN_CONNECTIONS, room // 4))
    num_admin = min(MAX_ADMIN_CONNECTIONS, room - num_openai)
    if num_openai < max_connections:
        log.warning(
            "fewer connections than max_connections: raise the hard limit on open files",
            open_files=soft,
            wanted_open_files=wanted,
            max_connections=num_openai,
        )
    return ListenerLimits(
        openai=ConnectionLimits(num_openai, max_per_address), admin=ConnectionLimits(num_admin, max_per_address)
    )
