"""The link process: `python -m loramux.platform.cluster.link_process SOCKET`, with the number of an open Unix socket.

Ray's library ends its process when it loses the cluster, and replaces its signal handlers. A gateway must survive both,
to end its streams, to settle them and to drain, so it uses Ray through this process.
"""

from __future__ import annotations

import asyncio
import os
import socket
import sys
from contextlib import suppress

import msgspec

from loramux.platform.cluster.link_messages import (
    CancelCall,
    Ended,
    FromLink,
    Join,
    Joined,
    KeepReplicas,
    OpenSession,
    Received,
    Replica,
    Replicas,
    SendBytes,
    ToLink,
    read_message,
    write_message,
)
from loramux.platform.cluster.ray_connection import ClusterUnavailable, application_status, connect
from loramux.platform.cluster.replica_calls import ListedReplica, ReplicaCalls


class LinkServer:
    """Makes the calls that a gateway asks for."""

    def __init__(self, calls: ReplicaCalls, writer: asyncio.StreamWriter) -> None:
        self._calls = calls
        self._writer = writer
        self._tasks: dict[int, asyncio.Task[None]] = {}

    async def serve(self, reader: asyncio.StreamReader) -> None:
        """Serve until the gateway closes the socket."""
        decoder = msgspec.msgpack.Decoder(ToLink)
        self._calls.watch(self._show)
        while True:
            match await read_message(reader, decoder):
                case OpenSession() as message:
                    self._start(message.call_id, self._session(message))
                case SendBytes() as message:
                    self._start(message.call_id, self._send(message))
                case CancelCall(call_id=call_id):
                    if call_id in self._tasks:
                        self._tasks[call_id].cancel()
                case KeepReplicas(replica_ids=replica_ids):
                    self._calls.keep(frozenset(replica_ids))

    def _start(self, call_id: int, work: object) -> None:
        task = self._tasks[call_id] = asyncio.create_task(self._run(call_id, work))
        task.add_done_callback(lambda _: self._tasks.pop(call_id, None))

    async def _run(self, call_id: int, work: object) -> None:
        failure: str | None = None
        try:
            await work  # type: ignore[misc]
        except Exception as error:
            # Ray's errors contain the traceback of the replica.
            failure = f"{type(error).__name__}: {error}".strip().splitlines()[0]
        self._post(Ended(call_id=call_id, failure=failure))

    async def _session(self, message: OpenSession) -> None:
        stream = self._calls.session(message.replica_id, message.session_id)
        try:
            async for data in stream:
                self._post(Received(call_id=message.call_id, data=data))
                await self._writer.drain()
        finally:
            await stream.aclose()

    async def _send(self, message: SendBytes) -> None:
        await self._calls.send(message.replica_id, message.session_id, message.offset, message.data)

    def _show(self, replicas: tuple[ListedReplica, ...]) -> None:
        found = (Replica(id=one.id, identity=dict(one.identity), state=dict(one.state)) for one in replicas)
        self._post(Replicas(replicas=tuple(found)))

    def _post(self, message: FromLink) -> None:
        write_message(self._writer, message)


async def run(link: socket.socket) -> None:
    reader, writer = await asyncio.open_connection(sock=link)
    join = await read_message(reader, msgspec.msgpack.Decoder(Join))
    try:
        await asyncio.to_thread(_join, join)
    except ClusterUnavailable as error:
        write_message(writer, Joined(failure=str(error)))
        await writer.drain()
        return
    from loramux.platform.cluster.ray_calls import RayCalls

    write_message(writer, Joined())
    with suppress(asyncio.IncompleteReadError, ConnectionError):
        await LinkServer(RayCalls(join.app), writer).serve(reader)


def _join(join: Join) -> None:
    connect(join.address)
    if application_status(join.app) is None:
        raise ClusterUnavailable(
            f"the cluster at {join.address} runs no replicas: start them with 'loramux cluster up'"
        )


def main() -> None:
    asyncio.run(run(socket.socket(fileno=int(sys.argv[1]))))
    # Ray's threads would delay the exit.
    sys.stderr.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
