"""One engine: add, schedule, submit, commit, emit. Synchronous; everything slow happens elsewhere."""

from __future__ import annotations

import random
from collections import Counter, defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import msgspec

from loramux.engine.adapter_pool import AdapterEntry, AdapterPhase, AdapterPool
from loramux.engine.batch import Batch, ScheduledSequence, build_batch
from loramux.engine.eviction import AFTER_ALL
from loramux.engine.messages import (
    Abort,
    AdapterState,
    Add,
    Extend,
    Finished,
    FromEngine,
    Load,
    ResidentAdapter,
    SequenceOutput,
    Stats,
    StatsRequest,
    StepOutput,
    Unload,
)
from loramux.engine.page_pool import PageOwner, PagePool
from loramux.engine.prefix_cache import PrefixCache
from loramux.engine.sampler import SampledToken
from loramux.engine.sampling_limits import sampling_problem
from loramux.engine.scheduler import Scheduler
from loramux.engine.sequence import Sequence, SequenceState
from loramux.engine.timers import Timers

MAX_STRIKES = 3
"""Steps with rows that were not finite after which an adapter is refused until the engine starts again."""


@dataclass(frozen=True, slots=True)
class EngineLimits:
    """What a request is checked against before it can reach a kernel."""

    vocab_size: int
    max_model_len: int
    eos_token_ids: tuple[int, ...]
    page_tokens: int
    max_waiting_tokens: int = 1 << 62
    """Prompts and grants that may wait in all; beyond, the share with most waiting for its weight loses its newest."""
    max_waiting_s: float = float("inf")
    """How long a request may wait for its first step."""


@dataclass(frozen=True, slots=True)
class Outbound:
    """A message for one gateway."""

    owner: bytes
    message: FromEngine


class StepResult(Protocol):
    """A step that a device runs."""

    def tokens(self) -> list[SampledToken]:
        """The token chosen after each sample row, in order; waits until the step is through."""
        ...


class Executor(Protocol):
    """Runs batches on a device, in the order of their submission."""

    def submit(self, batch: Batch) -> StepResult:
        """Start a step; it may read tokens that the step before has not finished choosing."""
        ...


@dataclass(frozen=True, slots=True, eq=False)
class SubmittedStep:
    """A step whose tokens are not committed yet: `sampling[i]` receives token `i` of the result."""

    sampling: list[Sequence]
    result: StepResult


class Engine:
    """Sequences of many adapters over one page pool. Call `step` until `has_work` is false.

    With `lookahead` the next step is scheduled and submitted while the device still runs this one, so that the device
    never waits for the host; tokens are then committed one `step` later. A sequence that turns out to have ended wastes
    a row of the step that was submitted already. The pages it gives back may be used at once: steps run in order, and
    whoever else writes pages waits for the steps submitted before (see `TierLoader`).

    `note_running` is told which sequences run, before each step that may take them with it.
    """

    def __init__(
        self,
        limits: EngineLimits,
        pages: PagePool,
        adapters: AdapterPool,
        prefixes: PrefixCache,
        scheduler: Scheduler,
        executor: Executor,
        seeds: random.Random,
        clock: Callable[[], float],
        lookahead: bool = False,
        note_running: Callable[[list[str]], None] | None = None,
    ) -> None:
        self._limits = limits
        self._pages = pages
        self._adapters = adapters
        self._prefixes = prefixes
        self._timers = Timers(clock)
        self._scheduler = scheduler
        self._executor = executor
        self._seeds = seeds
        self._lookahead = lookahead
        self._note_running = note_running
        self._in_flight: SubmittedStep | None = None
        self._sequences: dict[str, Sequence] = {}
        self._num_arrivals = 0
        self._outbox: list[Outbound] = []
        self._loads: list[tuple[bytes, Load]] = []
        self._unloads: list[tuple[bytes, Unload]] = []
        # How often an adapter's logits were not finite.
        self._strikes: Counter[str] = Counter()
        self._num_steps = 0
        self._num_mixed_steps = 0
        self._max_adapters_in_step = 0
        self._prompt_tokens = 0
        self._completion_tokens = 0
        self._cached_tokens = 0

    @property
    def has_work(self) -> bool:
        """Whether a step could do something, now or after a load."""
        return self._scheduler.has_work or self._in_flight is not None or bool(self._loads or self._unloads)

    @property
    def num_sequences(self) -> int:
        return len(self._sequences)

    # Add

    def add(self, owner: bytes, add: Add) -> None:
        """Accept a sequence; one that can never run is answered at once."""
        refusal = self._refusal(add)
        if refusal is not None:
            code, message = refusal
            self._emit_finished(owner, add.sequence_id, 0, 0, "error", code, message)
            return
        seed = add.sampling.seed
        sequence = Sequence(
            add=add,
            owner=owner,
            arrival=self._num_arrivals,
            seed=(self._seeds.getrandbits(64) if seed is None else seed) % 2**64,
        )
        self._num_arrivals += 1
        self._sequences[add.sequence_id] = sequence
        self._scheduler.add(sequence)
        self._set_timers(add, sequence.arrival)
        self._shed()

    def extend(self, extend: Extend) -> None:
        """Raise the limit of a sequence, as far as the context and the pool reach; one that paused goes on."""
        sequence = self._sequences.get(extend.sequence_id)
        if sequence is None:
            return
        entry = None if sequence.add.digest is None else self._adapters.find(sequence.add.digest)
        if sequence.add.digest is not None and (entry is None or not entry.num_pages):
            # How much room its adapter leaves is not known just now; it ends at the limit that it has.
            return
        room = min(self._limits.max_model_len, self._scheduler.max_tokens(entry)) - sequence.num_prompt
        max_tokens = max(sequence.add.max_tokens, min(extend.max_tokens, room))
        self._scheduler.change(sequence, msgspec.structs.replace(sequence.add, max_tokens=max_tokens))
        if not sequence.is_chosen_out:
            sequence.is_paused = False

    def abort(self, abort: Abort) -> None:
        """End a sequence and report what is billed; one that has ended already is left as it was."""
        sequence = self._sequences.get(abort.sequence_id)
        if sequence is not None:
            committed = sequence.num_completion
            billed = committed if abort.keep is None else max(0, min(committed, abort.keep))
            self._end(sequence, "abort", num_completion=billed)

    def abort_all(self, owner: bytes | None = None) -> None:
        """End every sequence, or those of one gateway."""
        for sequence in list(self._sequences.values()):
            if owner is None or sequence.owner == owner:
                self._end(sequence, "abort")

    def load(self, owner: bytes, load: Load) -> None:
        self._adapters.prefetch(load.digest)
        self._loads.append((owner, load))

    def unload(self, owner: bytes, unload: Unload) -> None:
        self._unloads.append((owner, unload))
        if unload.deadline_s is not None:
            self._timers.after(unload.deadline_s, lambda: self._take_away(unload))

    # Schedule, submit, commit

    def step(self) -> bool:
        """Run one step; False when nothing could run, because there is nothing or because adapters are loading."""
        self._timers.fire()
        demand = self._scheduler.take_turns()
        for _, load in self._loads:
            # After the turns of all sequences.
            demand.turns.setdefault(load.digest, AFTER_ALL - 1)
        self._settle_loads(self._adapters.poll(demand))
        scheduled = self._scheduler.schedule()
        self._refuse_unfit()
        submitted = self._submit(scheduled) if scheduled else None
        if self._lookahead:
            submitted, self._in_flight = self._in_flight, submitted
        if submitted is not None:
            self._commit(submitted)
        return submitted is not None or self._in_flight is not None

    def _submit(self, scheduled: list[ScheduledSequence]) -> SubmittedStep:
        sampling = [item.sequence for item in scheduled if item.samples]
        if self._note_running is not None:
            # All that run, not only this step's: what an earlier step did to the device may show in this one.
            self._note_running([sequence.sequence_id for sequence in self._scheduler.running])
        result = self._executor.submit(build_batch(scheduled, self._limits.page_tokens))
        self._count(scheduled)
        for item in scheduled:
            if not item.sequence.has_run:
                item.sequence.has_run = True
                self._cached_tokens += item.sequence.num_cached
            self._scheduler.advance(item)
        for index, sequence in enumerate(sampling):
            sequence.num_in_flight += 1
            sequence.sample_index = index
        return SubmittedStep(sampling, result)

    def _commit(self, step: SubmittedStep) -> None:
        outputs: dict[bytes, list[SequenceOutput]] = defaultdict(list)
        ended: list[tuple[Sequence, str]] = []
        for sequence, token in zip(step.sampling, step.result.tokens(), strict=True):
            if sequence.state is SequenceState.FINISHED:
                # It was aborted, or its last token came to light, after this step had been submitted.
                continue
            sequence.num_in_flight -= 1
            if token.token_id is None:
                ended.append((sequence, "not_finite"))
                continue
            sequence.tokens.append(token.token_id)
            self._scheduler.queue.charge_output(sequence)
            self._completion_tokens += 1
            if self._stops(sequence, token.token_id):
                ended.append((sequence, "stop"))
                continue
            outputs[sequence.owner].append(
                SequenceOutput(
                    sequence_id=sequence.sequence_id,
                    token_ids=(token.token_id,),
                    logprobs=() if token.logprobs is None else (token.logprobs,),
                )
            )
            if sequence.num_completion >= sequence.add.max_tokens and not self._pauses(sequence):
                ended.append((sequence, "length"))
        for owner, items in outputs.items():
            self._outbox.append(Outbound(owner, StepOutput(outputs=tuple(items))))
        self._strike({sequence.add.digest for sequence, reason in ended if reason == "not_finite"} - {None})
        for sequence, reason in ended:
            if reason == "not_finite":
                self._end(sequence, "error", reason, "the model produced values that are not finite")
            else:
                self._end(sequence, reason)

    # Emit

    def take_outbox(self) -> list[Outbound]:
        """What gateways are to be told since the last call; a sequence's tokens come before its end."""
        outbox, self._outbox = self._outbox, []
        return outbox

    def _stops(self, sequence: Sequence, token_id: int) -> bool:
        params = sequence.add.sampling
        if sequence.num_completion <= params.min_tokens:
            return False
        if token_id in params.stop_token_ids:
            return True
        return not params.ignore_eos and token_id in self._limits.eos_token_ids

    def _end(
        self,
        sequence: Sequence,
        reason: str,
        code: str | None = None,
        message: str | None = None,
        num_completion: int | None = None,
    ) -> None:
        self._scheduler.finish(sequence, is_broken=code == "not_finite")
        del self._sequences[sequence.sequence_id]
        billed = sequence.num_completion if num_completion is None else num_completion
        num_prompt = sequence.num_prompt if sequence.has_run else 0
        cached = min(sequence.num_cached, num_prompt)
        self._emit_finished(sequence.owner, sequence.sequence_id, num_prompt, billed, reason, code, message, cached)

    def _emit_finished(
        self,
        owner: bytes,
        sequence_id: str,
        num_prompt: int,
        num_completion: int,
        reason: str,
        code: str | None,
        message: str | None,
        num_cached: int = 0,
    ) -> None:
        finished = Finished(
            sequence_id=sequence_id,
            reason=reason,
            prompt_tokens=num_prompt,
            completion_tokens=num_completion,
            cached_tokens=num_cached,
            code=code,
            message=message,
        )
        self._outbox.append(Outbound(owner, finished))

    def _refusal(self, add: Add) -> tuple[str, str] | None:
        """The code and reason why a request can never run, else None."""
        limits = self._limits
        if add.sequence_id in self._sequences:
            return "invalid_request", "a sequence with this id is running"
        if not add.prompt or add.max_tokens < 1:
            return "invalid_request", "a prompt of at least one token and at least one new token are needed"
        if not all(0 <= token < limits.vocab_size for token in add.prompt):
            return "invalid_request", f"token ids must lie in [0, {limits.vocab_size})"
        problem = sampling_problem(add.sampling, limits.vocab_size)
        if problem is not None:
            return "invalid_request", problem
        total = len(add.prompt) + add.max_tokens
        if total > limits.max_model_len:
            return "prompt_too_long", f"{total} tokens exceed the context of {limits.max_model_len}"
        if total > self._scheduler.max_tokens():
            return "request_too_large", "the request needs more pages than the pool has"
        if add.digest is not None and self._strikes[add.digest] >= MAX_STRIKES:
            return "adapter_quarantined", "the adapter produced values that are not finite too often"
        return None

    def _pauses(self, sequence: Sequence) -> bool:
        """Let a sequence at its limit wait for a higher one, if it may."""
        if sequence.add.pause_s <= 0 or sequence.num_reserved >= self._limits.max_model_len:
            return False
        sequence.is_paused = True
        limit = sequence.add.max_tokens

        def end_pause(sequence: Sequence) -> None:
            if sequence.is_paused and sequence.add.max_tokens == limit:
                self._end(sequence, "length")

        self._after(sequence.add.pause_s, sequence.sequence_id, sequence.arrival, end_pause)
        return True

    def _set_timers(self, add: Add, arrival: int) -> None:
        def time_out(sequence: Sequence) -> None:
            self._end(sequence, "error", "deadline_exceeded", "the request's time was up before it was through")

        def give_up_waiting(sequence: Sequence) -> None:
            if not sequence.has_run:
                self._end(sequence, "error", "overloaded", "the request waited too long for its first step")

        if add.timeout_s is not None:
            self._after(add.timeout_s, add.sequence_id, arrival, time_out)
        if self._limits.max_waiting_s != float("inf"):
            self._after(self._limits.max_waiting_s, add.sequence_id, arrival, give_up_waiting)

    def _after(self, seconds: float, sequence_id: str, arrival: int, action: Callable[[Sequence], None]) -> None:
        """Call `action` if the sequence is still there by then; one that has ended is not kept for it."""

        def act() -> None:
            sequence = self._sequences.get(sequence_id)
            if sequence is not None and sequence.arrival == arrival:
                action(sequence)

        self._timers.after(seconds, act)

    def _shed(self) -> None:
        """Refuse what makes the queue too long, from the share with most waiting for its weight."""
        queue = self._scheduler.queue
        while queue.num_waiting > 1 and queue.num_waiting_tokens > self._limits.max_waiting_tokens:
            sequence = queue.most_dispensable()
            if sequence is None:
                return
            self._end(sequence, "error", "overloaded", "too many tokens wait already")

    def _strike(self, digests: set[str | None]) -> None:
        """Adapters of which a step had a row that was not finite leave the pool; what they computed is forgotten."""
        for digest in digests:
            if digest is None:
                continue
            self._strikes[digest] += 1
            self._prefixes.purge(digest)
            self._adapters.turn_out(digest)
        for sequence in self._scheduler.running:
            sequence.is_tainted |= sequence.add.digest in digests

    def _take_away(self, unload: Unload) -> None:
        """An unload's time is up: whoever still wants the adapter is ended."""
        if not any(pending is unload for _, pending in self._unloads):
            return
        for sequence in list(self._sequences.values()):
            if sequence.add.digest == unload.digest:
                self._end(sequence, "error", "adapter_unavailable", "the adapter was unloaded")

    def _refuse_unfit(self) -> None:
        for sequence in self._scheduler.take_unfit():
            message = "the request and its adapter together need more pages than the pool has"
            self._end(sequence, "error", "request_too_large", message)

    def _settle_loads(self, settled: list[AdapterEntry]) -> None:
        """Answer those who waited for adapters that became resident or failed, and unloads that became possible."""
        for entry in settled:
            if entry.phase is AdapterPhase.FAILED:
                for sequence in list(self._sequences.values()):
                    if sequence.add.digest == entry.digest:
                        self._end(sequence, "error", "adapter_unavailable", entry.failure)
            for owner, load in [one for one in self._loads if one[1].digest == entry.digest]:
                self._loads.remove((owner, load))
                state = "failed" if entry.phase is AdapterPhase.FAILED else "resident"
                self._answer(owner, load.call_id, entry.digest, state, entry.num_pages, entry.failure or None)
        for owner, load in list(self._loads):
            # Asked again each time: an adapter may have come and gone before anybody looked.
            entry = self._adapters.prefetch(load.digest)
            if entry.phase is AdapterPhase.RESIDENT:
                self._loads.remove((owner, load))
                self._answer(owner, load.call_id, load.digest, "resident", entry.num_pages)
        for owner, unload in list(self._unloads):
            is_wanted = any(one.add.digest == unload.digest for one in self._sequences.values())
            if not is_wanted and self._adapters.unload(unload.digest):
                self._prefixes.purge(unload.digest)
                self._unloads.remove((owner, unload))
                self._answer(owner, unload.call_id, unload.digest, "absent", 0)

    def _answer(
        self, owner: bytes, call_id: str, digest: str, state: str, num_pages: int, message: str | None = None
    ) -> None:
        answer = AdapterState(call_id=call_id, digest=digest, state=state, num_pages=num_pages, message=message)
        self._outbox.append(Outbound(owner, answer))

    # Statistics

    def _count(self, scheduled: list[ScheduledSequence]) -> None:
        self._num_steps += 1
        num_adapters = len({item.sequence.slot for item in scheduled if item.sequence.slot >= 0})
        self._num_mixed_steps += num_adapters > 1
        self._max_adapters_in_step = max(self._max_adapters_in_step, num_adapters)
        self._prompt_tokens += sum(
            min(item.num_tokens, max(0, item.sequence.num_prompt - item.sequence.num_computed)) for item in scheduled
        )

    def stats(self, request: StatsRequest) -> Stats:
        resident = [entry for entry in self._adapters.entries() if entry.phase is AdapterPhase.RESIDENT]
        return Stats(
            call_id=request.call_id,
            num_steps=self._num_steps,
            num_running=len(self._scheduler.running),
            num_waiting=self._scheduler.queue.num_waiting,
            num_pages=self._pages.num_pages,
            num_free_pages=self._pages.num_free,
            num_kv_pages=self._pages.num_owned(PageOwner.KV),
            num_adapter_pages=self._pages.num_owned(PageOwner.ADAPTER),
            num_prefix_pages=len(self._prefixes),
            prompt_tokens=self._prompt_tokens,
            completion_tokens=self._completion_tokens,
            cached_tokens=self._cached_tokens,
            num_adapter_loads=self._adapters.num_loads,
            num_adapter_evictions=self._adapters.num_evictions,
            num_preemptions=self._scheduler.num_preemptions,
            mixed_steps=self._num_mixed_steps,
            max_adapters_in_step=self._max_adapters_in_step,
            adapters=tuple(
                ResidentAdapter(digest=e.digest, slot=e.slot, num_pages=e.num_pages, num_users=e.num_users)
                for e in resident
            ),
        )

    def check_integrity(self) -> None:
        """With no sequence left, every page is free, a resident adapter's, or one of the prefix cache."""
        self._pages.check_integrity()
        if not self._sequences:
            assert self._pages.num_owned(PageOwner.KV) == len(self._prefixes) == self._prefixes.num_idle
            held = sum(len(entry.pages) for entry in self._adapters.entries())
            assert self._pages.num_owned(PageOwner.ADAPTER) == held
