"""A gateway's end of its link process."""

from __future__ import annotations

import asyncio
import itertools
import os
import socket
import sys
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass

import msgspec
import structlog

from loramux.platform.cluster.link_messages import (
    CancelCall,
    Ended,
    FromLink,
    Join,
    Joined,
    KeepReplicas,
    OpenSession,
    Received,
    Replicas,
    SendBytes,
    ToLink,
    read_message,
    write_message,
)
from loramux.platform.cluster.ray_connection import QUIET, ClusterUnavailable
from loramux.platform.cluster.replica_calls import CallFailed, ListedReplica, NoteReplicas

LINK_COMMAND = (sys.executable, "-m", "loramux.platform.cluster.link_process")
JOIN_TIMEOUT_S = 90.0
FIRST_DELAY_S = 1.0
MAX_DELAY_S = 10.0
END_WAIT_S = 2.0
SECRET_PREFIXES = ("LORAMUX_", "PG", "AWS_")
"""Environment variables of the server, of the database and of the bucket, which the link process does not get."""

log = structlog.get_logger()


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkTarget:
    """The cluster to join, and what the link process needs in its environment."""

    address: str
    app: str
    environment: Mapping[str, str]


class ClusterLink:
    """Implements ReplicaCalls in a link process, and starts another if it ends, for example with the cluster's head.

    `target` is called for each start, because a cluster that is started again can have another address. Raises
    ClusterUnavailable from `start`.
    """

    def __init__(self, target: Callable[[], LinkTarget], command: tuple[str, ...] = LINK_COMMAND) -> None:
        self._target = target
        self._command = command
        self._process: asyncio.subprocess.Process | None = None
        self._reader: asyncio.StreamReader | None = None
        self._writer: asyncio.StreamWriter | None = None
        self._decoder = msgspec.msgpack.Decoder(FromLink)
        self._ids = itertools.count()
        self._calls: dict[int, asyncio.Queue[bytes | Ended]] = {}
        self._note: NoteReplicas = lambda replicas: None
        self._last: tuple[ListedReplica, ...] = ()
        self._kept: frozenset[str] = frozenset()
        self.trouble: str | None = None
        self._supervisor: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Join the cluster. Raises ClusterUnavailable."""
        await self._launch()
        self._supervisor = asyncio.create_task(self._supervise(), name="cluster-link")

    async def close(self) -> None:
        if self._supervisor is not None:
            self._supervisor.cancel()
            await asyncio.wait({self._supervisor})
        await self._end()

    def watch(self, note: NoteReplicas) -> None:
        self._note = note
        self._show(self._last)

    def keep(self, replica_ids: frozenset[str]) -> None:
        if replica_ids != self._kept:
            self._kept = replica_ids
            self._post(KeepReplicas(replica_ids=tuple(sorted(replica_ids))))

    async def session(self, replica_id: str, session_id: str) -> AsyncGenerator[bytes, None]:
        call_id = next(self._ids)
        answers = self._calls[call_id] = asyncio.Queue()
        try:
            self._post(OpenSession(call_id=call_id, replica_id=replica_id, session_id=session_id))
            while not isinstance(item := await answers.get(), Ended):
                yield item
            _check(item)
        finally:
            if self._calls.pop(call_id, None) is not None:
                self._post(CancelCall(call_id=call_id))

    async def send(self, replica_id: str, session_id: str, offset: int, data: bytes) -> None:
        call_id = next(self._ids)
        answers = self._calls[call_id] = asyncio.Queue()
        try:
            self._post(
                SendBytes(call_id=call_id, replica_id=replica_id, session_id=session_id, offset=offset, data=data)
            )
            item = await answers.get()
            assert isinstance(item, Ended)
            _check(item)
        finally:
            self._calls.pop(call_id, None)

    def _post(self, message: ToLink) -> None:
        if self._writer is not None:
            write_message(self._writer, message)
        elif isinstance(message, OpenSession | SendBytes):
            self._calls[message.call_id].put_nowait(_lost(message.call_id))

    async def _launch(self) -> None:
        target = self._target()
        own, other = socket.socketpair()
        with other:
            try:
                self._process = await asyncio.create_subprocess_exec(
                    *self._command,
                    str(other.fileno()),
                    stdin=asyncio.subprocess.DEVNULL,
                    pass_fds=(other.fileno(),),
                    # Ctrl-C reaches only the gateway, which drains first.
                    start_new_session=True,
                    env={**_environment(), **QUIET, **target.environment},
                )
            except BaseException:
                own.close()
                raise
        self._reader, writer = await asyncio.open_connection(sock=own)
        write_message(writer, Join(address=target.address, app=target.app))
        failure: str | None = f"the cluster at {target.address} does not answer"
        try:
            async with asyncio.timeout(JOIN_TIMEOUT_S):
                joined = await read_message(self._reader, msgspec.msgpack.Decoder(Joined))
            failure = joined.failure
        except (TimeoutError, asyncio.IncompleteReadError, ConnectionError):
            pass
        if failure is not None:
            writer.close()
            await self._end()
            raise ClusterUnavailable(failure)
        self._writer, self.trouble = writer, None
        self._post(KeepReplicas(replica_ids=tuple(sorted(self._kept))))

    async def _end(self) -> None:
        writer, self._writer = self._writer, None
        if writer is not None:
            writer.close()
        process, self._process = self._process, None
        if process is None:
            return
        try:
            async with asyncio.timeout(END_WAIT_S):
                await process.wait()
        except TimeoutError:
            process.kill()
            await process.wait()

    async def _supervise(self) -> None:
        """Loop forever: pass messages on until the link process ends, end its calls, and start another."""
        delay_s = FIRST_DELAY_S
        while True:
            with suppress(asyncio.IncompleteReadError, ConnectionError, msgspec.MsgspecError):
                await self._receive()
            self._lose("the cluster cannot be reached any more; trying again")
            await self._end()
            while self._writer is None:
                await asyncio.sleep(delay_s)
                delay_s = min(2 * delay_s, MAX_DELAY_S)
                try:
                    await self._launch()
                except Exception as error:
                    # Retry after any failure.
                    self._lose(f"{error}; trying again")
            delay_s = FIRST_DELAY_S
            log.info("the cluster was joined again")

    async def _receive(self) -> None:
        assert self._reader is not None
        while True:
            match await read_message(self._reader, self._decoder):
                case Received(call_id=call_id, data=data):
                    if call_id in self._calls:
                        self._calls[call_id].put_nowait(data)
                case Ended(call_id=call_id) as ended:
                    call = self._calls.pop(call_id, None)
                    if call is not None:
                        call.put_nowait(ended)
                case Replicas(replicas=replicas):
                    self._show(
                        tuple(ListedReplica(id=one.id, identity=one.identity, state=one.state) for one in replicas)
                    )

    def _lose(self, trouble: str) -> None:
        if trouble != self.trouble:
            log.error("the cluster is lost", reason=trouble)
        self.trouble = trouble
        for call_id, call in self._calls.items():
            call.put_nowait(_lost(call_id))
        self._calls.clear()
        self._show(())

    def _show(self, replicas: tuple[ListedReplica, ...]) -> None:
        self._last = replicas
        try:
            self._note(replicas)
        except Exception:
            # The link must go on whatever the fleet makes of a list.
            log.exception("the list of replicas could not be noted")


def _check(ended: Ended) -> None:
    if ended.failure is not None:
        raise CallFailed(ended.failure)


def _lost(call_id: int) -> Ended:
    return Ended(call_id=call_id, failure="the cluster cannot be reached")


def _environment() -> dict[str, str]:
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(SECRET_PREFIXES)}
    return {**inherited, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
