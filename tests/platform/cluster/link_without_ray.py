"""A link process without Ray: `python link_without_ray.py CASE SOCKET`. Its only replica echoes what it is sent."""

from __future__ import annotations

import asyncio
import os
import socket
import sys
from collections.abc import AsyncGenerator
from contextlib import suppress

import msgspec

from loramux.platform.cluster.link_messages import Join, Joined, read_message, write_message
from loramux.platform.cluster.link_process import LinkServer
from loramux.platform.cluster.replica_calls import ListedReplica, NoteReplicas, ReplicaGone


class Echo:
    trouble = None

    def __init__(self) -> None:
        self._sessions: dict[str, asyncio.Queue[bytes]] = {}
        self._kept: frozenset[str] = frozenset()

    def watch(self, note: NoteReplicas) -> None:
        note((ListedReplica(id="only", identity={}, state={"holds": b"\0\1"}),))

    def keep(self, replica_ids: frozenset[str]) -> None:
        self._kept = replica_ids

    async def session(self, replica_id: str, session_id: str) -> AsyncGenerator[bytes, None]:
        if replica_id != "only":
            raise ReplicaGone(replica_id)
        queue = self._sessions.setdefault(session_id, asyncio.Queue())
        while True:
            yield await queue.get()

    async def send(self, replica_id: str, session_id: str, offset: int, data: bytes) -> None:
        if replica_id != "only":
            raise ReplicaGone(replica_id)
        if data == b"die":
            os._exit(1)
        answer = ",".join(self._kept).encode() if data == b"kept?" else data
        self._sessions.setdefault(session_id, asyncio.Queue()).put_nowait(answer)


async def main(case: str, link: socket.socket) -> None:
    reader, writer = await asyncio.open_connection(sock=link)
    await read_message(reader, msgspec.msgpack.Decoder(Join))
    names = ("LORAMUX_ADMIN_KEY", "PGPASSWORD", "AWS_SECRET_ACCESS_KEY", "RAY_AUTH_MODE")
    told = " ".join(f"{name}={os.environ.get(name)}" for name in names)
    failures = {"refuse": "no cluster here", "environment": told}
    write_message(writer, Joined(failure=failures.get(case)))
    await writer.drain()
    if case == "echo":
        with suppress(asyncio.IncompleteReadError, ConnectionError):
            await LinkServer(Echo(), writer).serve(reader)


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], socket.socket(fileno=int(sys.argv[2]))))
