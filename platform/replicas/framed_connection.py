"""One gateway's connection to an engine that another server relays, independent of what carries the frames."""

from __future__ import annotations

import asyncio

import msgspec

from loramux.engine.protocol.messages import PROTOCOL, Add, Credit
from loramux.platform.engine_link.engine_client import EngineUnavailable
from loramux.platform.engine_link.engine_session import INITIAL_CREDIT, EngineSession, NoteEnd
from loramux.platform.engine_link.sequence_stream import SequenceStream, refused_stream
from loramux.platform.replicas.frame_link import MAX_UNSENT_BYTES, FrameLink, FrameRefused
from loramux.platform.replicas.peer_answers import check_answer

MAX_WAITING_BYTES = MAX_UNSENT_BYTES // 2
"""Number of unsent bytes above which a sequence is refused, so that it runs elsewhere or is tried again. The link keeps
room for a sequence of any size and for other messages, because its loss would end the sequences of all tenants.
"""


class FramedConnection(EngineSession):
    """An EngineSession over a FrameLink. Subclasses connect the link and then await `announced`.

    Each message is checked, because tenants pay for what it reports.
    """

    def __init__(self, note_end: NoteEnd) -> None:
        super().__init__(note_end)
        self.has_lied = False
        """True if the connection ended because of a message that no engine sends."""
        self._link = FrameLink(self._receive)

    @property
    def reason(self) -> str:
        """Why the connection ended."""
        return self._link.lost.result()

    async def announced(self) -> None:
        """Wait until the engine has announced itself. Raises EngineUnavailable."""
        self._send(Credit(count=INITIAL_CREDIT))
        await asyncio.wait((self._ready, self._link.lost), return_when=asyncio.FIRST_COMPLETED)
        if not self._ready.done():
            raise EngineUnavailable(self._link.lost.result())
        if self.info.protocol != PROTOCOL:
            raise EngineUnavailable("the engine runs a different version of loramux")

    def submit(self, add: Add) -> SequenceStream:
        if self._link.num_unsent_bytes > MAX_WAITING_BYTES:
            return refused_stream(add, "overloaded", "the connection to the server has no room for more requests")
        return super().submit(add)

    async def wait_lost(self) -> None:
        await asyncio.wait((self._link.lost,))

    def close(self, running: frozenset[str]) -> list[Add]:
        self._link.abort("this server closed the connection")
        return self._end_all(running)

    def _send_bytes(self, data: bytes) -> None:
        self._link.send(data)

    def _receive(self, frame: bytes) -> None:
        try:
            message = self._decoder.decode(frame)
            check_answer(message, self._streams)
        except msgspec.MsgspecError:
            self.has_lied = True
            raise FrameRefused("it sent an unreadable message") from None
        except FrameRefused:
            self.has_lied = True
            raise
        self._dispatch(message)
