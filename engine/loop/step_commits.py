"""Commits the tokens of finished steps: a step's own tokens, accepted drafts, and the results for prompts."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable
from itertools import chain, groupby
from operator import attrgetter

import numpy as np

from loramux.engine.drafting.draft import Draft, DraftSource
from loramux.engine.drafting.speculation import Speculation
from loramux.engine.execution.executor import SubmittedStep
from loramux.engine.execution.sampler import SampledToken
from loramux.engine.loop.engine_stats import EngineStats
from loramux.engine.protocol.messages import FromEngine, SequenceOutput, StepOutput, TokenLogprobs
from loramux.engine.scheduling.scheduler import Scheduler
from loramux.engine.scheduling.token_grants import TokenGrants
from loramux.engine.sequences.batch import RepeatedRows
from loramux.engine.sequences.sequence import Sequence, SequenceState
from loramux.engine.tracing.sequence_traces import SequenceTraces


class StepCommits:
    """Commits the steps of an engine in the order of their submission. `post` sends a message to a gateway."""

    def __init__(
        self,
        scheduler: Scheduler,
        grants: TokenGrants,
        stats: EngineStats,
        speculation: Speculation,
        post: Callable[[bytes, FromEngine], None],
        traces: SequenceTraces | None = None,
    ) -> None:
        self._scheduler = scheduler
        self._grants = grants
        self._stats = stats
        self._speculation = speculation
        self._post = post
        self._traces = traces

    def commit(self, step: SubmittedStep) -> list[tuple[Sequence, str]]:
        """Commit the tokens of a step, and post its outputs.

        Returns the sequences that end, each with the reason, which is a finish reason, `not_finite` or
        `no_token_allowed`. The caller ends them.
        """
        outputs: dict[bytes, list[SequenceOutput]] = defaultdict(list)
        ended: list[tuple[Sequence, str]] = []
        committed: list[Sequence] = []
        finished, traces, drafts = SequenceState.FINISHED, self._traces, step.drafts
        tokens = step.result.tokens()
        head = step.result.head_drafts()
        repeated: list[RepeatedRows] = []
        broken_prompts = self._take_scores(step, outputs) if step.scoring else set()
        if step.pooling:
            ended += self._take_pooled(step, outputs)
        for row, (sequence, token) in enumerate(zip(step.sampling, tokens, strict=True)):
            if sequence is None or sequence.state is finished:
                # The sequence was aborted, or its last token was committed, after this step had been submitted.
                continue
            token_id = token.token_id
            if broken_prompts and sequence in broken_prompts:
                token_id = None
            sequence.commit(token_id)
            if token_id is None:
                ended.append((sequence, "not_finite"))
                continue
            rules = sequence.token_rules
            if rules is not None and rules.failure is not None:
                ended.append((sequence, "no_token_allowed"))
                continue
            committed.append(sequence)
            if traces is not None:
                traces.committed(sequence)
            if sequence.num_cached and sequence.num_completion == 1:
                cached_tokens = min(sequence.num_cached, sequence.num_prompt)
                cached = SequenceOutput(sequence_id=sequence.sequence_id, token_ids=(), cached_tokens=cached_tokens)
                outputs[sequence.owner].append(cached)
            reason = self._note_token(sequence, token_id, token.logprobs, outputs)
            num_accepted = 0
            draft = drafts.get(sequence) if drafts else None
            if draft is not None:
                num_before = len(sequence.tokens)
                chosen = tokens[row : row + 1 + len(draft.tokens)]
                reason = self._accept(sequence, draft, chosen, reason, outputs, committed)
                num_accepted = len(sequence.tokens) - num_before
                if reason is None and self._scheduler.settle_state(sequence, num_accepted):
                    pages = sequence.state_pages
                    repeated.append(RepeatedRows(row, 1 + num_accepted, sequence.num_computed, pages))
            if reason is not None:
                ended.append((sequence, reason))
            elif head is not None and head.tokens is not None:
                # The row after which the last committed token was sampled.
                last = row + num_accepted
                source: DraftSource = "drafter" if head.from_drafters[last] else "head"
                self._speculation.note_head(sequence, head.tokens[last], source)
        if repeated:
            repeat = step.result.repeat_rows()
            assert repeat is not None
            with self._speculation.measuring_states():
                repeat(repeated)
        ended += [
            (sequence, "not_finite")
            for sequence in step.scoring
            if sequence in broken_prompts and sequence not in step.sampling
        ]
        self._scheduler.queue.charge_outputs(committed)
        self._stats.count_completion_tokens(len(committed))
        for owner, items in outputs.items():
            self._post(owner, StepOutput(outputs=_joined(items) if step.drafts else tuple(items)))
        return ended

    def _note_token(
        self,
        sequence: Sequence,
        token_id: int,
        token_logprobs: TokenLogprobs | None,
        outputs: dict[bytes, list[SequenceOutput]],
    ) -> str | None:
        """Add the token just committed to `outputs`. Returns the reason why the sequence ends with it, or None."""
        add = sequence.add
        if token_id in sequence.stop_token_ids and sequence.num_completion > add.sampling.min_tokens:
            sequence.stop_token_id, sequence.stop_logprobs = token_id, token_logprobs
            if sequence.pending_output:
                rest = SequenceOutput(sequence_id=sequence.sequence_id, token_ids=sequence.take_pending_output())
                outputs[sequence.owner].append(rest)
            return "stop"
        is_last = len(sequence.tokens) >= sequence.num_reserved
        if token_logprobs is None and add.tokens_at_once == 1:
            # The common case.
            outputs[sequence.owner].append(SequenceOutput(sequence_id=add.sequence_id, token_ids=(token_id,)))
        else:
            logprobs = () if token_logprobs is None else (token_logprobs,)
            emitted = sequence.emit(token_id, is_urgent=is_last or bool(logprobs))
            if emitted:
                output = SequenceOutput(sequence_id=add.sequence_id, token_ids=emitted, logprobs=logprobs)
                outputs[sequence.owner].append(output)
        if not is_last:
            return None
        # A grammar may turn out to be complete, so `_settle_grammars` ends its sequence.
        return "length" if sequence.grammar is None and not self._grants.pauses(sequence) else None

    def _accept(
        self,
        sequence: Sequence,
        draft: Draft,
        chosen: list[SampledToken],
        reason: str | None,
        outputs: dict[bytes, list[SequenceOutput]],
        committed: list[Sequence],
    ) -> str | None:
        """Commit the tokens that follow accepted tokens of a draft, until the sequence ends. `chosen[0]` is the token
        just committed, which ends the sequence if there is a `reason`. Returns the reason why the sequence ends, or
        None.
        """
        num_equal = draft.num_equal([one.token_id for one in chosen])
        num_committed = 1
        while reason is None and num_committed <= num_equal:
            token = chosen[num_committed]
            if token.token_id is None:
                # The next step finds the same values after the last committed token, and the sequence then ends.
                break
            sequence.accept(token.token_id)
            num_committed += 1
            committed.append(sequence)
            if self._traces is not None:
                self._traces.committed(sequence)
            reason = self._note_token(sequence, token.token_id, token.logprobs, outputs)
        self._scheduler.note_accepted(sequence)
        num_accepted = min(num_equal, num_committed)
        self._speculation.note_verified(draft, num_accepted)
        if draft.source == "prediction":
            sequence.num_predicted += len(draft.tokens)
            sequence.num_predicted_right += num_accepted
        return reason

    def _take_scores(self, step: SubmittedStep, outputs: dict[bytes, list[SequenceOutput]]) -> set[Sequence]:
        """Add the step's prompt log-probabilities to `outputs`. Sequences whose log-probabilities contain NaN are
        returned instead.
        """
        broken: set[Sequence] = set()
        for sequence, scored in zip(step.scoring, step.result.prompt_logprobs(), strict=True):
            if sequence.state is SequenceState.FINISHED or not scored:
                continue
            if any(math.isnan(one.logprob) for one in scored):
                broken.add(sequence)
                continue
            output = SequenceOutput(sequence_id=sequence.sequence_id, token_ids=(), prompt_logprobs=scored)
            outputs[sequence.owner].append(output)
        return broken

    def _take_pooled(
        self, step: SubmittedStep, outputs: dict[bytes, list[SequenceOutput]]
    ) -> list[tuple[Sequence, str]]:
        """Add the step's sums to its pooled sequences, and add the states of finished prompts to `outputs`. Returns the
        sequences that end, with the reasons.
        """
        ended: list[tuple[Sequence, str]] = []
        for (sequence, is_last), pooled in zip(step.pooling, step.result.pooled(), strict=True):
            if sequence.state is SequenceState.FINISHED:
                continue
            total = pooled if sequence.pooled_sum is None else sequence.pooled_sum + pooled
            sequence.pooled_sum = total
            if not is_last:
                continue
            sequence.take_back()
            begin, end = sequence.pooled_range
            state = (total / (end - begin)).astype("<f4")
            if not np.isfinite(state).all():
                ended.append((sequence, "not_finite"))
                continue
            output = SequenceOutput(sequence_id=sequence.sequence_id, token_ids=(), pooled=state.tobytes())
            outputs[sequence.owner].append(output)
            ended.append((sequence, "stop"))
        return ended


def _joined(outputs: list[SequenceOutput]) -> tuple[SequenceOutput, ...]:
    """One output per sequence, as other servers expect, for a step with drafts. Only a sequence with drafts has several
    outputs. They are adjacent, and consist of new tokens.
    """
    joined: list[SequenceOutput] = []
    for sequence_id, group in groupby(outputs, key=attrgetter("sequence_id")):
        parts = list(group)
        if len(parts) == 1:
            # It can be the result of a prompt's last row.
            joined += parts
            continue
        token_ids = tuple(chain.from_iterable(part.token_ids for part in parts))
        logprobs = tuple(chain.from_iterable(part.logprobs for part in parts))
        cached_tokens = max(part.cached_tokens for part in parts)
        output = SequenceOutput(
            sequence_id=sequence_id, token_ids=token_ids, logprobs=logprobs, cached_tokens=cached_tokens
        )
        joined.append(output)
    return tuple(joined)
