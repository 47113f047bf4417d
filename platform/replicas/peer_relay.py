"""Relays permitted messages from another server to the local engine, and the engine's messages to that server."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any, Protocol

import msgspec
import zmq
import zmq.asyncio
from zmq.utils.monitor import recv_monitor_message

from loramux.engine.protocol.messages import (
    Abort,
    Add,
    Credit,
    Extend,
    Finished,
    Load,
    StatsRequest,
    StepOutput,
    ToEngine,
)
from loramux.platform.engine_link.engine_session import INITIAL_CREDIT
from loramux.platform.replicas.frame_link import FrameLink, FrameRefused

MAX_EARLY_FRAMES = 16
"""Maximum number of frames that can arrive before the other server's certificate has been checked."""
MAX_SEQUENCES = 65_536
"""Maximum number of unfinished sequences per connection."""
DEATH_POLL_S = 0.02
DEATH_WAIT_S = 2.0
"""Longest wait for the supervisor to determine which sequences a dead engine was running, in seconds."""

FromPeer = Add | Extend | Abort | Load | Credit | StatsRequest
"""The messages that another server may send. Only a server's own administrators may pin and unload adapters."""


class RelayedEngine(Protocol):
    """The attributes of the local engine that the listener and its relays use."""

    @property
    def is_ready(self) -> bool: ...

    @property
    def socket_path(self) -> Path: ...

    @property
    def ran_at_death(self) -> frozenset[str]:
        """IDs of the sequences that the last engine was running when it died."""


class _Envelope(msgspec.Struct, frozen=True):
    """The fields of an engine's message that the relay reads."""

    type: str
    sequence_id: str | None = None


class PeerRelay:
    """Connects to the engine on behalf of another server, which the engine treats as one more gateway.

    When the connection ends, the engine ends the connection's sequences. When the engine dies, the other server learns
    which of its sequences were running. Sequences that were still waiting can run elsewhere.

    `accepts` is a union of the messages that the other side may send.
    """

    def __init__(self, context: zmq.asyncio.Context, engine: RelayedEngine, accepts: Any = FromPeer) -> None:
        self._context = context
        self._engine = engine
        self._decoder: msgspec.msgpack.Decoder[ToEngine] = msgspec.msgpack.Decoder(accepts)
        self._envelopes = msgspec.msgpack.Decoder(_Envelope)
        self._encoder = msgspec.msgpack.Encoder()
        self._prompt_tokens: dict[str, int] = {}
        self._credit = 0
        self._socket: zmq.asyncio.Socket | None = None
        self._early_frames: list[bytes] = []
        self._refuses_new = False
        self.link = FrameLink(self._receive)

    @property
    def num_sequences(self) -> int:
        return len(self._prompt_tokens)

    async def run(self) -> str:
        """Relay until either side ends the connection, and return the reason. The caller must check the peer's
        certificate first.
        """
        self._socket = socket = self._context.socket(zmq.DEALER)
        for option in (zmq.SNDHWM, zmq.RCVHWM, zmq.LINGER):
            socket.setsockopt(option, 0)
        monitor = socket.get_monitor_socket(zmq.EVENT_DISCONNECTED)
        socket.connect(f"ipc://{self._engine.socket_path}")
        passing_on = asyncio.create_task(self._pass_on(socket))
        engine_lost = asyncio.ensure_future(recv_monitor_message(monitor))
        try:
            self._receive_early()
            await asyncio.wait((self.link.lost, passing_on, engine_lost), return_when=asyncio.FIRST_COMPLETED)
            if engine_lost.done() and not self.link.lost.done():
                # The socket would send them to the next engine, whose output nobody reads.
                self.refuse_new()
                await self._until_examined()
                passing_on.cancel()
                await self._pass_on_what_arrived(socket)
                self._report_death()
        finally:
            passing_on.cancel()
            engine_lost.cancel()
            socket.disable_monitor()
            monitor.close()
            socket.close()
        self.link.close("the engine stopped")
        return self.link.lost.result()

    def refuse_new(self) -> None:
        """Refuse further sequences, so that the other server runs them elsewhere.

        Sequences that have already arrived still run.
        """
        self._refuses_new = True

    def end(self, reason: str) -> None:
        self.link.close(reason)

    def _receive_early(self) -> None:
        early, self._early_frames = self._early_frames, []
        try:
            for frame in early:
                self._receive(frame)
        except FrameRefused as error:
            self.link.abort(str(error))

    def _receive(self, frame: bytes) -> None:
        if self._socket is None:
            if len(self._early_frames) >= MAX_EARLY_FRAMES:
                raise FrameRefused("it sent too much before its certificate was checked")
            self._early_frames.append(frame)
            return
        try:
            message = self._decoder.decode(frame)
        except msgspec.MsgspecError:
            raise FrameRefused("it sent a malformed message, or one that other servers must not send") from None
        match message:
            case Add(sequence_id=sequence_id) if self._refuses_new:
                self._send_lost(sequence_id, 0, "replica_draining", "the server is stopping")
                return
            case Add(sequence_id=sequence_id, prompt=prompt):
                if sequence_id in self._prompt_tokens or len(self._prompt_tokens) >= MAX_SEQUENCES:
                    raise FrameRefused("it sent too many sequences, or sent one twice")
                self._prompt_tokens[sequence_id] = len(prompt)
            case Credit(count=count):
                self._credit += count
                # Beyond this limit, output for a server that does not read would fill this server's memory.
                if count <= 0 or self._credit > INITIAL_CREDIT:
                    raise FrameRefused("it granted more credit than any gateway does")
            case _:
                pass
        self._socket.send(frame)

    async def _pass_on(self, socket: zmq.asyncio.Socket) -> None:
        while True:
            self._pass_one_on(await socket.recv())
            await self._pass_on_what_arrived(socket)

    def _pass_one_on(self, data: bytes) -> None:
        envelope = self._envelopes.decode(data)
        if envelope.type == StepOutput.__name__:
            self._credit -= 1
        elif envelope.type == Finished.__name__ and envelope.sequence_id is not None:
            self._prompt_tokens.pop(envelope.sequence_id, None)
        self.link.send(data)

    async def _until_examined(self) -> None:
        """Wait until the supervisor has determined which sequences the engine was running."""
        for _ in range(int(DEATH_WAIT_S / DEATH_POLL_S)):
            if not self._engine.is_ready:
                return
            await asyncio.sleep(DEATH_POLL_S)

    async def _pass_on_what_arrived(self, socket: zmq.asyncio.Socket) -> None:
        """Pass on waiting messages without asyncio, which is much faster. The peer's credit bounds their number, but
        not their bytes, so messages that the link has no room for wait here.
        """
        shadow: Any = zmq.Socket.shadow(socket.underlying)
        while True:
            await self.link.writable()
            try:
                self._pass_one_on(shadow.recv(zmq.NOBLOCK))
            except zmq.Again:
                return

    def _report_death(self) -> None:
        """End the peer's sequences. A sequence that never ran gets 0 prompt tokens, so that it can run elsewhere."""
        ran = self._engine.ran_at_death
        for sequence_id, prompt_tokens in self._prompt_tokens.items():
            has_run = sequence_id in ran
            message = f"the engine stopped while this request was {'running' if has_run else 'waiting'}"
            self._send_lost(sequence_id, prompt_tokens if has_run else 0, "engine_unavailable", message)

    def _send_lost(self, sequence_id: str, prompt_tokens: int, code: str, message: str) -> None:
        end = Finished(
            sequence_id=sequence_id,
            reason="error",
            prompt_tokens=prompt_tokens,
            completion_tokens=0,
            code=code,
            message=message,
        )
        self.link.send(self._encoder.encode(end))
