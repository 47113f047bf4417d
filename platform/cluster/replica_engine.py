"""Client of a replica's engine."""

from __future__ import annotations

from collections.abc import Callable

import structlog

from loramux.platform.cluster.replica_calls import ReplicaCalls
from loramux.platform.cluster.replica_report import ReplicaIdentity
from loramux.platform.cluster.tunnel_connection import TunnelConnection
from loramux.platform.engine_link.crash_strikes import CrashStrikes
from loramux.platform.engine_link.engine_client import EngineUnavailable
from loramux.platform.engine_link.engine_session import EngineSession
from loramux.platform.engine_link.followed_engine import FollowedEngine, Joining, JoinRefused
from loramux.platform.replicas.framed_connection import FramedConnection
from loramux.platform.replicas.records import base_fingerprint

ANSWER_TIMEOUT_S = 15.0
"""Longest wait for a replica to announce its engine, in seconds. A busy machine delays the cluster's calls."""

log = structlog.get_logger()


class ReplicaEngine(FollowedEngine):
    """Keeps one connection to a replica. When its engine has been restarted, it connects again."""

    def __init__(
        self,
        calls: ReplicaCalls,
        replica_id: str,
        identity: ReplicaIdentity,
        count_refusal: Callable[[str], None],
        clock: Callable[[], float],
        strikes: CrashStrikes,
    ) -> None:
        super().__init__(f"replica {replica_id}", Joining(answer_timeout_s=ANSWER_TIMEOUT_S), clock, strikes)
        self._calls = calls
        self._replica_id = replica_id
        self._identity = identity
        self._count_refusal = count_refusal

    @property
    def num_sequences(self) -> int:
        """Number of unfinished sequences that this gateway has sent to the replica."""
        return 0 if self._connection is None else len(self._connection.open_adds)

    async def _join(self) -> EngineSession:
        try:
            connection = await TunnelConnection.open(
                self._calls, self._replica_id, self._note_end, self._joining.answer_timeout_s
            )
        except EngineUnavailable as error:
            raise JoinRefused(f"{error} ({self._place})") from error
        if base_fingerprint(connection.info) != self._identity.base:
            connection.close(frozenset())
            raise JoinRefused(f"its engine serves a different base than it reports ({self._place})")
        return connection

    def _log_loss(self) -> None:
        connection = self._connection
        if isinstance(connection, FramedConnection) and connection.has_lied:
            log.warning("a replica sent a message that no engine sends", place=self._place, reason=connection.reason)
            self._count_refusal("answers")
            return
        log.info("a replica is gone", place=self._place)
