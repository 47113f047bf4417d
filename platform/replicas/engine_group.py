"""The EngineClient of several engines, for calls that concern no sequence."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping
from typing import cast

from msgspec import structs

from loramux.engine.adapters.adapter_changes import AdapterChanges, unseen
from loramux.engine.protocol.messages import (
    AdapterChange,
    AdapterState,
    Add,
    AnswerT,
    EngineCall,
    EngineReady,
    Finished,
    ForgetPrefixes,
    Load,
    SequenceOutput,
    Stats,
    StatsRequest,
    Unload,
)
from loramux.platform.base_draw import BaseOrder
from loramux.platform.engine_link.engine_client import EngineClient, EngineUnavailable
from loramux.platform.replicas.summed_stats import SummedStats
from loramux.platform.routing.rendezvous import RendezvousOrder
from loramux.platform.routing.views import digest_prefix

NO_ENGINE_ID = "group"
"""The identifier that stands for the local engine where a RoutedEngine has a group instead. No engine has it."""


class EngineGroup:
    """Takes the place of the local engine in a RoutedEngine. It never runs a sequence.

    `call` sends a Load to an engine that holds the adapter or to the first home of the adapter, and an Unload, a Pin or
    a ForgetPrefixes to every ready engine. If an engine is not ready, an Unload with `is_purge` and a ForgetPrefixes
    then raise EngineUnavailable, because a replica that cannot be reached keeps its pages. A StatsRequest is answered
    with the sum over the engines. Its changes are those of all engines. An adapter that one engine evicts while another
    holds it counts as held.

    `none_ready` says in one sentence that no engine is ready. `note_resident` receives an engine's identifier and the
    digest of an adapter that the engine has just loaded. With `shares_disk`, all engines have the same disk tier.
    """

    def __init__(
        self,
        none_ready: str,
        note_resident: Callable[[str, str], None] = lambda name, digest: None,
        shares_disk: bool = False,
    ) -> None:
        self.stats = SummedStats(shares_disk)
        self._none_ready = none_ready
        self._note_resident = note_resident
        self.engines: Mapping[str, EngineClient] = {}
        """The engines that were shown last."""
        self._order = RendezvousOrder()
        self.info: EngineReady | None = None
        self._trouble: str | None = None
        self._is_shown = asyncio.Event()
        self._changes = AdapterChanges()
        self._seen: dict[str, int] = {}

    def show(self, engines: Mapping[str, EngineClient], trouble: str | None) -> None:
        """Replace the engines. `trouble` says, in one sentence, why none is ready."""
        self.engines = engines
        self._order.set_replicas(engines)
        self.info = next((engine.info for engine in engines.values() if engine.info is not None), self.info)
        self._trouble = trouble
        if any(engine.is_ready for engine in engines.values()):
            self._is_shown.set()

    async def shown(self) -> None:
        """Wait until an engine has been ready."""
        await self._is_shown.wait()

    @property
    def is_ready(self) -> bool:
        """Always false, so that a router never sends a sequence here."""
        return False

    @property
    def is_own_ready(self) -> bool:
        return bool(self._ready())

    @property
    def is_live(self) -> bool:
        return all(engine.is_live for engine in self.engines.values())

    @property
    def trouble(self) -> str | None:
        return None if self._ready() else self._trouble or self._none_ready

    def submit(self, add: Add, order: BaseOrder | None = None) -> AsyncIterator[SequenceOutput | Finished]:
        raise EngineUnavailable(self._none_ready)

    def abort(self, sequence_id: str) -> None: ...

    def extend(self, sequence_id: str, max_tokens: int) -> None: ...

    async def call(self, message: EngineCall[AnswerT], timeout_s: float) -> AnswerT:
        engines = self._ready()
        if not engines:
            raise EngineUnavailable(self._none_ready)
        if isinstance(message, Load):
            return cast(AnswerT, await self._load(engines, message, timeout_s))
        if isinstance(message, StatsRequest):
            return cast(AnswerT, await self._sum(engines, message, timeout_s))
        answers = await asyncio.gather(*(engine.call(message, timeout_s) for engine in engines.values()))
        if len(engines) < len(self.engines) and _is_purge(message):
            raise EngineUnavailable("an engine is not ready, so it may still hold purged data")
        states = cast("list[AdapterState]", answers)
        return cast(AnswerT, next((state for state in states if state.state == "failed"), states[0]))

    async def close(self) -> None: ...

    def _ready(self) -> dict[str, EngineClient]:
        return {name: engine for name, engine in self.engines.items() if engine.is_ready}

    async def _load(self, engines: Mapping[str, EngineClient], message: Load, timeout_s: float) -> AdapterState:
        homes = [name for name in self._order.order(digest_prefix(message.digest)) if name in engines]
        name = next((name for name in homes if self.stats.holds(name, message.digest)), homes[0])
        state = await engines[name].call(message, timeout_s)
        if state.state == "resident":
            self._note_resident(name, message.digest)
        return state

    async def _sum(self, engines: Mapping[str, EngineClient], message: StatsRequest, timeout_s: float) -> Stats:
        """Add the answers up. An engine that does not answer counts as it last answered."""
        asked = {name: self._question(name, message) for name in engines}

        async def ask(name: str, question: StatsRequest) -> Stats | None:
            try:
                answer = await engines[name].call(question, timeout_s)
            except (EngineUnavailable, TimeoutError):
                return None
            # Noted at once, because an engine's answers must be noted in order: a lower count means a restart.
            self.stats.note(name, answer)
            return answer

        answers = await asyncio.gather(*(ask(name, question) for name, question in asked.items()))
        answered = {name: answer for name, answer in zip(asked, answers, strict=True) if answer is not None}
        total = self.stats.total(engines)
        if total is None:
            raise EngineUnavailable(self._none_ready)
        if message.changes_after is None:
            return total
        self._merge_changes(answered)
        return structs.replace(total, changes=self._changes.after(message.changes_after))

    def _question(self, name: str, message: StatsRequest) -> StatsRequest:
        if message.changes_after is None:
            return message
        # Engines number their changes independently of each other.
        return structs.replace(message, changes_after=self._seen.get(name, 0))

    def _merge_changes(self, answered: Mapping[str, Stats]) -> None:
        held = {name: {adapter.digest for adapter in stats.adapters} for name, stats in answered.items()}
        for name, stats in answered.items():
            new = unseen(stats.changes, self._seen.get(name, 0))
            for change in new:
                if not (change.kind == "evicted" and _is_held(change, held, name)):
                    self._changes.note(change.digest, change.kind)
            if new:
                self._seen[name] = new[-1].number


def _is_purge(message: EngineCall[AnswerT]) -> bool:
    return isinstance(message, ForgetPrefixes) or (isinstance(message, Unload) and message.is_purge)


def _is_held(change: AdapterChange, held: Mapping[str, set[str]], but_by: str) -> bool:
    return any(change.digest in digests for name, digests in held.items() if name != but_by)
