"""Runs one admitted request in the engine, independently of the client's connection."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from dataclasses import dataclass
from typing import Any

import structlog

from loramux.engine.protocol.messages import Finished
from loramux.platform.engine_link.engine_client import EngineClient, EngineUnavailable
from loramux.platform.errors import ApiError, RequestCancelled
from loramux.platform.generation.choice import Choice, ChoiceDelta
from loramux.platform.generation.engine_failures import engine_failure, is_of_model
from loramux.platform.generation.pending_deltas import PendingDeltas
from loramux.platform.generation.plan import CHUNK_TOKENS, Plan
from loramux.platform.ledger.settlement import MODEL_FAILED, Settlement
from loramux.platform.telemetry.tracing import begin_span

FINISHED_WAIT_S = 1.0
"""Timeout, in seconds, for an aborted sequence's final report while a client is waiting."""

ABANDONED_WAIT_S = 60.0
"""Timeout, in seconds, for an aborted sequence's final report after its client has left.

It allows for a long step, because the engine reads aborts only between steps.
"""

EXTEND_AHEAD_TOKENS = 128
"""Request more tokens when a choice has this many left of its grant, so that its sequence does not have to pause."""

ExtendReservation = Callable[[str, int], Awaitable[bool]]
"""Reserves more tokens for a request. Returns False if no more are granted."""
log = structlog.get_logger()


@dataclass(frozen=True, slots=True)
class PredictionUsage:
    """How many tokens of a prediction were drafted: `accepted` tokens are part of the answer, `rejected` ones are not.
    Only the answer is charged.
    """

    accepted: int
    rejected: int

    @staticmethod
    def of(choices: list[Choice]) -> PredictionUsage:
        return PredictionUsage(
            sum(choice.accepted_prediction_tokens for choice in choices),
            sum(choice.rejected_prediction_tokens for choice in choices),
        )


@dataclass(frozen=True, slots=True)
class Usage:
    """The usage that is reported to the caller and charged."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    reasoning_tokens: int | None = None
    """Completion tokens that belong to the reasoning. None if the answer contains no reasoning."""
    predicted: PredictionUsage | None = None
    """None if the request has no prediction."""


class Generation:
    """A request that runs in its own task, so that a disconnecting client cannot interrupt the settlement.

    `deltas` yields the choices' output. It ends when `end` is called after the settlement. `usage` is then final.
    `observe_gap` is called with the time between consecutive tokens of a choice, in seconds, and the number of such
    gaps. `count_discarded` is called with numbers of tokens that the engine committed and that are not charged.
    `note_begin` is called once, when the engine has sent a token, or a part of a pooled state.
    """

    def __init__(
        self,
        plan: Plan,
        engine: EngineClient,
        extend: ExtendReservation,
        clock: Callable[[], int],
        observe_gap: Callable[[float, int], None] | None = None,
        count_discarded: Callable[[int], None] = lambda _: None,
        note_begin: Callable[[], None] = lambda: None,
    ) -> None:
        self.plan = plan
        self._observe_gap = observe_gap
        self._count_discarded = count_discarded
        self._note_begin = note_begin
        self._engine = engine
        self._extend = extend
        self._granted = plan.granted_tokens
        self._extending: asyncio.Task[None] | None = None
        self._clock = clock
        self._span = begin_span("generate")
        traceparent = None if self._span is None else self._span.traceparent
        self._choices = [
            Choice(i, add, plan.target.tokenizer, plan.text_rules) for i, add in enumerate(plan.adds(traceparent))
        ]
        self._events = PendingDeltas()
        self._is_stopping = False
        self._num_unread = len(self._choices)
        # Set once the request is stopping or every choice has been read to its end.
        self._has_ended = asyncio.Event()
        self._is_settled = False
        self.late: set[asyncio.Task[None]] = set()
        """After the settlement, the tasks that still wait for the engine's final report of a choice."""
        self.is_abandoned = False
        self.num_kept: int | None = None
        """For a response in the background, the number of tokens that its tenant can read if this server dies."""
        self._watch: asyncio.Task[None] | None = None
        self._failure: ApiError | None = None
        self.first_token_us: int | None = None
        self.has_begun = False
        """True once the engine has sent a token, or a part of a pooled state."""
        self.usage = Usage(0, 0, 0)
        self.status = "open"

    @property
    def num_pending(self) -> int:
        """Number of deltas that the client has not read yet: at most two per choice."""
        return len(self._events)

    @property
    def num_received(self) -> int:
        """Number of tokens received from the engine so far."""
        return sum(choice.num_received for choice in self._choices)

    @property
    def was_in_step(self) -> bool:
        """True if a step of the engine included one of the choices."""
        return any(choice.was_in_step for choice in self._choices)

    @property
    def num_checkpointed(self) -> int:
        """Number of tokens to charge if this server dies."""
        return self.num_received if self.num_kept is None else self.num_kept

    async def deltas(self) -> AsyncIterator[ChoiceDelta]:
        """Yield the choices' output as it arrives. Raises ApiError if the request fails."""
        while (event := await self._events.get()) is not None:
            yield event
        if self._failure is not None:
            raise self._failure

    def abandon_when(self, gone: Coroutine[Any, Any, None]) -> None:
        """Abandon the request when `gone` returns because the client has left."""

        async def watch() -> None:
            await gone
            self.abandon()

        self._watch = asyncio.create_task(watch())

    def abandon(self) -> None:
        """End every sequence because the client has left. Committed tokens are charged. Does nothing if the answer is
        complete, which is then stored if the request asks for it.
        """
        if not self._has_ended.is_set():
            self.is_abandoned = True
            self._stop()

    def cancel(self) -> None:
        """End the request on an administrator's behalf. The client gets an error, and committed tokens are charged."""
        if not self._has_ended.is_set():
            self._fail(RequestCancelled("an administrator cancelled this request"))

    async def run(self) -> Settlement:
        """Read every choice to its end and return the request's settlement."""
        readers = [asyncio.create_task(self._read(choice)) for choice in self._choices]
        await self._has_ended.wait()
        if self._num_unread:
            # After an abort, wait for the engine's final report, but only for a limited time.
            timeout_s = ABANDONED_WAIT_S if self.is_abandoned else FINISHED_WAIT_S
            _, self.late = await asyncio.wait(readers, timeout=timeout_s)
        if self.is_abandoned:
            for choice, reader in zip(self._choices, readers, strict=True):
                if reader in self.late:
                    choice.give_up()
        settlement = self._settlement()
        self._is_settled = True
        self._count_discarded(sum(choice.discarded_tokens for choice in self._choices))
        self.usage = Usage(
            settlement.prompt_tokens,
            settlement.completion_tokens,
            settlement.cached_tokens,
            None if self.plan.text_rules.reasoning is None else sum(choice.num_reasoning for choice in self._choices),
            PredictionUsage.of(self._choices) if self.plan.prediction else None,
        )
        if self._span is not None:
            self._span.set("loramux.completion_tokens", settlement.completion_tokens)
            self._span.end(None if self._failure is None else self._failure.code)
        return settlement

    def end(self, settlement: Settlement) -> None:
        self.status = settlement.status
        if self._watch is not None:
            self._watch.cancel()
            # The task refers to this object. Without the cycle, the request's memory is freed at once.
            self._watch = None
        self._events.close()

    async def _read(self, choice: Choice) -> None:
        try:
            await self._follow(choice)
        except EngineUnavailable:
            self._fail(engine_failure("engine_unavailable", None))
        except Exception:
            log.exception("reading a sequence failed", request_id=self.plan.request_id)
            self._fail(ApiError("internal error; see the server's log"))
        self._num_unread -= 1
        if not self._num_unread:
            self._has_ended.set()

    async def _follow(self, choice: Choice) -> None:
        if self._is_stopping:
            return
        last_s: float | None = None
        async for item in self._engine.submit(choice.add, self.plan.target.model.order):
            if isinstance(item, Finished):
                self._finish(choice, item)
                return
            if self._is_settled:
                continue
            if not self.has_begun and (item.token_ids or item.pooled):
                self.has_begun = True
                self._note_begin()
            if self.first_token_us is None and item.token_ids:
                self.first_token_us = self._clock()
            if self._observe_gap is not None and item.token_ids:
                now_s = time.monotonic()
                if last_s is not None:
                    self._observe_gap((now_s - last_s) / len(item.token_ids), len(item.token_ids))
                last_s = now_s
            delta = choice.feed(item)
            self._ask_for_more(choice)
            if delta is None:
                continue
            self._events.put(delta)
            if choice.is_done:
                # A stop string was found, or the request asks only for the prompt. Abort the sequence, and wait only
                # for its final report.
                self._engine.abort(choice.add.sequence_id)
                if all(other.is_done for other in self._choices):
                    self._end_early()

    def _ask_for_more(self, choice: Choice) -> None:
        """Extend the reservation and the sequences by a chunk before this choice uses up its grant."""
        if (
            self._granted < self.plan.max_tokens
            and choice.num_received >= self._granted - EXTEND_AHEAD_TOKENS
            and not choice.is_done
            and self._extending is None
        ):
            self._extending = asyncio.create_task(self._grow())

    async def _grow(self) -> None:
        # If the request settles first, the extension finds its reservation closed and reserves nothing.
        wanted = min(self.plan.max_tokens, self._granted + CHUNK_TOKENS)
        if not await self._extend(self.plan.request_id, (wanted - self._granted) * self.plan.num_sequences):
            # A refusal is final. The sequences end at their current limits.
            return
        self._granted = wanted
        self._extending = None
        for choice in self._choices:
            if choice.finished is None:
                self._engine.extend(choice.add.sequence_id, wanted)

    def _finish(self, choice: Choice, finished: Finished) -> None:
        if self._is_settled:
            self._count_discarded(max(0, finished.completion_tokens - choice.num_received))
            return
        delta = choice.finish(finished)
        if delta is not None:
            self._events.put(delta)
        if choice.is_done or self.is_abandoned:
            return
        code = finished.code if finished.reason == "error" else "engine_unavailable"
        self._fail(engine_failure(code, finished.message))

    def _fail(self, failure: ApiError) -> None:
        if self._failure is None and not self._is_settled:
            self._failure = failure
            self._stop()

    def _end_early(self) -> None:
        self._is_stopping = True
        self._has_ended.set()

    def _stop(self) -> None:
        self._end_early()
        for choice in self._choices:
            if choice.finished is None:
                self._engine.abort(choice.add.sequence_id)

    def _settlement(self) -> Settlement:
        choices = self._choices
        n = self.plan.num_choices
        # Charge each prompt once, no matter how many choices continue it.
        groups = [choices[start : start + n] for start in range(0, len(choices), n)]
        status = "completed" if all(choice.is_done for choice in choices) else "aborted"
        if self._failure is not None and not isinstance(self._failure, RequestCancelled):
            status = MODEL_FAILED if is_of_model(self._failure) else "failed"
        return Settlement(
            status=status,
            prompt_tokens=sum(max(choice.prompt_tokens for choice in group) for group in groups),
            completion_tokens=sum(choice.completion_tokens for choice in choices),
            cached_tokens=sum(min((c.cached_tokens for c in group if c.has_run), default=0) for group in groups),
            first_token_us=self.first_token_us,
            has_run=any(choice.has_run for choice in choices),
        )
