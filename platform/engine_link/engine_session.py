"""The gateway's end of a connection to one engine, independent of the transport."""

from __future__ import annotations

import asyncio
import itertools
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import msgspec
import structlog
from msgspec import structs

from loramux.engine.protocol.messages import (
    Abort,
    AdapterState,
    Add,
    AnswerT,
    Credit,
    EngineCall,
    EngineReady,
    Extend,
    Finished,
    FromEngine,
    Heartbeat,
    Rejected,
    Stats,
    StatsRequest,
    StepOutput,
    ToEngine,
)
from loramux.platform.engine_link.engine_client import EngineUnavailable
from loramux.platform.engine_link.sequence_stream import SequenceStream

INITIAL_CREDIT = 64
"""Maximum number of StepOutput messages in flight."""
CREDIT_BATCH = 16

log = structlog.get_logger()

NoteEnd = Callable[[Add, Finished], None]


@dataclass(frozen=True, slots=True)
class _OpenCall:
    kind: type[AdapterState | Stats]
    answer: asyncio.Future[Any]


class EngineSession(ABC):
    """Sends messages to an engine and dispatches the messages that the engine sends. Subclasses add the transport.

    A subclass sends `Credit(count=INITIAL_CREDIT)` first, passes each received message to `_dispatch`, and calls
    `_end_all` when the engine is gone.
    """

    def __init__(self, note_end: NoteEnd) -> None:
        self._note_end = note_end
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder = msgspec.msgpack.Decoder(FromEngine)
        self._streams: dict[str, SequenceStream] = {}
        self._calls: dict[str, _OpenCall] = {}
        self._call_ids = itertools.count()
        self._num_handled = 0
        self._ready: asyncio.Future[EngineReady] = asyncio.get_running_loop().create_future()

    @abstractmethod
    def _send_bytes(self, data: bytes) -> None:
        """Send one message without waiting."""

    @abstractmethod
    async def wait_lost(self) -> None:
        """Wait until the engine has died, closed the connection, or sent an unreadable message."""

    @abstractmethod
    def close(self, running: frozenset[str]) -> list[Add]:
        """End every stream and call, and free the transport. Return the Add messages of unfinished sequences in
        `running`.
        """

    @property
    def info(self) -> EngineReady:
        return self._ready.result()

    @property
    def open_adds(self) -> dict[str, Add]:
        return {sequence_id: stream.add for sequence_id, stream in self._streams.items()}

    def submit(self, add: Add) -> SequenceStream:
        # A duplicate id would replace the first sequence's stream, which would then never end.
        assert add.sequence_id not in self._streams
        stream = self._streams[add.sequence_id] = SequenceStream(add)
        self._send(add)
        return stream

    def abort(self, sequence_id: str) -> None:
        if sequence_id in self._streams:
            self._send(Abort(sequence_id=sequence_id))

    def extend(self, sequence_id: str, max_tokens: int) -> None:
        stream = self._streams.get(sequence_id)
        if stream is not None:
            stream.max_tokens = max(stream.max_tokens, max_tokens)
            self._send(Extend(sequence_id=sequence_id, max_tokens=max_tokens))

    async def call(self, message: EngineCall[AnswerT], timeout_s: float) -> AnswerT:
        call_id = str(next(self._call_ids))
        kind: type[AdapterState | Stats] = Stats if isinstance(message, StatsRequest) else AdapterState
        call = self._calls[call_id] = _OpenCall(kind, asyncio.get_running_loop().create_future())
        self._send(structs.replace(message, call_id=call_id))
        try:
            async with asyncio.timeout(timeout_s):
                answer: AnswerT = await call.answer
        finally:
            self._calls.pop(call_id, None)
        return answer

    def _end_all(self, running: frozenset[str]) -> list[Add]:
        for sequence_id, stream in self._streams.items():
            stream.fail(was_running=sequence_id in running)
        ended = [stream.add for sequence_id, stream in self._streams.items() if sequence_id in running]
        self._streams.clear()
        for call in self._calls.values():
            if not call.answer.done():
                call.answer.set_exception(EngineUnavailable("the engine stopped"))
        self._calls.clear()
        return ended

    def _send(self, message: ToEngine | EngineCall[Any]) -> None:
        self._send_bytes(self._encoder.encode(message))

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
                if call is not None and isinstance(message, call.kind) and not call.answer.done():
                    call.answer.set_result(message)
            case Rejected():
                # This is a bug in the gateway. Clients' mistakes are reported in Finished messages.
                log.error("the engine rejected a message", sequence_id=message.sequence_id, reason=message.message)
            case Heartbeat():
                return
            case EngineReady():
                if not self._ready.done():
                    self._ready.set_result(message)
