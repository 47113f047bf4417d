"""A scripted engine behind a Unix socket, as an engine process is reached."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Iterable
from pathlib import Path

import msgspec
import zmq.asyncio

from loramux.engine.protocol.messages import (
    Abort,
    Add,
    Credit,
    Extend,
    Finished,
    ForgetPrefixes,
    FromEngine,
    Load,
    Pin,
    StatsRequest,
    StepOutput,
    ToEngine,
    Unload,
)
from tests.platform.scripted_engine import ScriptedEngine


class ServedEngine:
    """Serves `engine` at `socket_path`. `die` breaks every connection, as the death of an engine process does.

    `rewrite` replaces each message to a gateway by the messages that it returns. With `takes_pins`, gateways can pin
    and unload adapters.
    """

    def __init__(self, engine: ScriptedEngine, socket_path: Path, takes_pins: bool = False) -> None:
        self.engine = engine
        self._takes_pins = takes_pins
        self.socket_path = socket_path
        self.ran_at_death: frozenset[str] = frozenset()
        self.rewrite: Callable[[FromEngine], Iterable[FromEngine]] = lambda message: (message,)
        self._decoder = msgspec.msgpack.Decoder(ToEngine)
        self._encoder = msgspec.msgpack.Encoder()
        self._context = zmq.asyncio.Context()
        self._known: set[bytes] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._open()

    @property
    def is_ready(self) -> bool:
        return self.engine.is_ready

    def die(self, ran: frozenset[str] = frozenset()) -> None:
        self.ran_at_death = ran
        self._close()
        self.engine.die()

    def revive(self) -> None:
        self.engine.revive()
        self._open()

    def close(self) -> None:
        self._close()
        self._context.destroy(linger=0)

    def _open(self) -> None:
        self._socket = self._context.socket(zmq.ROUTER)
        self._socket.bind(f"ipc://{self.socket_path}")
        self._start(self._serve())

    def _close(self) -> None:
        for task in self._tasks:
            task.cancel()
        self._socket.close(linger=0)
        self._known.clear()

    def _start(self, work: object) -> None:
        task: asyncio.Task[None] = asyncio.create_task(work)  # type: ignore[arg-type]
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _serve(self) -> None:
        while True:
            owner, data = await self._socket.recv_multipart()
            if owner not in self._known:
                self._known.add(owner)
                assert self.engine.info is not None
                self._send(owner, self.engine.info)
            message = self._decoder.decode(data)
            match message:
                case Add():
                    self._start(self._run(owner, message))
                case Abort(sequence_id=sequence_id):
                    self.engine.abort(sequence_id)
                case Extend(sequence_id=sequence_id, max_tokens=max_tokens):
                    self.engine.extend(sequence_id, max_tokens)
                case Unload() | Pin() | ForgetPrefixes() if not self._takes_pins:
                    raise AssertionError("a peer must not unload, pin or delete")
                case Load() | Unload() | Pin() | ForgetPrefixes():
                    state = await self.engine.call(message, 1.0)
                    self._send(owner, msgspec.structs.replace(state, call_id=message.call_id))
                case StatsRequest():
                    stats = await self.engine.call(message, 1.0)
                    self._send(owner, msgspec.structs.replace(stats, call_id=message.call_id))
                case Credit():
                    pass

    async def _run(self, owner: bytes, add: Add) -> None:
        async for item in self.engine.submit(add):
            self._send(owner, item if isinstance(item, Finished) else StepOutput(outputs=(item,)))

    def _send(self, owner: bytes, message: FromEngine) -> None:
        for sent in self.rewrite(message):
            with contextlib.suppress(zmq.ZMQError):
                self._socket.send_multipart([owner, self._encoder.encode(sent)])
