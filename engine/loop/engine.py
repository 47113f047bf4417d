"""The engine loop: add, schedule, submit, commit, emit.

The loop is synchronous. Adapters are loaded and grammars are compiled on other threads or in other processes.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass

import msgspec
from msgspec import structs

from loramux.engine.adapters.adapter_calls import AdapterCalls, PinLimits
from loramux.engine.adapters.adapter_load import AdapterLoad
from loramux.engine.adapters.adapter_pool import AdapterPool
from loramux.engine.adapters.adapter_strikes import AdapterStrikes
from loramux.engine.adapters.host_floors import HostFloors, Protect, no_floors
from loramux.engine.constraints.grammar import NO_MASKS, Grammar, Mask, Masks
from loramux.engine.constraints.grammars import Grammars
from loramux.engine.constraints.token_rules import token_rules
from loramux.engine.drafting.draft import Draft
from loramux.engine.drafting.speculation import Speculation, num_decode_rows
from loramux.engine.execution.executor import Executor, Forward, StepGivenUp, StepResult, SubmittedStep
from loramux.engine.loop.engine_stats import EngineStats
from loramux.engine.loop.step_commits import StepCommits
from loramux.engine.pages.page_pool import PageOwner, PagePool
from loramux.engine.pages.prefix_cache import PrefixCache
from loramux.engine.protocol.messages import (
    Abort,
    AdapterState,
    Add,
    Extend,
    Finished,
    ForgetPrefixes,
    FromEngine,
    Load,
    Pin,
    Rejected,
    SamplingParams,
    SequenceOutput,
    Stats,
    StatsRequest,
    StepOutput,
    Unload,
)
from loramux.engine.scheduling.request_limits import EngineLimits, request_problem
from loramux.engine.scheduling.scheduler import Scheduler
from loramux.engine.scheduling.token_grants import TokenGrants
from loramux.engine.sequences.batch import ScheduledSequence, build_batch, head_rows
from loramux.engine.sequences.live_sequences import LiveSequences
from loramux.engine.sequences.sequence import Sequence
from loramux.engine.sequences.timers import Timers
from loramux.engine.tracing.sequence_traces import SequenceTraces

FREE_WAIT_S = 250e-6
"""Time that each step waits for masks without charging it to a budget, in seconds."""

FREE_WAIT_PART = {False: 0.05, True: 0.5}
"""The same as a part of the last step, by whether the device computes meanwhile."""

MAX_GIVEN_UP = 2
"""Maximum number of steps of background sequences that are given up because other sequences arrive, until background
sequences have run in a step. A given-up step computes nothing of use, so more would cost them much throughput.
"""


class Outbound(msgspec.Struct, frozen=True, gc=False):
    """A message for one gateway."""

    owner: bytes
    message: FromEngine


@dataclass(frozen=True, slots=True, eq=False)
class EngineParts:
    """The parts of an engine. `protect` reserves host memory for the adapters of a share."""

    pages: PagePool
    adapters: AdapterPool
    prefixes: PrefixCache
    scheduler: Scheduler
    executor: Executor
    grammars: Grammars
    speculation: Speculation
    protect: Protect = no_floors


@dataclass(frozen=True, slots=True, eq=False)
class Observers:
    """Receivers of an engine's events. `stats` counts steps, and `traces` records the lifecycle of each sequence.

    `note_running` receives the ids of the running sequences before each step, because the step may crash the process.
    """

    stats: EngineStats
    traces: SequenceTraces | None = None
    note_running: Callable[[list[str]], None] | None = None


class Engine:
    """Runs sequences with many different adapters on one page pool. Call `step` until `has_work` is false.

    With `lookahead`, the next step is scheduled and submitted while the device is still running the current one, so the
    device need not wait for the host. Tokens are then committed one `step` later, and a sequence that has just ended
    wastes a row of the step already submitted. The sequence's pages can be reused immediately: steps run in order, and
    all other writes to pages wait for the steps already submitted (see `PageCopier`).

    A step with drafts chooses several tokens of a sequence. The next step is scheduled once they are committed, even
    with `lookahead`.
    """

    def __init__(
        self,
        limits: EngineLimits,
        parts: EngineParts,
        observers: Observers,
        seeds: random.Random,
        clock: Callable[[], float],
        lookahead: bool = False,
    ) -> None:
        self._limits = limits
        self._pages = pages = parts.pages
        self._adapters = adapters = parts.adapters
        self._prefixes = prefixes = parts.prefixes
        self._scheduler = scheduler = parts.scheduler
        self._executor = parts.executor
        self._grammars = parts.grammars
        self._speculation = parts.speculation
        self._seeds = seeds
        self._clock = clock
        self._lookahead = lookahead
        self._stats = observers.stats
        self._traces = observers.traces
        self._note_running = observers.note_running
        self._in_flight: SubmittedStep | None = None
        self._last_step_s = 0.0
        self._live = LiveSequences()
        self._constrained: dict[Grammar, Sequence] = {}
        # Number of unfinished sequences with a grammar or with rules for their tokens.
        self._num_constrained = 0
        self._timers = Timers(clock, self._live)
        self._grants = TokenGrants(limits.max_model_len, scheduler, adapters, self._timers, self._end_at_limit)
        self._num_arrivals = 0
        # Whether the current step can be given up, and the number of such steps since the last with a background
        # sequence.
        self._can_give_up = False
        self._num_given_up = 0
        self.has_urgent: Callable[[], bool] = lambda: False
        """Returns True if another than a background sequence will be added after the step. Called within steps."""
        self._outbox: list[Outbound] = []
        self._strikes = AdapterStrikes(clock)
        self._floors = HostFloors(parts.protect, clock)
        share = limits.max_pinned_share
        pins = PinLimits(int(share * adapters.num_slots), int(share * pages.num_pages))
        self._calls = AdapterCalls(adapters, prefixes, self._live, pins, self._post, self._leaves_room)
        self._commits = StepCommits(scheduler, self._grants, self._stats, self._speculation, self._post, self._traces)

    @property
    def has_work(self) -> bool:
        """True if there is work for `step`, either now or later, for example once a load finishes."""
        if self._scheduler.has_work or self._in_flight is not None or self._calls.has_work:
            return True
        # Otherwise, pages of a deleted tenant would stay on disk until the next request.
        return self._prefixes.host.disk.is_deleting

    @property
    def num_sequences(self) -> int:
        return len(self._live)

    def add(self, owner: bytes, add: Add) -> None:
        """Accept a sequence, or refuse it immediately if it cannot run."""
        if self._live.find(owner, add.sequence_id) is not None:
            rejected = Rejected(sequence_id=add.sequence_id, message="a sequence with this id is already running")
            self._post(owner, rejected)
            return
        refusal = self._refusal(add)
        if refusal is not None:
            code, message = refusal
            refused = Finished(
                sequence_id=add.sequence_id,
                reason="error",
                prompt_tokens=0,
                completion_tokens=0,
                code=code,
                message=message,
            )
            self._post(owner, refused)
            return
        if add.prediction and (not self._speculation.guesses or not add.speculates or add.grammar):
            # The sequence has no drafts from its prediction, so it need not keep it.
            add = structs.replace(add, prediction=())
        seed = add.sampling.seed
        sequence = Sequence(
            add=add,
            owner=owner,
            arrival=self._num_arrivals,
            # A client's seed may be negative, but random numbers are derived from 64 unsigned bits.
            seed=(self._seeds.getrandbits(64) if seed is None else seed) % 2**64,
            stop_token_ids=self._stop_token_ids(add.sampling),
        )
        vocab_size = self._limits.vocab_size if add.vocab_size is None else add.vocab_size
        sequence.token_rules = token_rules(add.sampling, sequence.tokens, sequence.num_prompt, vocab_size)
        self._num_arrivals += 1
        if add.digest is not None:
            self._floors.note(add.share_key, add.digest, add.host_floor_bytes)
        self._live.add(sequence)
        if self._traces is not None:
            self._traces.added(sequence)
        if add.grammar:
            grammar = self._grammars.request(add.isolation_key, add.grammar, add.share_key, add.vocab_size)
            grammar.let_end_with(add.sampling.stop_token_ids, self._limits.eos_token_ids)
            sequence.grammar = grammar
            self._constrained[grammar] = sequence
        self._num_constrained += sequence.is_constrained
        self._scheduler.add(sequence)
        self._set_timers(sequence)
        # The new sequence must be waiting already, because it may be the one to refuse.
        self._shed()

    def extend(self, owner: bytes, extend: Extend) -> None:
        """Raise a sequence's token limit as far as the context and the pool allow. A paused sequence resumes."""
        sequence = self._live.find(owner, extend.sequence_id)
        if sequence is not None and not sequence.is_pooled:
            self._grants.extend(sequence, extend.max_tokens)

    def abort(self, owner: bytes, abort: Abort) -> None:
        """End a sequence and report its committed tokens. Has no effect on a sequence that has already ended."""
        sequence = self._live.find(owner, abort.sequence_id)
        if sequence is not None:
            self._end(sequence, "abort")

    def abort_all(self, owner: bytes | None = None) -> None:
        """End all sequences. With `owner`, a gateway that has disconnected, end only its sequences and drop its
        unanswered calls.
        """
        for sequence in self._live:
            if owner is None or sequence.owner == owner:
                self._end(sequence, "abort")
        if owner is not None:
            self._calls.drop(owner)

    def load(self, owner: bytes, load: Load) -> None:
        self._calls.load(owner, load)

    def unload(self, owner: bytes, unload: Unload) -> None:
        self._calls.unload(owner, unload)

    def pin(self, owner: bytes, pin: Pin) -> None:
        self._calls.pin(owner, pin)

    def forget_prefixes(self, owner: bytes, forget: ForgetPrefixes) -> None:
        self._prefixes.purge_owners(frozenset(forget.isolation_keys))
        self._post(owner, AdapterState(call_id=forget.call_id, digest="", state="absent"))

    def step(self) -> bool:
        """Run one step. Returns False if nothing could run, for example because adapters are still loading."""
        started_s = self._clock()
        has_committed = self._commit_before_drafts()
        self._prefixes.host.poll()
        self._timers.fire()
        self._follow_grammars()
        demand = self._scheduler.order_waiting()
        self._calls.add_wanted(demand.queue_positions)
        settled = self._adapters.poll(demand)
        if self._traces is not None:
            for load in settled:
                self._traces.loaded(load, self._live.of_digest(load.digest))
        self._end_failed(settled)
        self._calls.settle(settled)
        # A call that waited until its adapter was unloaded now wants it again.
        self._calls.add_wanted(demand.queue_positions)
        self._adapters.request_new()
        scheduled = self._scheduler.schedule()
        self._end_unfit()
        scheduled, drafts = self._speculation.with_drafts(
            scheduled, self._scheduler.room_for_drafts, others_wait=self._scheduler.queue.num_waiting > 0
        )
        has_turn = self._num_given_up < MAX_GIVEN_UP and self._scheduler.can_give_up
        self._can_give_up = has_turn and not drafts and _can_repeat(scheduled)
        try:
            submitted = self._run(scheduled, drafts, started_s) if scheduled else None
        except StepGivenUp:
            self._num_given_up += 1
            self._scheduler.give_up()
            self._stats.count_given_up()
            return True
        if self._num_given_up and any(item.sequence.is_background for item in scheduled):
            self._num_given_up = 0
        if self._lookahead:
            submitted, self._in_flight = self._in_flight, submitted
        if submitted is not None:
            self._commit_counted(submitted, started_s)
        if scheduled:
            self._last_step_s = self._clock() - started_s
            self._stats.count_step_time(self._last_step_s)
        return has_committed or submitted is not None or self._in_flight is not None

    def is_step_unwanted(self) -> bool:
        """True if the step that is being computed should be given up."""
        return self._can_give_up and self.has_urgent()

    def _commit_before_drafts(self) -> bool:
        """Commit the step in flight if the next step needs its tokens. Returns True if there was such a step."""
        in_flight = self._in_flight
        if in_flight is None:
            return False
        if not in_flight.drafts and not self._speculation.wants_known_tokens:
            return False
        self._in_flight = None
        self._commit_counted(in_flight, in_flight.started_s)
        return True

    def _run(
        self, scheduled: list[ScheduledSequence], drafts: dict[Sequence, Draft], started_s: float
    ) -> SubmittedStep:
        """Submit the step, which began at `started_s`, and choose its tokens.

        A mask depends on the sequence's previous token. If that token is in flight, the step that chose it is committed
        while the device computes the logits of the new step, so the device does not wait. If the mask is late, the
        token cannot be chosen in this step, and the logits are computed again once the mask is there.
        """
        read_bytes, before = self._stats.read_bytes(scheduled), self._stats.computed_prompt_tokens
        forward, sampling, scoring, pooling = self._submit(scheduled)
        prompt_tokens = self._stats.computed_prompt_tokens - before
        num_rows = num_decode_rows(scheduled) if self._speculation.guesses else 0

        def submitted(used: list[Sequence | None], result: StepResult) -> SubmittedStep:
            num_sequences = len(scheduled) if num_rows else 0
            return SubmittedStep(
                used, scoring, pooling, result, drafts, started_s, num_sequences, num_rows, read_bytes, prompt_tokens
            )

        constrained: list[Sequence] = []
        if self._num_constrained:
            constrained = [one for one in sampling if one is not None and one.is_constrained]
        if not constrained:
            # The common case: every row may choose any token.
            return submitted(sampling, forward.choose(NO_MASKS, ()))
        in_flight = self._in_flight
        if in_flight is not None:
            self._in_flight = None
            self._commit_counted(in_flight, started_s)
            self._await_masks(constrained, is_computing=True)
        late = {row: one for row, one in enumerate(sampling) if one is not None and one.is_running and not one.has_mask}
        for sequence in late.values():
            sequence.take_back()
            self._scheduler.repeat_last(sequence)
        used = [None if row in late else one for row, one in enumerate(sampling)]
        return submitted(used, forward.choose(self._masks(used, drafts), late))

    def _commit_counted(self, step: SubmittedStep, started_s: float) -> None:
        """Commit a step during the step that began at `started_s`. With lookahead, this is the next one, and the time
        since then is the time since the previous step was committed.
        """
        self._commit(step)
        seconds = self._clock() - started_s
        self._stats.count_committed(step.read_bytes, step.prompt_tokens, seconds)
        if step.num_rows:
            head = step.result.head_drafts()
            head_s, has_drafted = (0.0, False) if head is None else (head.seconds, head.tokens is not None)
            self._speculation.note_time(step.num_sequences, step.num_rows, seconds, head_s, has_drafted=has_drafted)

    def _masks(self, sampling: list[Sequence | None], drafts: dict[Sequence, Draft]) -> Masks:
        """The masks of the constrained rows. A row with no allowed token has no mask, and its sequence ends.

        A draft ends before a token after which no token is allowed.
        """
        masks: dict[int, Mask] = {}
        for row, sequence in enumerate(sampling):
            if sequence is None:
                continue
            mask = None
            if sequence.grammar is not None:
                mask = sequence.grammar.mask()
                if mask is None:
                    continue
            if sequence.token_rules is not None:
                mask = sequence.token_rules.restrict(mask, sequence.held_back)
            if mask is not None:
                masks[row] = mask
            draft = drafts.get(sequence)
            if draft is None or (sequence.grammar is None and sequence.token_rules is None):
                continue
            for count in range(1, len(draft.tokens) + 1):
                mask = None if sequence.grammar is None else sequence.grammar.mask(count)
                if sequence.token_rules is not None:
                    rules = sequence.token_rules.after(draft.tokens[:count])
                    mask = rules.restrict(mask, sequence.held_back_after(count))
                if mask is None:
                    drafts[sequence] = draft.shortened(count - 1)
                    break
                masks[row + count] = mask
        return masks

    def _submit(
        self, scheduled: list[ScheduledSequence]
    ) -> tuple[Forward, list[Sequence | None], list[Sequence], list[tuple[Sequence, bool]]]:
        if self._note_running is not None:
            # Record all running sequences, not only those in this step, because a fault in an earlier step may surface
            # in this step. The oldest come last, because there may be no room for sequences that have waited for long.
            self._note_running([sequence.add.sequence_id for sequence in reversed(self._scheduler.running)])
        batch = build_batch(scheduled, self._limits.page_tokens)
        if self._speculation.has_head:
            batch = structs.replace(batch, head=head_rows(scheduled, self._speculation.wants_head))
        forward = self._executor.submit(batch)
        scoring: list[Sequence] = []
        if batch.scores:
            scoring = [item.sequence for item in scheduled if item.sequence.num_unscored]
            for sequence, scored in zip(scoring, batch.scores, strict=True):
                sequence.num_unscored -= len(scored.token_ids)
        pooling: list[tuple[Sequence, bool]] = []
        if batch.pooled:
            pooled = [item.sequence for item in scheduled if item.sequence.is_pooled]
            pooling = [(sequence, rows.is_last) for sequence, rows in zip(pooled, batch.pooled, strict=True)]
        self._stats.count_step(scheduled, batch.num_tokens)
        self._scheduler.advance(scheduled)
        sampling: list[Sequence | None] = []
        for item in scheduled:
            sequence = item.sequence
            if not sequence.has_run:
                sequence.has_run = True
                if self._traces is not None:
                    self._traces.began(sequence)
                self._grants.begin(sequence)
            # As in `build_batch`, a step that reaches a sequence's last known token chooses the next token.
            if sequence.num_computed == sequence.num_tokens:
                sequence.choose(len(sampling))
                if not sequence.is_pooled:
                    sampling.append(sequence)
                    if item.drafts:
                        sequence.num_drafted = len(item.drafts)
                        sampling += [None] * len(item.drafts)
        return forward, sampling, scoring, pooling

    def _commit(self, step: SubmittedStep) -> None:
        ended = self._commits.commit(step)
        if not ended:
            return
        self._strike([one for one, reason in ended if reason == "not_finite" and one.add.digest is not None])
        for sequence, reason in ended:
            if reason == "not_finite":
                self._end(sequence, "error", reason, "the model produced values that are not finite")
            elif reason == "no_token_allowed":
                assert sequence.token_rules is not None
                # The last token was chosen without a mask, so it is neither emitted nor counted.
                message = sequence.token_rules.failure
                self._end(sequence, "error", reason, message, sequence.num_completion - 1)
            else:
                self._end(sequence, reason)

    def take_outbox(self) -> list[Outbound]:
        """Return and clear the pending messages. A sequence's tokens come before its Finished message."""
        outbox, self._outbox = self._outbox, []
        return outbox

    def _end(
        self,
        sequence: Sequence,
        reason: str,
        code: str | None = None,
        message: str | None = None,
        num_completion: int | None = None,
    ) -> None:
        self._scheduler.finish(sequence, is_broken=code == "not_finite")
        self._live.remove(sequence)
        self._num_constrained -= sequence.is_constrained
        if sequence.grammar is not None:
            del self._constrained[sequence.grammar]
            sequence.grammar.leave()
        self._speculation.forget(sequence)
        if self._traces is not None:
            self._traces.ended(sequence, reason, code)
        if sequence.pending_output:
            output = SequenceOutput(sequence_id=sequence.sequence_id, token_ids=sequence.take_pending_output())
            self._post(sequence.owner, StepOutput(outputs=(output,)))
        num_prompt = sequence.num_prompt if sequence.has_run else 0
        finished = Finished(
            sequence_id=sequence.sequence_id,
            reason=reason,
            prompt_tokens=num_prompt,
            completion_tokens=sequence.num_completion if num_completion is None else num_completion,
            cached_tokens=min(sequence.num_cached, num_prompt),
            stop_token_id=sequence.stop_token_id,
            stop_logprobs=sequence.stop_logprobs,
            accepted_prediction_tokens=sequence.num_predicted_right,
            rejected_prediction_tokens=sequence.num_predicted - sequence.num_predicted_right,
            code=code,
            message=message,
        )
        self._post(sequence.owner, finished)

    def _post(self, owner: bytes, message: FromEngine) -> None:
        self._outbox.append(Outbound(owner, message))

    def _stop_token_ids(self, params: SamplingParams) -> frozenset[int]:
        own = frozenset(params.stop_token_ids)
        return own if params.ignore_eos else own.union(self._limits.eos_token_ids)

    def _refusal(self, add: Add) -> tuple[str, str] | None:
        """Return an error code and a message if the request cannot run, otherwise None."""
        problem = request_problem(add, self._limits, self._scheduler.max_tokens())
        if problem is not None:
            return problem
        if add.digest is not None and self._strikes.is_quarantined(add.digest):
            return "adapter_quarantined", "the adapter produced non-finite values too many times"
        if add.digest is not None and self._calls.is_purging(add.digest):
            return "adapter_unloaded", "the adapter is being unloaded"
        return None

    def _leaves_room(self) -> bool:
        """True if all accepted requests still fit next to the pinned adapters."""
        return self._adapters.can_place_all and all(self._grants.fits(one) for one in self._live)

    def _end_at_limit(self, sequence: Sequence) -> None:
        self._end(sequence, "length")

    def _set_timers(self, sequence: Sequence) -> None:
        def give_up_waiting(sequence: Sequence) -> None:
            if not sequence.has_run:
                self._end(sequence, "error", "overloaded", "the request waited too long for its first step")

        if self._limits.max_waiting_s != float("inf") and not sequence.is_background:
            self._timers.after(sequence, self._limits.max_waiting_s, give_up_waiting)

    def _shed(self) -> None:
        """Refuse sequences from the shares with the most waiting tokens relative to their weights, until the queue is
        short enough.
        """
        queue = self._scheduler.queue
        while queue.num_waiting > 1 and queue.num_waiting_tokens > self._limits.max_waiting_tokens:
            sequence = queue.shed_candidate()
            if sequence is None:
                return
            self._end(sequence, "error", "overloaded", "too many tokens are already waiting")

    def _strike(self, broken: list[Sequence]) -> None:
        """Record a strike against each adapter with which these sequences computed non-finite values.

        The adapter's cached prefixes are purged, and new sequences use another copy of the adapter. Its running
        sequences are marked as tainted.
        """
        if not broken:
            return
        digests = {one.add.digest for one in broken if one.add.digest is not None}
        for digest in sorted(digests):
            self._strikes.strike(digest)
            self._adapters.changes.note(digest, "struck")
            self._prefixes.purge(digest)
            # The adapter may have a new copy already, which these sequences did not use. A sequence that was preempted
            # with its step in flight has no slot any more, and used the old copy if there is one.
            slots = {one.slot for one in broken if one.add.digest == digest}
            is_old = self._adapters.has_retired(digest) and all(
                slot < 0 or self._adapters.in_slot(slot).is_retired for slot in slots
            )
            if not is_old:
                self._calls.retire(digest)
        for sequence in self._scheduler.running:
            sequence.is_tainted |= sequence.add.digest in digests

    def _end_failed(self, settled: list[AdapterLoad]) -> None:
        for load in settled:
            if load.failure is not None:
                # Running ones use an earlier copy.
                for sequence in [one for one in self._live.of_digest(load.digest) if not one.is_running]:
                    self._end(sequence, "error", "adapter_unavailable", load.failure)

    def _follow_grammars(self) -> None:
        """Collect masks, and charge shares for the time to compute them. Without a step in flight, wait for running
        sequences' masks. A sequence whose mask is late then takes no part in the next step.
        """
        if self._scheduler.queue.num_active > 1:
            self._grammars.note_sharing()
        self._settle_grammars()
        if self._in_flight is None and self._constrained:
            awaited = [one for one in self._constrained.values() if one.is_running and not one.has_mask]
            self._await_masks(awaited, is_computing=False)
        for share_key, seconds in self._grammars.take_spent().items():
            self._scheduler.queue.charge_time(share_key, seconds)

    def _await_masks(self, sequences: list[Sequence], *, is_computing: bool) -> None:
        free_s = max(FREE_WAIT_S, FREE_WAIT_PART[is_computing] * self._last_step_s)
        grammars = [one.grammar for one in sequences if one.grammar is not None and one.is_running]
        if grammars:
            # With lookahead, a device that computes nothing does not wait for late masks.
            self._grammars.wait(grammars, free_s, is_patient=is_computing or not self._lookahead)
            self._settle_grammars()

    def _settle_grammars(self) -> None:
        """Trace finished compilations, and end the sequences whose grammars have ended. Waiting ones get turns."""
        for grammar in self._grammars.poll():
            sequence = self._constrained.get(grammar)
            if sequence is None:
                continue
            if self._traces is not None and not grammar.tokens and (grammar.compile_s is not None or grammar.failure):
                self._traces.compiled(sequence, grammar.failure)
            if grammar.is_complete:
                self._end(sequence, "stop")
            elif grammar.tokens and len(sequence.tokens) >= sequence.num_reserved and not self._grants.pauses(sequence):
                self._end(sequence, "length")
            elif grammar.failure is not None:
                self._end(sequence, "error", "grammar_failed", grammar.failure)
            elif not sequence.is_running:
                self._scheduler.queue.unpark(sequence)

    def _end_unfit(self) -> None:
        for sequence in self._scheduler.take_unfit():
            message = "the request and its adapter together need more pages than the pool can provide"
            self._end(sequence, "error", "request_too_large", message)
        for sequence in self._scheduler.take_misstated():
            message = "vocab_size or num_labels is not that of the adapter"
            self._end(sequence, "error", "invalid_request", message)

    def stats(self, request: StatsRequest) -> Stats:
        return self._stats.snapshot(request.call_id, request.with_tiers, request.changes_after)

    def check_integrity(self) -> None:
        """Assert that no page is lost: without live sequences, only adapters and the prefix cache may own pages."""
        self._pages.check_integrity()
        if not self._live:
            assert self._pages.num_owned(PageOwner.KV) == len(self._prefixes) == self._prefixes.num_idle
            held = sum(len(load.pages) for load in self._adapters.loads())
            assert self._pages.num_owned(PageOwner.ADAPTER) == held


def _can_repeat(scheduled: list[ScheduledSequence]) -> bool:
    """True if a step has only background sequences, and changes only K and V, which a later step overwrites."""
    return all(item.sequence.is_background and not item.sequence.state_pages for item in scheduled)
