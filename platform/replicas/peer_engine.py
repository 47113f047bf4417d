"""Client of another server's engine."""

from __future__ import annotations

import time
from collections.abc import Callable

import structlog

from loramux.platform.engine_link.crash_strikes import CrashStrikes
from loramux.platform.engine_link.engine_client import EngineUnavailable
from loramux.platform.engine_link.engine_session import EngineSession
from loramux.platform.engine_link.followed_engine import FollowedEngine, Joining, JoinRefused
from loramux.platform.replicas.certificates import OwnCertificate
from loramux.platform.replicas.peer_connection import PeerConnection
from loramux.platform.replicas.records import base_fingerprint
from loramux.platform.replicas.replica_book import Peer

DISTRUST_S = 60.0
"""How long a server that has sent a message that no engine sends is not used, in seconds."""

log = structlog.get_logger()


class PeerEngine(FollowedEngine):
    """Keeps one connection to the server that `peer` describes. Assign a new `peer` when the server's row changes.

    The base in the server's row is compared with the engine's own announcement, because the row is only a claim.
    """

    def __init__(
        self,
        peer: Peer,
        own: Callable[[], OwnCertificate],
        count_refusal: Callable[[str], None] = lambda reason: None,
        joining: Joining | None = None,
        clock: Callable[[], float] = time.monotonic,
        strikes: CrashStrikes | None = None,
    ) -> None:
        place = f"replica {peer.row.id} at {peer.row.address}"
        super().__init__(place, joining if joining is not None else Joining(), clock, strikes)
        self.peer = peer
        self._own = own
        self._clock = clock
        self._count_refusal = count_refusal
        self._distrusted_until_s = 0.0

    async def _join(self) -> EngineSession:
        if self._clock() < self._distrusted_until_s:
            raise JoinRefused(f"it sent messages that no engine sends ({self._place})")
        row = self.peer.row
        host, port = row.host_and_port
        try:
            connection = await PeerConnection.open(
                host, port, self._own(), self.peer.certificates, self._note_end, self._joining.answer_timeout_s
            )
        except EngineUnavailable as error:
            raise JoinRefused(f"{error} ({self._place})") from error
        base_id = connection.info.base_sha256
        if base_fingerprint(connection.info) != row.base or base_id != row.base_id:
            connection.close(frozenset())
            raise JoinRefused(f"its engine serves a different base than its server claims ({self._place})")
        return connection

    def _log_loss(self) -> None:
        connection = self._connection
        if isinstance(connection, PeerConnection) and connection.has_lied:
            self._distrusted_until_s = self._clock() + DISTRUST_S
            log.warning("a replica is not used for a while", replica=self.peer.row.id, reason=connection.reason)
            self._count_refusal("answers")
            return
        # This is not an error. Operators restart servers at any time, and requests then run elsewhere.
        log.info("a replica is gone", replica=self.peer.row.id, address=self.peer.row.address)
