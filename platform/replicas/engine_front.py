"""Serves several engines at one socket, as an engine process serves itself, for the relays of other servers."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Coroutine
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec
import structlog
import zmq
import zmq.asyncio
from msgspec import structs

from loramux.engine.protocol.messages import (
    Abort,
    AdapterState,
    Add,
    Credit,
    EngineCall,
    Extend,
    Finished,
    ForgetPrefixes,
    FromEngine,
    Heartbeat,
    Load,
    Pin,
    Rejected,
    SequenceOutput,
    Stats,
    StatsRequest,
    ToEngine,
    Unload,
)
from loramux.engine.server.gateway_link import GatewayLink
from loramux.platform.engine_link.engine_client import EngineClient, EngineUnavailable
from loramux.platform.engine_link.engine_socket import EngineSocketDirectory

CALL_TIMEOUT_S = 60.0
"""Timeout, in seconds, for the calls of other servers, which wait for a shorter time themselves."""
HEARTBEAT_S = 1.0
"""Interval, in seconds, after which the loss of another server without output is noticed."""

log = structlog.get_logger()


class EngineFront:
    """Runs on `engine` what a PeerRelay passes on, so that other servers see one engine.

    Each relay has credit, like a gateway of an engine. Sequences run under names of their own, so that no other server
    can name a sequence that it has not sent. When a relay is gone, its sequences end. The end of each sequence says
    whether it ran, so nothing has to be told about dead engines.
    """

    ran_at_death: frozenset[str] = frozenset()

    def __init__(self, engine: EngineClient, directory: EngineSocketDirectory) -> None:
        self._engine = engine
        self._directory = directory
        self._links: dict[bytes, _Link] = {}
        self._num_links = 0
        self._decoder = msgspec.msgpack.Decoder(ToEngine)
        self._encoder = msgspec.msgpack.Encoder()
        self._context = zmq.asyncio.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        # The queues are bounded by credits. A high-water mark would drop messages.
        for option in (zmq.SNDHWM, zmq.RCVHWM, zmq.LINGER):
            self._socket.setsockopt(option, 0)
        self._socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def socket_path(self) -> Path:
        return self._directory.path

    @property
    def is_ready(self) -> bool:
        return self._engine.is_ready

    def open(self) -> None:
        """Listen at `socket_path`, which only this user can reach, until `close`."""
        previous = os.umask(0o177)
        try:
            self._socket.bind(f"ipc://{self.socket_path}")
        finally:
            os.umask(previous)
        self._start(self._serve())
        self._start(self._beat())

    async def close(self) -> None:
        """End every sequence and stop listening. Closing again does nothing."""
        for owner in list(self._links):
            self._lose(owner)
        tasks = tuple(self._tasks)
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)
        self._context.destroy(linger=0)
        self._directory.close()

    async def _serve(self) -> None:
        while True:
            owner, data = await self._socket.recv_multipart()
            link = self._links.get(owner)
            if link is None:
                info = self._engine.info
                if info is None:
                    continue
                self._num_links += 1
                link = self._links[owner] = _Link(self, owner, f"peer-{self._num_links}-")
                link.post(info)
                if owner not in self._links:
                    # The relay is already gone, so nobody would read or end its sequences.
                    continue
            try:
                message = self._decoder.decode(data)
            except msgspec.MsgspecError as error:
                # One relay's malformed message must not affect the others.
                link.post(Rejected(message=f"a message could not be read: {error}"))
                continue
            self._dispatch(link, message)

    def _dispatch(self, link: _Link, message: ToEngine) -> None:
        match message:
            case Add():
                self._add(link, message)
            case Abort(sequence_id=sequence_id):
                self._engine.abort(link.inner_id(sequence_id))
            case Extend(sequence_id=sequence_id, max_tokens=max_tokens):
                self._engine.extend(link.inner_id(sequence_id), max_tokens)
            case Credit(count=count):
                link.grant(count)
            case Load() | Unload() | Pin() | ForgetPrefixes() | StatsRequest():
                self._start(self._call(link, message))

    def _add(self, link: _Link, add: Add) -> None:
        inner_id = link.inner_id(add.sequence_id)
        if inner_id in link.running:
            link.post(Rejected(message="a sequence with this id is running", sequence_id=add.sequence_id))
            return
        try:
            # Submitted at once, because the next message can abort the sequence.
            stream = self._engine.submit(structs.replace(add, sequence_id=inner_id))
        except EngineUnavailable as error:
            end = Finished(
                sequence_id=add.sequence_id,
                reason="error",
                prompt_tokens=0,
                completion_tokens=0,
                code="engine_unavailable",
                message=str(error),
            )
            link.post(end)
            return
        link.running.add(inner_id)
        self._start(self._pass_on(link, add.sequence_id, stream))

    async def _pass_on(self, link: _Link, sequence_id: str, stream: AsyncIterator[SequenceOutput | Finished]) -> None:
        try:
            async for item in stream:
                renamed = structs.replace(item, sequence_id=sequence_id)
                if isinstance(renamed, Finished):
                    link.post(renamed)
                else:
                    link.post_joined(renamed)
        finally:
            link.running.discard(link.inner_id(sequence_id))

    async def _call(self, link: _Link, message: EngineCall[Any]) -> None:
        # Without an answer, the other server stops waiting.
        with suppress(EngineUnavailable, TimeoutError):
            answer: AdapterState | Stats = await self._engine.call(message, CALL_TIMEOUT_S)
            link.post(structs.replace(answer, call_id=message.call_id))

    async def _beat(self) -> None:
        while True:
            await asyncio.sleep(HEARTBEAT_S)
            for link in list(self._links.values()):
                link.post(Heartbeat())

    def send(self, owner: bytes, message: FromEngine) -> None:
        # Without a high-water mark, a send never waits. The future from zmq.asyncio is therefore already done. The
        # synchronous API would consume the events that tell asyncio of messages to receive.
        sent: Any = self._socket.send_multipart([owner, self._encoder.encode(message)])
        if sent.done() and sent.exception() is not None:
            # ROUTER_MANDATORY reports that the relay is gone, so nobody would read the output of its sequences.
            self._lose(owner)

    def _lose(self, owner: bytes) -> None:
        link = self._links.pop(owner, None)
        if link is not None:
            for sequence_id in link.running:
                self._engine.abort(sequence_id)

    def _start(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work, name="engine-front")
        self._tasks.add(task)
        task.add_done_callback(self._forget)

    def _forget(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("a message of another server failed", exc_info=error)


class _Link:
    """One relay: its credit, and the names of its sequences here."""

    def __init__(self, front: EngineFront, owner: bytes, prefix: str) -> None:
        self.running: set[str] = set()
        self._prefix = prefix
        self._link = GatewayLink(lambda message: front.send(owner, message))
        self.post = self._link.post
        self.post_joined = self._link.post_joined
        self.grant = self._link.grant

    def inner_id(self, sequence_id: str) -> str:
        return f"{self._prefix}{sequence_id}"
