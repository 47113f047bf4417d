"""Decides which sequences of a step get drafts, and how long the drafts are."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol

from loramux.engine.drafting.drafter import Drafter, Proposal
from loramux.engine.drafting.step_times import StepTimes
from loramux.engine.protocol.messages import DraftCounts
from loramux.engine.sequences.batch import ScheduledSequence
from loramux.engine.sequences.sequence import Sequence

MAX_SEQUENCES = 8
"""Maximum number of sequences in a step with drafts."""

MAX_ROWS = 32
"""Maximum number of rows of a step with drafts. It is the limit of recorded steps: see `recorded_decoder.py`."""

LENGTHS = (15, 10, 7, 5, 3, 2, 1)
"""Lengths of drafts to choose from. A step's drafts have one length, unless fewer tokens were proposed."""

MIN_GAIN = 1.1
"""Drafts are verified if the step then probably yields this many times the tokens in the same time."""


@dataclass(frozen=True, slots=True)
class Draft:
    """Tokens that a step verifies after the next token of a sequence."""

    tokens: tuple[int, ...]
    is_prediction: bool

    def shortened(self, num_tokens: int) -> Draft:
        return Draft(self.tokens[:num_tokens], self.is_prediction)

    def num_equal(self, chosen: Iterable[int | None]) -> int:
        """Number of the draft's tokens that equal the tokens chosen in their places, up to the first difference."""
        pairs = enumerate(zip(self.tokens, chosen, strict=False))
        return next((place for place, (drafted, token) in pairs if drafted != token), len(self.tokens))


class DraftRoom(Protocol):
    """Finds pages for the K and V of drafts: see `Scheduler.room_for_drafts`."""

    def __call__(self, sequence: Sequence, num_drafts: int) -> int: ...


class Speculation:
    """Adds drafts to steps of few decode rows, as long as this makes no sequence of the step slower.

    It compares how long steps with and without the additional rows have taken with how often each sequence's drafts
    are accepted. Beside a sequence without drafts, or with rejected drafts, only rows that take no time are added.
    """

    def __init__(self, max_rows: int = MAX_ROWS) -> None:
        self._max_rows = max_rows
        self._drafters: dict[Sequence, Drafter] = {}
        self._times = StepTimes()
        # True if the last step would have had drafts if the sequences' newest tokens had been known.
        self._is_promising = False
        self._num_drafted = [0, 0]
        self._num_accepted = [0, 0]
        self._wasted_s = 0.0
        # Of the drafts of the step that is being committed.
        self._num_rejected = 0

    @property
    def wants_known_tokens(self) -> bool:
        """True if the next step would probably have drafts if the tokens of the step in flight were known."""
        return self._is_promising

    def with_drafts(
        self, scheduled: list[ScheduledSequence], room: DraftRoom, *, others_wait: bool
    ) -> tuple[list[ScheduledSequence], dict[Sequence, Draft]]:
        """Add drafts to a step that has only decode rows. Without `others_wait`, no sequence waits to begin."""
        self._is_promising = False
        num_rows = num_decode_rows(scheduled)
        if not num_rows or others_wait:
            return scheduled, {}
        proposals: dict[Sequence, Proposal] = {}
        for item in scheduled:
            proposal = self._propose(item.sequence)
            if proposal is not None:
                proposals[item.sequence] = proposal
        length = self._best_length(num_rows, list(proposals.values()))
        if not length:
            return scheduled, {}
        if any(one.num_tokens > len(one.tokens) for one in proposals):
            self._is_promising = True
            return scheduled, {}
        drafts: dict[Sequence, Draft] = {}
        for sequence, proposal in proposals.items():
            tokens = proposal.tokens[: room(sequence, min(length, len(proposal.tokens)))]
            if tokens:
                drafts[sequence] = Draft(tokens, proposal.is_prediction)
        return [
            ScheduledSequence(item.sequence, 1, drafts[item.sequence].tokens) if item.sequence in drafts else item
            for item in scheduled
        ], drafts

    def note_verified(self, draft: Draft, num_accepted: int) -> None:
        self._num_drafted[draft.is_prediction] += len(draft.tokens)
        self._num_accepted[draft.is_prediction] += num_accepted
        self._num_rejected += len(draft.tokens) - num_accepted

    def note_time(self, num_sequences: int, num_rows: int, seconds: float) -> None:
        """Count the time of a step with one decode row for each sequence, and rows for drafts.

        Call `note_verified` first.
        """
        if self._num_rejected:
            usual = self._times.seconds(num_sequences) or seconds
            self._wasted_s += max(0.0, seconds - usual) * self._num_rejected / (num_rows - num_sequences)
            self._num_rejected = 0
        self._times.note(num_rows, seconds)

    def forget(self, sequence: Sequence) -> None:
        """The sequence has ended."""
        self._drafters.pop(sequence, None)

    def counts(self) -> DraftCounts:
        (text, prediction), (text_accepted, prediction_accepted) = self._num_drafted, self._num_accepted
        return DraftCounts(
            text_tokens=text,
            accepted_text_tokens=text_accepted,
            prediction_tokens=prediction,
            accepted_prediction_tokens=prediction_accepted,
            wasted_s=self._wasted_s,
        )

    def _propose(self, sequence: Sequence) -> Proposal | None:
        # A row of a prompt's chunk can be followed by a known token.
        if not can_speculate(sequence) or sequence.num_pending != 1:
            return None
        # The step chooses one token itself, and no token may follow the last within the limit.
        most = min(LENGTHS[0], sequence.num_reserved - sequence.num_tokens - 1)
        if most < 1:
            return None
        drafter = self._drafters.get(sequence)
        if drafter is None:
            drafter = self._drafters[sequence] = Drafter(sequence.tokens, sequence.num_prompt, sequence.add.prediction)
        return drafter.propose(most)

    def _best_length(self, num_sequences: int, proposals: list[Proposal]) -> int:
        """The length of drafts that probably yields the most tokens in the same time, or 0."""
        best, best_gain = 0, MIN_GAIN
        for length in LENGTHS:
            counts = [min(length, len(one.tokens)) for one in proposals]
            num_more = sum(counts)
            if not num_more or num_sequences + num_more > self._max_rows:
                continue
            expected = [one.expected(count) for one, count in zip(proposals, counts, strict=True)]
            ratio = self._times.ratio(num_sequences, num_more)
            least = min(expected) if len(proposals) == num_sequences else 0.0
            gain = (1 + sum(expected) / num_sequences) / ratio
            # No sequence may become slower, whatever the others gain.
            if gain > best_gain and ratio <= 1 + least:
                best, best_gain = length, gain
        return best


def can_speculate(sequence: Sequence) -> bool:
    """False if a request does not want drafts, or if its next tokens cannot be verified together.

    A grammar's mask is computed after each token. The state of a hybrid decoder cannot go back to an earlier token.
    """
    if not sequence.add.speculates or sequence.grammar is not None or sequence.state_pages:
        return False
    return not sequence.is_pooled and not sequence.num_unscored


def num_decode_rows(scheduled: list[ScheduledSequence]) -> int:
    """Number of rows of a step that may have drafts, or 0 for other steps."""
    if len(scheduled) > MAX_SEQUENCES or any(item.num_tokens != 1 for item in scheduled):
        return 0
    return sum(item.num_rows for item in scheduled)
