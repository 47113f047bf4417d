"""The EngineClient of a gateway without an engine of its own: calls that concern no sequence go to the replicas."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from typing import cast

from loramux.engine.protocol.messages import (
    AdapterState,
    Add,
    AnswerT,
    EngineCall,
    EngineReady,
    Finished,
    Load,
    SequenceOutput,
    Stats,
    StatsRequest,
)
from loramux.platform.base_draw import BaseOrder
from loramux.platform.cluster.cluster_stats import ClusterStats
from loramux.platform.engine_link.engine_client import EngineClient, EngineUnavailable
from loramux.platform.routing.rendezvous import RendezvousOrder
from loramux.platform.routing.views import digest_prefix

NO_ENGINE_ID = "cluster"
"""The identifier that stands for the engine that a gateway of a cluster lacks. No replica has it."""
NO_REPLICA = "no replica of the cluster is ready"


class ClusterEngine:
    """Takes the place of the local engine in a RoutedEngine. It never runs a sequence.

    `call` sends a Load to the replica that is the first home of the adapter, and an Unload or a Pin to every replica. A
    StatsRequest is answered with the sum over the replicas.
    """

    def __init__(self) -> None:
        self.stats = ClusterStats()
        self._engines: Mapping[str, EngineClient] = {}
        self._order = RendezvousOrder()
        self._info: EngineReady | None = None
        self._trouble: str | None = NO_REPLICA
        self._is_shown = asyncio.Event()

    def show(self, engines: Mapping[str, EngineClient], trouble: str | None) -> None:
        """Replace the ready replicas. `trouble` says, in one sentence, why there is none."""
        self._engines = engines
        self._order.set_replicas(engines)
        self._info = next((engine.info for engine in engines.values() if engine.info is not None), self._info)
        self._trouble = None if engines else trouble or NO_REPLICA
        if engines:
            self._is_shown.set()

    async def shown(self) -> None:
        """Wait until a replica has been ready."""
        await self._is_shown.wait()

    @property
    def info(self) -> EngineReady | None:
        return self._info

    @property
    def is_ready(self) -> bool:
        """Always false, so that a router never sends a sequence here."""
        return False

    @property
    def is_live(self) -> bool:
        """Always true, because the cluster watches its replicas."""
        return True

    @property
    def trouble(self) -> str | None:
        is_ready = any(engine.is_ready for engine in self._engines.values())
        return None if is_ready else self._trouble or NO_REPLICA

    def submit(self, add: Add, order: BaseOrder | None = None) -> AsyncIterator[SequenceOutput | Finished]:
        raise EngineUnavailable(NO_REPLICA)

    def abort(self, sequence_id: str) -> None: ...

    def extend(self, sequence_id: str, max_tokens: int) -> None: ...

    async def call(self, message: EngineCall[AnswerT], timeout_s: float) -> AnswerT:
        engines = dict(self._engines)
        if not engines:
            raise EngineUnavailable(NO_REPLICA)
        if isinstance(message, Load):
            home = self._order.order(digest_prefix(message.digest))[0]
            return cast(AnswerT, await engines[home].call(message, timeout_s))
        answers = await asyncio.gather(
            *(engine.call(message, timeout_s) for engine in engines.values()), return_exceptions=True
        )
        for answer in answers:
            is_silent = isinstance(answer, EngineUnavailable | TimeoutError)
            if isinstance(answer, BaseException) and not (is_silent and isinstance(message, StatsRequest)):
                raise answer
        if isinstance(message, StatsRequest):
            return cast(AnswerT, self._sum(dict(zip(engines, answers, strict=True))))
        states = cast("list[AdapterState]", answers)
        return cast(AnswerT, next((state for state in states if state.state == "failed"), states[0]))

    async def close(self) -> None: ...

    def _sum(self, answers: Mapping[str, object]) -> Stats:
        for replica_id, answer in answers.items():
            if isinstance(answer, Stats):
                self.stats.note(replica_id, answer)
        total = self.stats.total(answers)
        if total is None:
            raise EngineUnavailable(NO_REPLICA)
        return total
