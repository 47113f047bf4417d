"""One gateway's connection to another server's engine, through that server's peer listener."""

from __future__ import annotations

import asyncio
import ssl

from loramux.platform.engine_link.engine_client import EngineUnavailable
from loramux.platform.engine_link.engine_session import NoteEnd
from loramux.platform.replicas.certificates import OwnCertificate, PublishedCertificate, tls_context
from loramux.platform.replicas.framed_connection import FramedConnection

HANDSHAKE_TIMEOUT_S = 5.0


class PeerConnection(FramedConnection):
    """A FramedConnection over TLS. `open` returns once the other server's engine has announced itself."""

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
                await connection.announced()
        except BaseException as error:
            connection.close(frozenset())
            if isinstance(error, TimeoutError):
                raise EngineUnavailable("the engine does not answer") from None
            if isinstance(error, OSError):
                raise EngineUnavailable(f"the connection failed: {error.strerror or error}") from None
            raise
        return connection
