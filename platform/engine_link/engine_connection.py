"""One gateway's connection to one engine process: messages out, streams and answers in."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import structlog
import zmq
import zmq.asyncio
from zmq.utils.monitor import recv_monitor_message

from loramux.engine.messages import (
    PROTOCOL,
    Abort,
    AdapterState,
    Add,
    Credit,
    EngineReady,
    Extend,
    Finished,
    FromEngine,
    Heartbeat,
    Load,
    Pin,
    Rejected,
    SequenceOutput,
    Stats,
    StatsRequest,
    StepOutput,
    ToEngine,
    Unload,
)
from loramux.platform.engine_link.engine_client import EngineUnavailable

INITIAL_CREDIT = 64
"""Maximum number of StepOutput messages in flight."""
CREDIT_BATCH = 16
READY_TIMEOUT_S = 30.0

log = structlog.get_logger()

Answer = TypeVar("Answer", AdapterState, Stats)
NoteEnd = Callable[[Add, Finished], None]


class SequenceStream:
    """The output of one sequence. An unread stream buffers its own tokens and does not delay other streams."""

    def __init__(self, add: Add) -> None:
        self.add = add
        self._items: asyncio.Queue[SequenceOutput | Finished] = asyncio.Queue()
        self._num_received = 0
        self._is_ended = False

    def put(self, item: SequenceOutput | Finished) -> None:
        if isinstance(item, SequenceOutput):
            self._num_received += len(item.token_ids)
        self._items.put_nowait(item)

    def fail(self, was_running: bool) -> None:
        """End a stream whose engine is gone. Received tokens are billed. A sequence that never ran costs nothing."""
        has_run = was_running or self._num_received > 0
        self.put(
            Finished(
                sequence_id=self.add.sequence_id,
                reason="error",
                prompt_tokens=len(self.add.prompt) if has_run else 0,
                completion_tokens=self._num_received,
                code="engine_unavailable",
                message=f"the engine stopped while this request was {'running' if has_run else 'waiting'}",
            )
        )

    def __aiter__(self) -> AsyncIterator[SequenceOutput | Finished]:
        return self

    async def __anext__(self) -> SequenceOutput | Finished:
        if self._is_ended:
            raise StopAsyncIteration
        item = await self._items.get()
        self._is_ended = isinstance(item, Finished)
        return item


def refused_stream(add: Add) -> SequenceStream:
    """A stream that refuses a sequence because engines died while running it."""
    stream = SequenceStream(add)
    stream.put(
        Finished(
            sequence_id=add.sequence_id,
            reason="error",
            prompt_tokens=0,
            completion_tokens=0,
            code="request_excluded",
            message="the engine stopped twice while running this request, so the request is refused for a while",
        )
    )
    return stream


class EngineConnection:
    """A DEALER socket to an engine. `open` returns once the engine has announced itself."""

    def __init__(
        self, socket: zmq.asyncio.Socket, context: zmq.asyncio.Context, monitor: zmq.asyncio.Socket, note_end: NoteEnd
    ) -> None:
        self._socket = socket
        self._context = context
        self._monitor = monitor
        self._note_end = note_end
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder = msgspec.msgpack.Decoder(FromEngine)
        self._streams: dict[str, SequenceStream] = {}
        self._calls: dict[str, asyncio.Future[AdapterState | Stats]] = {}
        self._call_ids = itertools.count()
        self._num_handled = 0
        self._ready: asyncio.Future[EngineReady] = asyncio.get_running_loop().create_future()
        self._reader = asyncio.create_task(self._read(), name="engine-reader")

    @staticmethod
    async def open(path: Path, note_end: NoteEnd, timeout_s: float = READY_TIMEOUT_S) -> EngineConnection:
        """Connect to the engine that listens at `path`.

        Raises EngineUnavailable if the engine does not answer or its answer cannot be decoded.
        """
        context = zmq.asyncio.Context()
        socket = context.socket(zmq.DEALER)
        socket.setsockopt(zmq.SNDHWM, 0)
        socket.setsockopt(zmq.RCVHWM, 0)
        socket.setsockopt(zmq.LINGER, 0)
        monitor = socket.get_monitor_socket(zmq.EVENT_DISCONNECTED)
        socket.connect(f"ipc://{path}")
        connection = EngineConnection(socket, context, monitor, note_end)
        connection._send(Credit(count=INITIAL_CREDIT))
        try:
            async with asyncio.timeout(timeout_s):
                await _first_of(connection._ready, connection._reader)
            if not connection._ready.done() or connection.info.protocol != PROTOCOL:
                raise EngineUnavailable("the engine runs a different version of loramux")
        except BaseException as error:
            connection.close(frozenset())
            if isinstance(error, TimeoutError):
                raise EngineUnavailable("the engine does not answer") from None
            raise
        return connection

    @property
    def info(self) -> EngineReady:
        return self._ready.result()

    @property
    def open_adds(self) -> dict[str, Add]:
        return {sequence_id: stream.add for sequence_id, stream in self._streams.items()}

    async def wait_lost(self) -> None:
        """Return once the engine has died, closed the connection, or sent an unreadable message."""
        closed = asyncio.ensure_future(recv_monitor_message(self._monitor))
        try:
            await _first_of(closed, self._reader)
        finally:
            closed.cancel()

    def submit(self, add: Add) -> SequenceStream:
        # The engine would reject a duplicate id, and the new stream would never end.
        assert add.sequence_id not in self._streams
        stream = self._streams[add.sequence_id] = SequenceStream(add)
        self._send(add)
        return stream

    def abort(self, sequence_id: str, keep: int | None) -> None:
        if sequence_id in self._streams:
            self._send(Abort(sequence_id=sequence_id, keep=keep))

    def extend(self, sequence_id: str, max_tokens: int) -> None:
        if sequence_id in self._streams:
            self._send(Extend(sequence_id=sequence_id, max_tokens=max_tokens))

    async def load(self, digest: str, timeout_s: float) -> AdapterState:
        call_id = str(next(self._call_ids))
        return await self._call(AdapterState, Load(call_id=call_id, digest=digest), call_id, timeout_s)

    async def unload(self, digest: str, timeout_s: float) -> AdapterState:
        call_id = str(next(self._call_ids))
        return await self._call(AdapterState, Unload(call_id=call_id, digest=digest), call_id, timeout_s)

    async def pin(self, digest: str, is_pinned: bool, timeout_s: float) -> AdapterState:
        call_id = str(next(self._call_ids))
        pin = Pin(call_id=call_id, digest=digest, is_pinned=is_pinned)
        return await self._call(AdapterState, pin, call_id, timeout_s)

    async def stats(self, timeout_s: float, with_tiers: bool = False) -> Stats:
        call_id = str(next(self._call_ids))
        return await self._call(Stats, StatsRequest(call_id=call_id, with_tiers=with_tiers), call_id, timeout_s)

    def close(self, running: frozenset[str]) -> list[Add]:
        """End every stream and call, and free the socket. Return the unfinished sequences among `running`."""
        self._reader.cancel()
        self._take_what_arrived()
        for sequence_id, stream in self._streams.items():
            stream.fail(was_running=sequence_id in running)
        ended = [stream.add for sequence_id, stream in self._streams.items() if sequence_id in running]
        self._streams.clear()
        for call in self._calls.values():
            if not call.done():
                call.set_exception(EngineUnavailable("the engine stopped"))
        self._calls.clear()
        self._socket.disable_monitor()
        self._monitor.close()
        self._socket.close()
        self._context.term()
        return ended

    async def _call(self, kind: type[Answer], message: ToEngine, call_id: str, timeout_s: float) -> Answer:
        call: asyncio.Future[AdapterState | Stats] = asyncio.get_running_loop().create_future()
        self._calls[call_id] = call
        self._send(message)
        try:
            answer = await asyncio.wait_for(call, timeout_s)
        finally:
            self._calls.pop(call_id, None)
        assert isinstance(answer, kind)
        return answer

    def _send(self, message: ToEngine) -> None:
        # Without a high-water mark, a send never waits. The future from zmq.asyncio is therefore already done.
        self._socket.send(self._encoder.encode(message))

    async def _read(self) -> None:
        """Dispatch messages until one cannot be decoded."""
        while True:
            data = await self._socket.recv()
            try:
                message = self._decoder.decode(data)
            except msgspec.MsgspecError as error:
                log.error("the engine sent an unreadable message", reason=str(error))
                return
            self._dispatch(message)

    def _take_what_arrived(self) -> None:
        """Handle messages that already arrived, so that their tokens are billed and finished sequences succeed."""
        socket: Any = zmq.Socket.shadow(self._socket.underlying)
        while True:
            try:
                self._dispatch(self._decoder.decode(socket.recv(zmq.NOBLOCK)))
            except (zmq.Again, msgspec.MsgspecError):
                return

    def _dispatch(self, message: FromEngine) -> None:
        match message:
            case StepOutput(outputs=outputs):
                for output in outputs:
                    stream = self._streams.get(output.sequence_id)
                    if stream is not None:
                        stream.put(output)
                self._num_handled += 1
                if self._num_handled % CREDIT_BATCH == 0:
                    self._send(Credit(count=CREDIT_BATCH))
            case Finished(sequence_id=sequence_id):
                stream = self._streams.pop(sequence_id, None)
                if stream is not None:
                    self._note_end(stream.add, message)
                    stream.put(message)
            case AdapterState(call_id=call_id) | Stats(call_id=call_id):
                call = self._calls.get(call_id)
                if call is not None and not call.done():
                    call.set_result(message)
            case Rejected():
                # This is a bug in the gateway. Clients' mistakes are reported in Finished messages.
                log.error("the engine rejected a message", sequence_id=message.sequence_id, reason=message.message)
            case Heartbeat():
                return
            case EngineReady():
                if not self._ready.done():
                    self._ready.set_result(message)


async def _first_of(*futures: asyncio.Future[Any]) -> None:
    await asyncio.wait(futures, return_when=asyncio.FIRST_COMPLETED)
