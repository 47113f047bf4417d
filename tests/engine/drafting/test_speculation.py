from __future__ import annotations

from functools import partial
from itertools import count
from typing import Any

import pytest

from loramux.engine.drafting.draft import Draft
from loramux.engine.drafting.speculation import (
    LENGTHS,
    MAX_LOOKUP_PART,
    MAX_PAUSE,
    MAX_SEQUENCES,
    Speculation,
)
from loramux.engine.drafting.step_times import MAX_AGE
from loramux.engine.protocol.messages import Add, SamplingParams
from loramux.engine.sequences.batch import ScheduledSequence
from loramux.engine.sequences.sequence import Sequence, block_list

REPEATING = (1, 2, 3, 4, 5, 6, 7, 8) * 6
NEW = tuple(range(100, 148))


def decoding(prompt: tuple[int, ...] = REPEATING, max_tokens: int = 100, **fields: Any) -> Sequence:
    """A sequence whose next row is a decode row."""
    add = Add(sequence_id="", prompt=prompt, max_tokens=max_tokens, sampling=SamplingParams(), **fields)
    sequence = Sequence(add=add, owner=b"", arrival=0, seed=0)
    sequence.num_computed = sequence.num_tokens - 1
    return sequence


def with_state(sequence: Sequence) -> Sequence:
    """The sequence on a hybrid decoder."""
    sequence.state_pages = block_list([7])
    return sequence


def rows(*sequences: Sequence) -> list[ScheduledSequence]:
    return [ScheduledSequence(one, 1) for one in sequences]


def much_room(sequence: Sequence, num_drafts: int) -> int:
    return num_drafts


def lengths(
    speculation: Speculation, *sequences: Sequence, room: Any = much_room, others_wait: bool = False
) -> list[int]:
    scheduled, drafts = speculation.with_drafts(rows(*sequences), room, others_wait=others_wait)
    assert [one.sequence for one in scheduled] == list(sequences)
    assert {one.sequence: one.drafts for one in scheduled if one.drafts} == {
        sequence: draft.tokens for sequence, draft in drafts.items()
    }
    return [len(one.drafts) for one in scheduled]


def measured(seconds_of_row: float) -> Speculation:
    """Speculation that has measured that each further row takes this part of a step of one row."""
    speculation = Speculation()
    for num_rows in (1, 2, 3, 4, 8, 16, 32):
        for _ in range(2):
            speculation.note_time(num_rows, num_rows, 1 + seconds_of_row * (num_rows - 1))
    return speculation


def test_a_repeating_text_gets_long_drafts_if_rows_are_cheap() -> None:
    assert lengths(measured(0.01), decoding()) == [LENGTHS[0]]


LOOKUP_S = 2**-14


def ticking() -> Speculation:
    """Speculation whose lookups take LOOKUP_S."""
    return Speculation(clock=partial(next, count(step=LOOKUP_S)))


def steps_until_drafts(step_s: float) -> int:
    """Number of steps until a text that begins to repeat itself after a lookup gets drafts."""
    speculation, sequence = ticking(), decoding(NEW)
    for _ in range(2):
        speculation.note_time(1, 1, step_s)
        speculation.note_time(16, 16, step_s)
    assert lengths(speculation, sequence) == [0]
    sequence.tokens += NEW[:9]
    sequence.num_tokens += 9
    sequence.num_computed += 9
    return next(number for number in range(99) if lengths(speculation, sequence) != [0])


def test_short_steps_look_for_drafts_less_often() -> None:
    steps_s = [factor * LOOKUP_S / MAX_LOOKUP_PART for factor in (100, 1.1, 0.19, 0.001)]
    assert [steps_until_drafts(step_s) for step_s in steps_s] == [0, 0, 5, MAX_PAUSE]


def test_another_sequence_is_looked_up_at_once() -> None:
    speculation = ticking()
    for num_rows in (1, 1, 16, 16):
        speculation.note_time(num_rows, num_rows, LOOKUP_S)
    assert lengths(speculation, decoding(NEW)) == [0]
    assert lengths(speculation, decoding(NEW, prediction=REPEATING)) != [0]


@pytest.mark.parametrize(("copy_s", "is_drafting"), [(6.0, False), (0.3, True)])
def test_each_copied_state_takes_time(copy_s: float, *, is_drafting: bool) -> None:
    """A step of one sequence with 15 drafts and a copy tells little about eight sequences with copies."""
    now_s = 0.0

    def copies(sequence: Sequence, num_drafts: int) -> int:
        nonlocal now_s
        now_s += copy_s
        return num_drafts

    speculation = Speculation(clock=lambda: now_s)
    for _ in range(4):
        assert lengths(speculation, with_state(decoding()), room=copies) == [15]
        speculation.note_time(1, 16, 20 + 0.1 * 16 + copy_s)
        assert lengths(speculation, with_state(decoding(NEW))) == [0]
        speculation.note_time(8, 8, 20 + 0.1 * 8)
    sequences = [with_state(decoding()) for _ in range(8)]
    assert any(lengths(speculation, *sequences)) is is_drafting
    # No copy may delay a sequence without drafts.
    assert not any(lengths(speculation, *sequences[:7], with_state(decoding(NEW))))


def test_slow_copies_are_tried_again() -> None:
    now_s = 0.0

    def copies(sequence: Sequence, num_drafts: int) -> int:
        nonlocal now_s
        now_s += 50.0
        return num_drafts

    speculation, sequence = Speculation(clock=lambda: now_s), with_state(decoding())
    for _ in range(2):
        speculation.note_time(1, 1, 1.0)
        speculation.note_time(16, 16, 1.0)
    assert lengths(speculation, sequence, room=copies) != [0]
    speculation.note_time(1, 16, 51.0)
    assert lengths(speculation, sequence) == [0]
    for _ in range(4 * MAX_AGE):
        speculation.note_time(1, 1, 1.0)
        if lengths(speculation, sequence) != [0]:
            return
    raise AssertionError("no drafts")


def test_drafts_are_shorter_if_rows_take_time_and_absent_if_they_do_not_pay() -> None:
    found = [lengths(measured(cost), decoding())[0] for cost in (0.01, 0.2, 0.5, 1.0)]
    assert found == sorted(found, reverse=True)
    assert 0 < found[1] < LENGTHS[0]
    assert found[-1] == 0


def test_a_neighbour_without_drafts_is_not_slowed_down() -> None:
    assert lengths(measured(0.2), decoding(), decoding(NEW)) == [0, 0]
    assert lengths(measured(0.2), decoding(), decoding()) != [0, 0]
    drafted, other = lengths(measured(0.0), decoding(), decoding(NEW))
    assert drafted > 0
    assert other == 0


def test_rejected_drafts_end_drafting_and_right_guesses_resume_it() -> None:
    speculation, sequence = measured(0.3), decoding(max_tokens=1000)
    assert lengths(speculation, sequence) != [0]
    for number in range(20):
        sequence.tokens += [500 + number, 1, 2, 3]
        sequence.num_tokens = len(sequence.tokens)
        sequence.num_computed = sequence.num_tokens - 1
        found = lengths(speculation, sequence)
    assert found == [0]
    # The text repeats itself again. No draft is verified, but guesses are compared with what comes next.
    for number in range(40):
        sequence.tokens.append(number % 8 + 1)
        sequence.num_tokens = len(sequence.tokens)
        sequence.num_computed = sequence.num_tokens - 1
        found = lengths(speculation, sequence)
    assert found != [0]


@pytest.mark.parametrize(
    "sequence",
    [
        decoding(speculates=False),
        decoding(NEW),
        decoding(max_tokens=1),
        decoding(pooling="last"),
    ],
    ids=["refused", "new text", "last token", "pooled"],
)
def test_sequences_without_drafts(sequence: Sequence) -> None:
    assert lengths(measured(0.0), sequence) == [0]


def test_drafts_leave_room_for_the_steps_own_token() -> None:
    assert lengths(measured(0.0), decoding(max_tokens=4)) == [3]


def test_a_row_within_a_prompt_has_no_draft() -> None:
    sequence = decoding()
    sequence.num_computed -= 1
    assert lengths(measured(0.0), sequence) == [0]


def test_steps_with_prompts_waiting_requests_or_many_rows_have_no_drafts() -> None:
    speculation = measured(0.0)
    scheduled = [*rows(decoding()), ScheduledSequence(decoding(NEW), 4)]
    assert speculation.with_drafts(scheduled, much_room, others_wait=False) == (scheduled, {})
    assert lengths(speculation, decoding(), others_wait=True) == [0]
    many = [decoding() for _ in range(MAX_SEQUENCES + 1)]
    assert not any(lengths(speculation, *many))
    assert any(lengths(speculation, *many[1:]))


def test_drafts_are_cut_to_the_room_in_pages() -> None:
    assert lengths(measured(0.0), decoding(), room=lambda sequence, count: 2) == [2]
    assert lengths(measured(0.0), decoding(), room=lambda sequence, count: 0) == [0]


def test_a_step_has_at_most_the_allowed_rows() -> None:
    speculation = Speculation(max_rows=9)
    assert sum(lengths(speculation, *[decoding() for _ in range(3)])) <= 6


def test_tokens_in_flight_are_waited_for_only_if_drafts_would_follow() -> None:
    speculation, sequence = measured(0.0), decoding()
    assert not speculation.wants_known_tokens
    sequence.num_tokens += 1
    sequence.num_computed += 1
    assert lengths(speculation, sequence) == [0]
    assert speculation.wants_known_tokens
    assert lengths(speculation, decoding(NEW)) == [0]
    assert not speculation.wants_known_tokens


def test_counts_and_wasted_time() -> None:
    speculation = measured(0.1)
    speculation.note_verified(Draft((1, 2, 3, 4), source="text"), 1)
    speculation.note_time(1, 5, 1.4)
    speculation.note_verified(Draft((1, 2), source="prediction"), 2)
    speculation.note_time(1, 3, 1.2)
    counts = speculation.counts()
    assert (counts.text_tokens, counts.accepted_text_tokens) == (4, 1)
    assert (counts.prediction_tokens, counts.accepted_prediction_tokens) == (2, 2)
    # Three of the four rows, which took 0.4 seconds together.
    assert counts.wasted_s == pytest.approx(0.3)


def test_a_draft_is_accepted_up_to_the_first_difference() -> None:
    draft = Draft((1, 2, 3), source="text")
    assert [draft.num_equal(chosen) for chosen in ([9, 2, 3, 4], [1, 2, 9, 4], [1, 2, 3, 4], [1, None])] == [0, 2, 3, 1]
