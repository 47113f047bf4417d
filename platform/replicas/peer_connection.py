"""One gateway's connection to another server's engine, through that server's peer listener."""

from __future__ import annotations

import asyncio
import ssl

import msgspec

from loramux.engine.protocol.messages import PROTOCOL, Add, Credit
from loramux.platform.engine_link.engine_client import EngineUnavailable
from loramux.platform.engine_link.engine_session import INITIAL_CREDIT, EngineSession, NoteEnd
from loramux.platform.replicas.certificates import OwnCertificate, PublishedCertificate, tls_context
from loramux.platform.replicas.frame_link import FrameLink, FrameRefused
from loramux.platform.replicas.peer_answers import check_answer

HANDSHAKE_TIMEOUT_S = 5.0


class PeerConnection(EngineSession):
    """An EngineSession over TLS. `open` returns once the other server's engine has announced itself."""

    def __init__(self, note_end: NoteEnd) -> None:
        super().__init__(note_end)
        self.has_lied = False
        """True if the connection ended because of a message that no engine sends."""
        self._link = FrameLink(self._receive)

    @staticmethod
    async def open(
        host: str,
        port: int,
        own: OwnCertificate,
        certificates: tuple[PublishedCertificate, ...],
        note_end: NoteEnd,
        timeout_s: float,
    ) -> PeerConnection:
        """Connect to the server that owns one of `certificates`. Raises EngineUnavailable."""
        connection = PeerConnection(note_end)
        link = connection._link
        context = tls_context(ssl.PROTOCOL_TLS_CLIENT, own, certificates)
        try:
            async with asyncio.timeout(timeout_s):
                await asyncio.get_running_loop().create_connection(
                    lambda: link, host, port, ssl=context, ssl_handshake_timeout=HANDSHAKE_TIMEOUT_S
                )
                if link.certificate() not in {one.der for one in certificates}:
                    raise EngineUnavailable("another server answers at this address")
                connection._send(Credit(count=INITIAL_CREDIT))
                await asyncio.wait((connection._ready, link.lost), return_when=asyncio.FIRST_COMPLETED)
            if not connection._ready.done():
                raise EngineUnavailable(link.lost.result())
            if connection.info.protocol != PROTOCOL:
                raise EngineUnavailable("the engine runs a different version of loramux")
        except BaseException as error:
            connection.close(frozenset())
            if isinstance(error, TimeoutError):
                raise EngineUnavailable("the engine does not answer") from None
            if isinstance(error, OSError):
                raise EngineUnavailable(f"the connection failed: {error.strerror or error}") from None
            raise
        return connection

    @property
    def reason(self) -> str:
        """Why the connection ended."""
        return self._link.lost.result()

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
