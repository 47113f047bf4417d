from __future__ import annotations

from typing import Any

import pytest

from loramux.engine.drafting.draft import Draft
from loramux.engine.drafting.head_drafter import FIRST_RATE, PROBE_STEPS, HeadDrafter
from loramux.engine.drafting.speculation import Speculation
from loramux.engine.sequences.sequence import Sequence
from tests.engine.drafting.test_speculation import NEW, decoding, lengths


def test_a_draft_is_proposed_until_its_place_is_committed() -> None:
    tokens = [1, 2]
    head = HeadDrafter(tokens)
    assert head.propose() is None
    head.note(7, "head")
    proposal = head.propose()
    assert proposal is not None
    assert (proposal.tokens, proposal.source, proposal.rate) == ((7,), "head", FIRST_RATE)
    tokens.append(7)
    assert head.propose() is None
    assert head.rate > FIRST_RATE
    head.note(8, "head")
    tokens += [9, 10]
    assert head.propose() is None
    assert head.rate < FIRST_RATE


def measured(seconds_of_row: float, head_s: float) -> Speculation:
    """Speculation that has measured the times of additional rows and of the head, in steps of one row."""
    speculation = Speculation(has_head=True)
    for num_rows in (1, 2, 3, 4, 8):
        for _ in range(2):
            speculation.note_time(
                num_rows, num_rows, 1 + seconds_of_row * (num_rows - 1) + head_s, head_s, has_drafted=True
            )
    return speculation


def wants(speculation: Speculation, *sequences: Sequence, **settings: Any) -> bool:
    lengths(speculation, *sequences, **settings)
    return speculation.wants_head


@pytest.mark.parametrize(
    ("seconds_of_row", "head_s", "is_wanted"),
    [(0.05, 0.1, True), (0.05, 0.5, False), (0.5, 0.05, False), (0.0, 0.0, True)],
)
def test_the_head_drafts_if_it_gains_more_time_than_it_takes(
    seconds_of_row: float, head_s: float, is_wanted: bool
) -> None:
    assert wants(measured(seconds_of_row, head_s), decoding(NEW)) is is_wanted


def test_a_neighbour_without_drafts_is_not_slowed_down_by_the_head() -> None:
    assert not wants(measured(0.05, 0.1), decoding(NEW), decoding(NEW, speculates=False))
    assert wants(measured(0.0, 0.0), decoding(NEW), decoding(NEW, speculates=False))
    assert wants(measured(0.05, 0.1), decoding(NEW), decoding(NEW))


def test_a_head_that_is_wrong_is_tried_seldom() -> None:
    speculation, sequence = measured(0.05, 0.05), decoding(NEW, max_tokens=1000)
    tried = 0
    for number in range(200):
        if wants(speculation, sequence):
            tried += 1
            speculation.note_time(1, 1, 1.05, 0.05, has_drafted=True)
            speculation.note_head(sequence, 1000 + number, "head")
        sequence.tokens.append(number)
        sequence.num_tokens = len(sequence.tokens)
        sequence.num_computed = sequence.num_tokens - 1
    assert 200 // (PROBE_STEPS + 1) <= tried < 30
    assert speculation.counts().head_s == pytest.approx(0.05 * (tried + 10))


def test_a_draft_of_the_head_is_verified_by_the_next_step() -> None:
    speculation, sequence = measured(0.0, 0.0), decoding(NEW)
    assert lengths(speculation, sequence) == [0]
    speculation.note_head(sequence, 9, "head")
    assert lengths(speculation, sequence) == [1]
    speculation.note_verified(Draft((9,), "head"), 1)
    speculation.note_verified(Draft((9,), "drafter"), 0)
    counts = speculation.counts()
    assert (counts.head_tokens, counts.accepted_head_tokens) == (1, 1)
    assert (counts.drafter_tokens, counts.accepted_drafter_tokens) == (1, 0)
    assert lengths(speculation, sequence, others_wait=True) == [0]
    assert not speculation.wants_head


def test_a_head_whose_logits_are_not_finite_is_tried_seldom() -> None:
    speculation, sequence = measured(0.05, 0.05), decoding(NEW, max_tokens=1000)
    tried = 0
    for number in range(200):
        if wants(speculation, sequence):
            tried += 1
            speculation.note_time(1, 1, 1.05, 0.05, has_drafted=True)
            speculation.note_head(sequence, None, "head")
            assert lengths(speculation, sequence) == [0]
        sequence.tokens.append(number)
        sequence.num_tokens = len(sequence.tokens)
        sequence.num_computed = sequence.num_tokens - 1
    assert 200 // (PROBE_STEPS + 1) <= tried < 30


def test_storing_counts_as_time_of_the_head_and_not_of_rows() -> None:
    speculation, sequence = measured(0.05, 0.05), decoding(NEW)
    before = speculation.counts().head_s
    for _ in range(20):
        speculation.note_time(1, 1, 1.5, 0.5)
    assert speculation.counts().head_s == pytest.approx(before + 10)
    assert wants(speculation, sequence)


def test_a_head_that_cannot_pay_is_not_tried() -> None:
    """Not even seldom, because a right draft would not pay, or would slow down a neighbour that has none."""
    slow, quick = measured(0.05, 1.5), measured(0.05, 0.1)
    one, neighbour = decoding(NEW), decoding(NEW, speculates=False)
    assert not any(wants(slow, one) or wants(quick, one, neighbour) for _ in range(3 * PROBE_STEPS))


def test_the_head_does_not_draft_while_the_answer_follows_its_prediction() -> None:
    speculation, sequence = measured(0.0, 0.0), decoding(NEW, prediction=(50, 51, 52, 53, 54, 55))
    assert not wants(speculation, sequence)
    for token, is_wanted in ((50, False), (51, False), (7, True)):
        sequence.tokens.append(token)
        sequence.num_tokens = len(sequence.tokens)
        sequence.num_computed = sequence.num_tokens - 1
        assert wants(speculation, sequence) is is_wanted


@pytest.mark.parametrize(
    "sequence", [decoding(NEW, speculates=False), decoding(NEW, max_tokens=2), decoding(NEW, pooling="last")]
)
def test_the_head_does_not_draft_what_no_step_can_verify(sequence: Sequence) -> None:
    assert not wants(measured(0.0, 0.0), sequence)
