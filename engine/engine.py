"""One engine: add, schedule, submit, commit, emit. Synchronous; everything slow happens elsewhere."""

from __future__ import annotations

import random
from collections import defaultdict
from dataclasses import dataclass
from typing import Protocol

from loramux.engine.adapter_pool import AdapterEntry, AdapterPhase, AdapterPool
from loramux.engine.batch import Batch, ScheduledSequence, build_batch
from loramux.engine.messages import (
    Abort,
    AdapterState,
    Add,
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
from loramux.engine.sampler import SampledToken
from loramux.engine.scheduler import Scheduler
from loramux.engine.sequence import Sequence, SequenceState


@dataclass(frozen=True, slots=True)
class EngineLimits:
    """What a request is checked against before it can reach a kernel."""

    vocab_size: int
    max_model_len: int
    eos_token_ids: tuple[int, ...]
    page_tokens: int


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
    """

    def __init__(
        self,
        limits: EngineLimits,
        pages: PagePool,
        adapters: AdapterPool,
        scheduler: Scheduler,
        executor: Executor,
        seeds: random.Random,
        lookahead: bool = False,
    ) -> None:
        self._limits = limits
        self._pages = pages
        self._adapters = adapters
        self._scheduler = scheduler
        self._executor = executor
        self._seeds = seeds
        self._lookahead = lookahead
        self._in_flight: SubmittedStep | None = None
        self._sequences: dict[str, Sequence] = {}
        self._num_arrivals = 0
        self._outbox: list[Outbound] = []
        self._loads: list[tuple[bytes, Load]] = []
        self._unloads: list[tuple[bytes, Unload]] = []
        self._num_steps = 0
        self._num_mixed_steps = 0
        self._max_adapters_in_step = 0
        self._prompt_tokens = 0
        self._completion_tokens = 0

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

    # Schedule, submit, commit

    def step(self) -> bool:
        """Run one step; False when nothing could run, because there is nothing or because adapters are loading."""
        self._settle_loads(self._adapters.poll(self._scheduler.oldest_waiters()))
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
        result = self._executor.submit(build_batch(scheduled, self._limits.page_tokens))
        self._count(scheduled)
        for item in scheduled:
            item.sequence.num_computed += item.num_tokens
            item.sequence.has_run = True
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
            if sequence.num_completion >= sequence.add.max_tokens:
                ended.append((sequence, "length"))
        for owner, items in outputs.items():
            self._outbox.append(Outbound(owner, StepOutput(outputs=tuple(items))))
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
        self._scheduler.finish(sequence)
        del self._sequences[sequence.sequence_id]
        billed = sequence.num_completion if num_completion is None else num_completion
        num_prompt = sequence.num_prompt if sequence.has_run else 0
        self._emit_finished(sequence.owner, sequence.sequence_id, num_prompt, billed, reason, code, message)

    def _emit_finished(
        self,
        owner: bytes,
        sequence_id: str,
        num_prompt: int,
        num_completion: int,
        reason: str,
        code: str | None,
        message: str | None,
    ) -> None:
        finished = Finished(
            sequence_id=sequence_id,
            reason=reason,
            prompt_tokens=num_prompt,
            completion_tokens=num_completion,
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
        if not all(0 <= token < limits.vocab_size for token in (*add.prompt, *add.sampling.stop_token_ids)):
            return "invalid_request", f"token ids must lie in [0, {limits.vocab_size})"
        total = len(add.prompt) + add.max_tokens
        if total > limits.max_model_len:
            return "prompt_too_long", f"{total} tokens exceed the context of {limits.max_model_len}"
        if self._scheduler.max_pages(add) > self._pages.num_pages:
            return "request_too_large", "the request needs more pages than the pool has"
        return None

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
            num_waiting=len(self._scheduler.waiting),
            num_pages=self._pages.num_pages,
            num_free_pages=self._pages.num_free,
            num_kv_pages=self._pages.num_owned(PageOwner.KV),
            num_adapter_pages=self._pages.num_owned(PageOwner.ADAPTER),
            prompt_tokens=self._prompt_tokens,
            completion_tokens=self._completion_tokens,
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
        """With no sequence left, every page is free or belongs to a resident adapter."""
        self._pages.check_integrity()
        if not self._sequences:
            assert self._pages.num_owned(PageOwner.KV) == 0
            held = sum(len(entry.pages) for entry in self._adapters.entries())
            assert self._pages.num_owned(PageOwner.ADAPTER) == held
