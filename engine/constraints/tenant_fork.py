"""The engine's end of the connection to one tenant's fork."""

from __future__ import annotations

import select
import socket
from collections import deque
from collections.abc import Iterator

import msgspec

from loramux.engine.constraints.grammar import Grammar
from loramux.engine.constraints.grammar_messages import LENGTH, MAX_ANSWER_BYTES, Follow, Followed, Forget, frame
from loramux.engine.constraints.process_link import ProcessLink

_RECEIVE_BYTES = 1 << 18
_BEGUN = -1
"""Number in the first message of a fork, which is not an answer."""


class TenantFork:
    """Sends and receives without blocking. `send` and `receive` raise OSError if the fork has ended.

    A fork has read a tenant's grammars, so its answers are not trusted. `receive` also raises OSError for an answer
    that is malformed, too long or not the one that is due.
    """

    def __init__(self, isolation_key: bytes, end: socket.socket, process: ProcessLink) -> None:
        self.isolation_key = isolation_key
        self.end = end
        self.process = process
        self.has_begun = False
        """True once the fork has sent its first message, which is not an answer."""
        self.grammars: dict[int, Grammar] = {}
        """The grammars that the fork follows, by number."""
        self.unanswered: deque[int] = deque()
        """Numbers of the grammars whose masks the fork still has to compute, in order."""
        self.begun_s = self.idle_since_s = 0.0
        self.events = select.EPOLLIN
        """The events that the epoll object reports."""
        self._unsent = bytearray()
        self._received = bytearray()
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder = msgspec.msgpack.Decoder(Followed)
        end.setblocking(False)

    @property
    def has_unsent(self) -> bool:
        return bool(self._unsent)

    def send(self, message: Follow | Forget) -> None:
        self._unsent += frame(self._encoder.encode(message))
        self.flush()
        if isinstance(message, Follow):
            self.unanswered.append(message.number)

    def flush(self) -> None:
        """Send as much as the socket takes."""
        while self._unsent:
            try:
                del self._unsent[: self.end.send(self._unsent)]
            except BlockingIOError:
                return

    def receive(self) -> Iterator[Followed]:
        """Yield the answers that have arrived."""
        while True:
            try:
                received = self.end.recv(_RECEIVE_BYTES)
            except BlockingIOError:
                return
            if not received:
                raise ConnectionResetError
            self._received += received
            while (answer := self._next()) is not None:
                due = _BEGUN if not self.has_begun else self.unanswered[0] if self.unanswered else None
                if answer.number != due:
                    raise ConnectionAbortedError("the fork has sent an answer that is not due")
                if self.has_begun:
                    self.unanswered.popleft()
                self.has_begun = True
                yield answer

    def _next(self) -> Followed | None:
        if len(self._received) < LENGTH.size:
            return None
        (num_bytes,) = LENGTH.unpack_from(self._received)
        if num_bytes > MAX_ANSWER_BYTES:
            raise ConnectionAbortedError("the fork has sent an answer that is too long")
        end = LENGTH.size + num_bytes
        if len(self._received) < end:
            return None
        try:
            answer = self._decoder.decode(self._received[LENGTH.size : end])
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            raise ConnectionAbortedError("the fork has sent a malformed answer") from error
        del self._received[:end]
        return answer
