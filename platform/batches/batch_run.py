"""Runs the lines of one claimed batch, behind all other requests."""

from __future__ import annotations

import asyncio
import time
from collections import Counter, deque
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial

from loramux.adapter_store.errors import ClaimLost
from loramux.platform.accounts.principals import Principal
from loramux.platform.batches.answer_writer import AnswerWriter
from loramux.platform.batches.batch_claims import BatchClaim, StoredAnswer, WaitingLine
from loramux.platform.batches.batch_files import BatchFiles
from loramux.platform.batches.batch_rows import Batch, BatchState
from loramux.platform.batches.input_lines import parsed_line
from loramux.platform.batches.line_run import LATER, TROUBLE, LineRuns, PlannedLine, ReadLine, Refusal
from loramux.platform.batches.places import MAX_RUNNING, PlaceGivenUp, Places
from loramux.platform.batches.room import MAX_ENTERING, Entry, Room
from loramux.platform.engine_link.engine_client import EngineUnavailable
from loramux.platform.errors import ApiError, NotFound, PermissionDenied
from loramux.platform.generation.settler import NEVER_RAN
from loramux.platform.quotas.decisions import QuotaExceeded
from loramux.platform.quotas.policies import ADAPTER
from loramux.platform.requests.request_life import OVERLOADED
from loramux.platform.requests.services import GatewayServices
from loramux.platform.telemetry.package_metrics import BatchMetrics

NAMED_AT_ONCE = 64
"""Number of lines that get their request ids in one transaction."""
MAX_TRIES = 5
"""Number of attempts after which a line fails although its error is temporary. Waiting for a quota, for the
engine or for an adapter does not count.
"""
MAX_UNSTORED = 128
"""Number of lines beyond the room's capacity that can run or wait until their answers are stored."""
MAX_PLANNED = MAX_ENTERING // MAX_RUNNING
"""Number of lines that a batch plans one after another, so that slow ones leave entries to other tenants' batches."""
STORE_S = 5.0
"""Longest time for which a batch that stops waits for the answers that are being stored, in seconds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchPace:
    """How long batches wait, in seconds."""

    poll_s: float = 1.0
    """Interval between looks for a batch, and at the state of a running one."""
    retry_s: float = 60.0
    """Longest pause of a batch after a request was refused for lack of quota."""
    long_s: float = 60.0
    """A quota that refuses a request for longer than this is used up. Others are only slow."""
    idle_s: float = 5.0
    """How long a batch whose quota is used up keeps its place without running a line, if another batch waits for a
    place. Also the shortest time until it can have a place again.
    """
    turn_s: float = 1800.0
    """How long any batch keeps its place if another batch waits for one. It is longer than `adapter_s`, because another
    claim begins to wait for adapters again.
    """
    adapter_s: float = 900.0
    """How long the lines of a model wait while its adapter cannot be loaded. Then each fails at its next attempt."""
    caller_s: float = 1.0
    """How long the key and the tenant are trusted without another look."""
    engine_s: float = 30.0
    """How long a batch stays with a server whose engine does not run. Then any server can continue it."""


@dataclass(frozen=True, slots=True)
class _Rest:
    """Lines wait until `until_s`. `is_used_up` is True if a quota will refuse them for longer."""

    until_s: float = 0.0
    is_used_up: bool = False


@dataclass(frozen=True, slots=True)
class _Unloadable:
    """An adapter that could not be loaded when it was last needed, at `failed_s`, and for how long before."""

    failed_s: float
    for_s: float = 0.0

    def failed_again(self, now_s: float, most_s: float) -> _Unloadable:
        """Of the time since the last failure, at most `most_s` counts: nobody knows whether the adapter could be loaded
        in between.
        """
        return _Unloadable(now_s, self.for_s + min(now_s - self.failed_s, most_s))


class BatchRun:
    """The lines of one claimed batch."""

    def __init__(
        self,
        services: GatewayServices,
        claim: BatchClaim,
        metrics: BatchMetrics,
        room: Room,
        places: Places,
        pace: BatchPace,
        batch: Batch,
        files: BatchFiles,
    ) -> None:
        self._services = services
        self._claim = claim
        self._metrics = metrics
        self._room = room
        self._places = places
        self._pace = pace
        self._batch = batch
        self._files = files
        self._lines = LineRuns(services, room, batch.id, batch.endpoint, AnswerWriter(self._record).store)
        self._waiting: deque[WaitingLine] = deque()
        self._running: set[int] = set()
        """The numbers of the lines that are running."""
        self._resting: dict[str, _Rest] = {}
        """The rests of models whose quota is used up or whose adapter cannot be loaded, by the model's name."""
        self._unloadable: dict[str, _Unloadable] = {}
        """The adapters that cannot be loaded, by the model's name."""
        self._tries: Counter[int] = Counter()
        self._tasks: set[asyncio.Task[None]] = set()
        self._state: BatchState = "in_progress"
        self._paused = _Rest()
        """The rest of all lines."""
        self._answered_s = 0.0
        """When a line was last answered."""
        self._leaves: EngineUnavailable | PlaceGivenUp | None = None
        """Why the batch leaves this server once its running lines have ended, if it does."""
        self._caller: tuple[float, Principal | PermissionDenied] | None = None

    async def settle_earlier(self) -> None:
        """Settle the requests that an earlier claim has left, each once, as their stored answers say."""
        for request_id, usage in await self._services.call(self._claim.unsettled, self._batch.id):
            if usage is None:
                # The request's line runs again, and nobody knows the name of what it has stored.
                await self._services.call(self._services.stored.forget, self._batch.tenant_id, request_id)
            await self._services.run.settler.settle(request_id, usage or NEVER_RAN)

    async def run_lines(self) -> None:
        """Run the lines until each has an answer, or the batch has been cancelled or has expired.

        If lines are left, raises EngineUnavailable if this server's engine has not run for `engine_s` seconds, or
        PlaceGivenUp.
        """
        self._answered_s = time.monotonic()
        watch = asyncio.create_task(self._watch())
        try:
            await self._run_lines()
            # The running lines of a batch that ends finish.
            await self._until_free(0)
            if self._leaves is not None and not self._has_ended and await self._has_waiting_lines():
                raise self._leaves
        finally:
            watch.cancel()
            await asyncio.gather(watch, return_exceptions=True)
            await self._abandon()

    async def _abandon(self) -> None:
        """End the running lines at once. They run again later, except those whose answers can still be stored."""
        tasks = set(self._tasks)
        for generation in tuple(self._lines.running):
            generation.abandon()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        with suppress(TimeoutError):
            async with asyncio.timeout(STORE_S):
                for generation, is_stored in tuple(self._lines.running.items()):
                    if not generation.is_abandoned:
                        await is_stored.wait()

    @property
    def _has_ended(self) -> bool:
        return self._state != "in_progress" or self._services.database.now_us() >= self._batch.expires_us

    @property
    def _is_over(self) -> bool:
        return self._has_ended or self._leaves is not None

    async def _run_lines(self) -> None:
        while not self._is_over:
            if not self._waiting:
                self._waiting.extend(await self._name_lines())
            if not self._waiting:
                # A running line may come back, and so do the lines of a resting model.
                if not self._tasks and not self._resting:
                    return
                await self._wait_for_lines()
                continue
            await self._pause()
            # Lines whose answers are being stored need no room.
            await self._until_free(self._room.capacity + MAX_UNSTORED)
            await self._start(await self._entered(min(len(self._waiting), MAX_PLANNED)))
            self._raise_failures()

    async def _start(self, entries: Sequence[Entry]) -> None:
        """Read the next lines together, plan them one by one, so that other requests come in between, and start a task
        for each as soon as it is planned.
        """
        # While the lines waited to enter, a refusal may have removed some.
        lines = [self._waiting.popleft() for _ in range(min(len(entries), len(self._waiting)))]
        self._running.update(one.line for one in lines)
        unused = deque(entries)
        try:
            for read in await self._services.compute(self._read, lines):
                caller = await self._checked_caller()
                found = caller if isinstance(caller, PermissionDenied) else await self._lines.plan(read, caller)
                entry = unused.popleft()
                task = asyncio.create_task(self._run_line(read, found, entry))
                # A task that is cancelled before it begins runs nothing.
                task.add_done_callback(partial(_leave, entry))
                self._tasks.add(task)
        finally:
            for entry in unused:
                entry.leave()

    async def _name_lines(self) -> Sequence[WaitingLine]:
        """Return the next lines, without those of resting models."""
        now_s = time.monotonic()
        self._resting = {model: rest for model, rest in self._resting.items() if rest.until_s > now_s}
        named = partial(self._claim.waiting, but_lines=self._running.copy(), but_models=tuple(self._resting))
        lines = await self._services.call(named, self._batch.id, NAMED_AT_ONCE)
        return [one for one in lines if one.model not in self._resting]

    async def _has_waiting_lines(self) -> bool:
        return bool(await self._services.call(self._claim.waiting, self._batch.id, 1))

    async def _wait_for_lines(self) -> None:
        """Wait until a line has ended or a model's rest is over, or for a moment."""
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=self._pace.poll_s, return_when=asyncio.FIRST_COMPLETED)
            self._raise_failures()
            return
        until_s = min(rest.until_s for rest in self._resting.values())
        await self._offer_place()
        await asyncio.sleep(min(max(0.0, until_s - time.monotonic()), self._pace.poll_s))

    async def _pause(self) -> None:
        """Rest after a refusal, unless the batch ends before."""
        while not self._is_over:
            rest_s = self._paused.until_s - time.monotonic()
            if rest_s <= 0:
                return
            self._raise_failures()
            await self._offer_place()
            await asyncio.sleep(min(rest_s, self._pace.poll_s))

    async def _offer_place(self) -> None:
        """Raise PlaceGivenUp if another batch waits for a place, and this one only for a quota that is used up."""
        now_s = time.monotonic()
        rests = [rest for rest in (self._paused, *self._resting.values()) if rest.until_s > now_s]
        # A batch that waits for an adapter stays, because another claim would begin to wait for it again.
        if self._tasks or not rests or not all(rest.is_used_up for rest in rests):
            return
        if now_s - self._answered_s < self._pace.idle_s:
            return
        if await self._give_up_place(max(min(rest.until_s for rest in rests), now_s + self._pace.idle_s)):
            raise PlaceGivenUp("the batch's quota is used up, and another batch waits for a place")

    async def _give_up_place(self, until_s: float) -> bool:
        """Give up the batch's place until `until_s` if another batch waits for one."""
        with suppress(*TROUBLE):
            if await self._services.call(self._places.are_wanted):
                return self._places.give_up(self._batch.tenant_id, until_s, self._services.database.now_us())
        return False

    async def _entered(self, most: int) -> Sequence[Entry]:
        """Enter the room with up to `most` lines, unless the batch ends before."""
        while not self._is_over:
            with suppress(TimeoutError):
                async with asyncio.timeout(self._pace.poll_s):
                    return await self._room.enter(most)
            self._raise_failures()
        return ()

    async def _until_free(self, most: int) -> None:
        """Wait until at most `most` lines run. Raises what a line has raised."""
        while len(self._tasks) > most:
            await asyncio.wait(self._tasks, return_when=asyncio.FIRST_COMPLETED)
            self._raise_failures()

    def _raise_failures(self) -> None:
        done = {task for task in self._tasks if task.done()}
        self._tasks -= done
        # Each is read, because asyncio reports exceptions that nobody has read.
        errors = [error for task in done if (error := task.exception()) is not None]
        if errors:
            raise errors[0]

    async def _run_line(self, read: ReadLine, planned: PlannedLine | ApiError, entry: Entry) -> None:
        try:
            refusal = await self._lines.run(read, planned, entry)
            if refusal is not None:
                await self._put_off(read, refusal)
        finally:
            self._running.discard(read.waiting.line)

    async def _put_off(self, read: ReadLine, refusal: Refusal) -> None:
        """Let a refused line wait, which comes back because it has no answer, or fail it after too many attempts."""
        line, error, now_s = read.waiting, refusal.error, time.monotonic()
        rest_s = error.retry_after_s or 1.0
        is_used_up = isinstance(error, QuotaExceeded) and rest_s > self._pace.long_s
        is_of_model = isinstance(error, QuotaExceeded) and error.policy.scope == ADAPTER
        if error.code == "adapter_unavailable":
            # The rests become longer, because the cause can be an object store that is down for a while.
            earlier = self._unloadable.get(line.model, _Unloadable(now_s))
            unloadable = self._unloadable[line.model] = earlier.failed_again(now_s, self._pace.adapter_s / 3)
            is_last = unloadable.for_s >= self._pace.adapter_s
            rest_s, is_of_model = max(rest_s, unloadable.for_s), True
        else:
            if refusal.has_run:
                self._unloadable.pop(line.model, None)
            # A line that was not in a step cannot be why the engine does not run.
            is_waiting = error.code == OVERLOADED or (error.code == "engine_unavailable" and not refusal.has_run)
            self._tries[line.line] += not (is_waiting or error.status == 429)
            is_last = self._tries[line.line] >= MAX_TRIES
        if is_last and error.status in LATER:
            if refusal.has_reserved:
                line = await self._services.call(self._claim.rename, self._batch.id, line)
            await self._lines.fail(replace(read, waiting=line), error)
            return
        rest = _Rest(now_s + min(rest_s, self._pace.retry_s), is_used_up)
        if is_of_model:
            # The other models are not affected.
            self._resting[line.model] = rest
            self._waiting = deque(one for one in self._waiting if one.model != line.model)
            return
        self._paused = max(self._paused, rest, key=lambda one: one.until_s)
        # The lines that follow are of the same model or of later ones. This one comes first again.
        self._waiting.clear()

    def _read(self, lines: Sequence[WaitingLine]) -> list[ReadLine]:
        contents = self._files.lines([(one.start, one.num_bytes) for one in lines])
        parsed = (parsed_line(content, self._batch.endpoint) for content in contents)
        return [ReadLine(line, custom_id, body) for line, (custom_id, body) in zip(lines, parsed, strict=True)]

    async def _record(self, answers: Sequence[tuple[WaitingLine, StoredAnswer]]) -> None:
        self._state = await self._services.call(self._claim.record, self._batch.id, answers)
        self._answered_s = time.monotonic()
        for line, answer in answers:
            if answer.status not in LATER:
                self._unloadable.pop(line.model, None)
        num_completed = sum(answer.has_succeeded for _, answer in answers)
        self._metrics.lines.labels("completed").inc(num_completed)
        self._metrics.lines.labels("failed").inc(len(answers) - num_completed)

    async def _checked_caller(self) -> Principal | PermissionDenied:
        """The key that started the batch, or why it can no longer be used. Both are looked up again regularly."""
        now_s = time.monotonic()
        if self._caller is None or now_s - self._caller[0] >= self._pace.caller_s:
            self._caller = (now_s, await self._services.call(self._find_caller))
        return self._caller[1]

    def _find_caller(self) -> Principal | PermissionDenied:
        callers, batch = self._services.callers, self._batch
        tenant = callers.tenants.get(batch.tenant_id)
        if tenant is None or tenant.state != "active":
            return PermissionDenied("the tenant is not in service", code="tenant_suspended")
        key, now_us = callers.api_keys.get(batch.api_key_id), self._services.database.now_us()
        if key is None or key.revoked_us is not None or (key.expires_us is not None and key.expires_us <= now_us):
            return PermissionDenied("the key that started the batch has been revoked or has expired")
        return Principal(key.id, tenant.id, tenant.slug, key.scopes, key.adapter_ids)

    async def _watch(self) -> None:
        """Renew the claim, and notice that the batch has been cancelled, that the engine does not run, or that it is
        another batch's turn.
        """
        began_s = engine_ran_s = time.monotonic()
        while True:
            now_s = time.monotonic()
            if self._services.engine.is_own_ready:
                engine_ran_s = now_s
            elif now_s - engine_ran_s >= self._pace.engine_s:
                self._leaves = EngineUnavailable("the engine does not run")
            is_turn_over = self._leaves is None and now_s - began_s >= self._pace.turn_s
            if is_turn_over and await self._give_up_place(now_s + self._pace.idle_s):
                self._leaves = PlaceGivenUp("it is the turn of another batch")
            await asyncio.sleep(min(self._pace.poll_s, self._claim.lease_s / 3))
            # A lost claim is noticed when the next answer is stored.
            with suppress(ClaimLost, *TROUBLE, NotFound):
                self._state = await self._services.call(self._claim.renew, self._batch.id)


def _leave(entry: Entry, _: asyncio.Task[None]) -> None:
    entry.leave()
