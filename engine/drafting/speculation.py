"""Decides which sequences of a step get drafts, and how long the drafts are."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from loramux.engine.drafting.draft import Draft, DraftRoom, DraftSource, max_drafts
from loramux.engine.drafting.drafter import Drafter, Proposal
from loramux.engine.drafting.forced_tokens import forced_drafts, forced_tokens, worth_copies
from loramux.engine.drafting.head_drafter import BEST_RATE, PROBE_STEPS, HeadDrafter
from loramux.engine.drafting.step_times import MAX_AGE, StepTimes, updated
from loramux.engine.protocol.messages import DraftCounts
from loramux.engine.sequences.batch import ScheduledSequence
from loramux.engine.sequences.sequence import Sequence

MAX_SEQUENCES = 8
"""Maximum number of sequences in a step with guessed drafts."""

MAX_ROWS = 32
"""Maximum number of rows of a step with drafts. It is the limit of recorded steps: see `recorded_decoder.py`."""

LENGTHS = (15, 10, 7, 5, 3, 2, 1)
"""Lengths of drafts to choose from. A step's drafts have one length, unless fewer tokens were proposed."""

MAX_FORCED_BESIDE_OTHERS = 4
"""Maximum number of rows for forced tokens in a step with sequences of several shares."""

MIN_FORCED_GAIN = 0.5
"""Minimum number of forced rows for each sequence of a step, with lookahead.

A step with drafts is committed before the next one is submitted, and often submitted after the one before is committed.
The device is idle meanwhile, which costs each sequence a part of a step. Each forced row saves a step of one sequence.
"""

MAX_SEQUENCES_PER_COPIED = 4
"""Maximum number of sequences in a step for each forced token of a copied state.

Copying 20 MB, the state of a base with 0.8 billion parameters, takes two milliseconds. Reading its weights in 4 bits
takes a step of two cores an estimated 20. A copy delays each sequence of the step, and each forced token saves one
sequence a step, so the copies take at most two fifths of what the tokens save.
"""

MAX_LOOKUP_PART = 0.01
"""Maximum part of the time of steps that is spent on looking for drafts without success."""

MAX_PAUSE = 8
"""Maximum number of steps after an unsuccessful lookup in which no drafts are looked for."""

MIN_GAIN = 1.1
"""Drafts are verified if the step then probably yields this many times the tokens in the same time."""


class Speculation:
    """Adds drafts to steps of few decode rows.

    Tokens that grammars force come first, because they are never wrong. They get few rows beside other shares, because
    they make the step longer. If there are none, and with `guesses`, tokens are guessed from the text and from
    predictions, as long as this makes no sequence of the step slower. With `has_head`, the base's own head drafts one
    token where no prediction does, and the text is not read.

    It compares how long steps with and without the additional rows have taken with how often each sequence's drafts
    are accepted. Beside a sequence without drafts, or with rejected drafts, only rows that take no time are added. In a
    hybrid decoder, a step also copies the state of each sequence with drafts, and repeats rows after rejected drafts.

    `clock` returns seconds.
    """

    def __init__(
        self,
        max_rows: int = MAX_ROWS,
        *,
        guesses: bool = True,
        lookahead: bool = False,
        has_head: bool = False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._max_rows = max_rows
        self._clock = clock
        self._lookahead = lookahead
        self.guesses = guesses
        self.has_head = has_head
        self._drafters: dict[Sequence, Drafter] = {}
        self._heads: dict[Sequence, HeadDrafter] = {}
        self._times = StepTimes()
        # The time that the head takes in steps in which it drafts, by the number of rows. The other times are without
        # the head.
        self._head_times = StepTimes()
        self._head_s = 0.0
        self.wants_head = False
        """True if the head should draft at the end of the step to which `with_drafts` has added drafts."""
        # Steps since the head has last drafted.
        self._num_without_head = 0
        # True if the last step would have had drafts if the sequences' newest tokens had been known.
        self.wants_known_tokens = False
        """True if the next step would probably have drafts if the tokens of the step in flight were known."""
        # The time that a sequence's drafts take for copies and repeated rows. The times of steps are without these.
        self._copy_s = 0.0
        # Of the step with the newest drafts: this time, and the number of copies.
        self._state_s = 0.0
        self._num_copies = 0
        # Number of steps of the same sequences in which no drafts are looked for, because steps are short and the last
        # lookup found nothing.
        self._num_paused = 0
        self._looked_for: list[Sequence] = []
        self._num_drafted: Counter[DraftSource] = Counter()
        self._num_accepted: Counter[DraftSource] = Counter()
        self._wasted_s = 0.0
        # Of the drafts of the step that is being committed.
        self._num_rejected = 0

    def with_drafts(
        self, scheduled: list[ScheduledSequence], room: DraftRoom, *, others_wait: bool
    ) -> tuple[list[ScheduledSequence], dict[Sequence, Draft]]:
        """Add drafts to a step that has only decode rows. Without `others_wait`, no sequence waits to begin."""
        self.wants_known_tokens = False
        self._state_s, self._num_copies = 0.0, 0
        room = self._measured(room)
        self.wants_head = self.has_head and not others_wait and self._head_pays(scheduled)
        drafts = self._forced(scheduled, room)
        if not drafts and self.guesses and not others_wait:
            drafts = self._guessed(scheduled, room)
        if not drafts:
            return scheduled, drafts
        return [
            ScheduledSequence(item.sequence, 1, drafts[item.sequence].tokens) if item.sequence in drafts else item
            for item in scheduled
        ], drafts

    @contextmanager
    def measuring_states(self) -> Iterator[None]:
        """Count the time of copies of states, and of repeated rows, apart from that of the step's rows."""
        started_s = self._clock()
        yield
        self._state_s += self._clock() - started_s

    def _measured(self, room: DraftRoom) -> DraftRoom:
        def find_room(sequence: Sequence, num_drafts: int) -> int:
            if not sequence.state_pages:
                return room(sequence, num_drafts)
            with self.measuring_states():
                num_drafts = room(sequence, num_drafts)
            self._num_copies += num_drafts > 0
            return num_drafts

        return find_room

    def _forced(self, scheduled: list[ScheduledSequence], room: DraftRoom) -> dict[Sequence, Draft]:
        num_rows = self._max_rows - len(scheduled)
        if num_rows <= 0:
            return {}
        # Most sequences have no grammar.
        constrained = [item.sequence for item in scheduled if item.sequence.grammar is not None]
        forced = {one: tokens for one in constrained if (tokens := forced_tokens(one))}
        if not forced or any(item.num_tokens != 1 for item in scheduled):
            return {}
        if not all(item.sequence.is_background for item in scheduled):
            forced = {one: tokens for one, tokens in forced.items() if not one.is_background}
        is_shared = len({item.sequence.share_key for item in scheduled}) > 1
        if is_shared:
            num_rows = min(num_rows, MAX_FORCED_BESIDE_OTHERS)
        if any(one.state_pages for one in forced):
            num_least = -(-len(scheduled) // MAX_SEQUENCES_PER_COPIED)
            forced = worth_copies(forced, num_least, min(1 if is_shared else num_rows, num_rows // num_least))
        # If a token is in flight, this step chooses the first forced token, and the next step can have the others.
        num_forced = sum(len(tokens) - one.num_in_flight for one, tokens in forced.items())
        if self._lookahead and min(num_rows, num_forced) < MIN_FORCED_GAIN * len(scheduled):
            return {}
        if any(one.num_in_flight for one in forced):
            self.wants_known_tokens = True
            return {}
        return forced_drafts(forced, room, num_rows)

    def _guessed(self, scheduled: list[ScheduledSequence], room: DraftRoom) -> dict[Sequence, Draft]:
        num_rows = num_decode_rows(scheduled)
        if not num_rows:
            return {}
        sequences = [item.sequence for item in scheduled]
        if self._num_paused and sequences == self._looked_for:
            self._num_paused -= 1
            return {}
        self._num_paused, self._looked_for = 0, sequences
        started_s = self._clock()
        proposals = self._proposals(scheduled)
        lookup_s = self._clock() - started_s
        length = self._best_length(num_rows, list(proposals.values())) if proposals else 0
        if not length:
            step_s = self._times.seconds(num_rows)
            if step_s and not self.has_head:
                self._num_paused = min(MAX_PAUSE, int(lookup_s / (MAX_LOOKUP_PART * step_s)))
            return {}
        if any(one.num_tokens > len(one.tokens) for one in proposals):
            self.wants_known_tokens = True
            return {}
        drafts: dict[Sequence, Draft] = {}
        for sequence, proposal in proposals.items():
            tokens = proposal.tokens[: room(sequence, min(length, len(proposal.tokens)))]
            if tokens:
                drafts[sequence] = Draft(tokens, proposal.source)
        return drafts

    def _proposals(self, scheduled: list[ScheduledSequence]) -> dict[Sequence, Proposal]:
        """The proposals for the sequences of a step, or none if the step cannot have drafts."""
        # Rows beside a sequence without drafts must take no time.
        is_free = len(scheduled) == 1 or self._ratio(len(scheduled), 1, 1) <= 1
        proposals: dict[Sequence, Proposal] = {}
        for item in scheduled:
            proposal = self._propose(item.sequence)
            if proposal is not None:
                proposals[item.sequence] = proposal
            elif not is_free:
                return {}
        return proposals

    def _head_pays(self, scheduled: list[ScheduledSequence]) -> bool:
        """True if drafts of the head for these sequences probably gain more time than they take.

        In each step, the head then drafts for the next one, which has one more row for each of the sequences.
        """
        if not num_decode_rows(scheduled):
            return False
        drafting = [item.sequence for item in scheduled if self._can_draft_with_head(item.sequence)]
        num_sequences, num_rows = len(scheduled), len(scheduled) + len(drafting)
        if not drafting or num_rows > self._max_rows:
            return False
        self._num_without_head += 1
        is_probe = self._num_without_head > PROBE_STEPS
        # A probe finds out whether the rates have risen. If even drafts that are right do not pay, it has no use.
        rates = [BEST_RATE if is_probe else self._head_of(sequence).rate for sequence in drafting]
        usual = self._times.seconds(num_sequences)
        ratio = self._times.ratio(num_sequences, len(drafting))
        if usual > 0:
            ratio += self._head_times.seconds(num_rows) / usual
        least = min(rates) if len(drafting) == num_sequences else 0.0
        return (1 + sum(rates) / num_sequences) / ratio > MIN_GAIN and ratio <= 1 + least

    def _can_draft_with_head(self, sequence: Sequence) -> bool:
        """True if the step after this one could verify a draft of the head, and does not prefer a prediction."""
        # This step chooses a token, and no token may follow the last within the limit.
        if sequence.grammar is not None or max_drafts(sequence) <= 1:
            return False
        return not sequence.add.prediction or not self._drafter_of(sequence).follows_prediction

    def _head_of(self, sequence: Sequence) -> HeadDrafter:
        found = self._heads.get(sequence)
        if found is None:
            found = self._heads[sequence] = HeadDrafter(sequence.tokens)
        return found

    def note_head(self, sequence: Sequence, drafted: int | None, source: DraftSource) -> None:
        """The head has drafted this token as the one after the sequence's newest, which is committed. None means that
        its logits were not finite.
        """
        self._head_of(sequence).note(drafted, source)

    def note_verified(self, draft: Draft, num_accepted: int) -> None:
        self._num_drafted[draft.source] += len(draft.tokens)
        self._num_accepted[draft.source] += num_accepted
        if draft.source != "grammar":
            self._num_rejected += len(draft.tokens) - num_accepted

    def note_time(
        self, num_sequences: int, num_rows: int, seconds: float, head_s: float = 0.0, *, has_drafted: bool = False
    ) -> None:
        """Count the time of a step with one decode row for each sequence, and rows for drafts. `head_s` is the part in
        which the head has stored its K and V and, with `has_drafted`, has drafted.

        Call `note_verified` first.
        """
        self._head_s += head_s
        seconds = max(0.0, seconds - head_s)
        if has_drafted:
            self._num_without_head = 0
            self._head_times.note(num_rows, head_s)
        if self._num_rejected:
            usual = self._times.seconds(num_sequences) or seconds
            self._wasted_s += max(0.0, seconds - usual) * self._num_rejected / (num_rows - num_sequences)
            self._num_rejected = 0
        if num_rows > num_sequences and self._num_copies:
            seconds = max(0.0, seconds - self._state_s)
            new = self._state_s / self._num_copies
            self._copy_s = updated(self._copy_s, new) if self._copy_s else new
        else:
            # If drafts do not pay because copies took long, the time is measured again at some point.
            self._copy_s *= 1 - 1 / MAX_AGE
        self._times.note(num_rows, seconds)

    def forget(self, sequence: Sequence) -> None:
        """The sequence has ended."""
        self._drafters.pop(sequence, None)
        self._heads.pop(sequence, None)
        self._looked_for = []

    def counts(self) -> DraftCounts:
        drafted, accepted = self._num_drafted, self._num_accepted
        return DraftCounts(
            text_tokens=drafted["text"],
            accepted_text_tokens=accepted["text"],
            prediction_tokens=drafted["prediction"],
            accepted_prediction_tokens=accepted["prediction"],
            head_tokens=drafted["head"],
            accepted_head_tokens=accepted["head"],
            drafter_tokens=drafted["drafter"],
            accepted_drafter_tokens=accepted["drafter"],
            grammar_tokens=drafted["grammar"],
            accepted_grammar_tokens=accepted["grammar"],
            wasted_s=self._wasted_s,
            head_s=self._head_s,
        )

    def _propose(self, sequence: Sequence) -> Proposal | None:
        # A grammar's mask is computed after each token, and is not known for tokens that may be wrong.
        most = 0 if sequence.grammar is not None else min(LENGTHS[0], max_drafts(sequence))
        if most < 1:
            return None
        head = self._heads.get(sequence)
        if self.has_head and not sequence.add.prediction:
            return None if head is None else head.propose()
        return self._drafter_of(sequence).propose(most) or (None if head is None else head.propose())

    def _drafter_of(self, sequence: Sequence) -> Drafter:
        found = self._drafters.get(sequence)
        if found is None:
            found = self._drafters[sequence] = Drafter(
                sequence.tokens, sequence.num_prompt, sequence.add.prediction, reads_text=not self.has_head
            )
        return found

    def _best_length(self, num_sequences: int, proposals: list[Proposal]) -> int:
        """The length of drafts that probably yields the most tokens in the same time, or 0."""
        best, best_gain = 0, MIN_GAIN
        for length in LENGTHS:
            counts = [min(length, len(one.tokens)) for one in proposals]
            num_more = sum(counts)
            if not num_more or num_sequences + num_more > self._max_rows:
                continue
            expected = [one.expected(count) for one, count in zip(proposals, counts, strict=True)]
            ratio = self._ratio(num_sequences, num_more, len(proposals))
            least = min(expected) if len(proposals) == num_sequences else 0.0
            gain = (1 + sum(expected) / num_sequences) / ratio
            # No sequence may become slower, whatever the others gain.
            if gain > best_gain and ratio <= 1 + least:
                best, best_gain = length, gain
        return best

    def _ratio(self, num_sequences: int, num_more: int, num_drafting: int) -> float:
        """How much longer a step takes with `num_more` rows for drafts of `num_drafting` sequences."""
        ratio, usual = self._times.ratio(num_sequences, num_more), self._times.seconds(num_sequences)
        return ratio + num_drafting * self._copy_s / usual if usual > 0 else ratio


def num_decode_rows(scheduled: list[ScheduledSequence]) -> int:
    """Number of rows of a step that may have guessed drafts, or 0 for other steps."""
    if len(scheduled) > MAX_SEQUENCES or any(item.num_tokens != 1 for item in scheduled):
        return 0
    return sum(item.num_rows for item in scheduled)
