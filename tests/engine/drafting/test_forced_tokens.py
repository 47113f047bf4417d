from __future__ import annotations

from typing import Any

import pytest

from loramux.engine.constraints.grammar import Grammar
from loramux.engine.drafting.draft import Draft
from loramux.engine.drafting.forced_tokens import forced_drafts, forced_tokens
from loramux.engine.drafting.speculation import MAX_SEQUENCES, Speculation
from loramux.engine.sequences.batch import ScheduledSequence
from loramux.engine.sequences.sequence import Sequence, block_list
from tests.engine.constraints.test_grammar import ALLOWED, VOCAB_SIZE, Followed
from tests.engine.drafting.test_speculation import NEW, decoding, measured, much_room, rows


def forcing(*tokens: int, **fields: Any) -> Sequence:
    """A sequence whose next row is a decode row, and whose grammar forces these tokens."""
    sequence = decoding(NEW, **fields)
    sequence.grammar = Grammar("", VOCAB_SIZE, b"", "", Followed())
    sequence.grammar.settle(ALLOWED, tokens)
    return sequence


def drafted(speculation: Speculation, *sequences: Sequence, others_wait: bool = False) -> list[tuple[int, ...]]:
    scheduled, drafts = speculation.with_drafts(rows(*sequences), much_room, others_wait=others_wait)
    assert all(draft.source == "grammar" for draft in drafts.values())
    return [one.drafts for one in scheduled]


@pytest.mark.parametrize("others_wait", [False, True])
def test_forced_tokens_are_drafted_whatever_rows_cost(others_wait: bool) -> None:
    speculation = measured(10.0)
    assert drafted(speculation, forcing(1, 2, 3), decoding(), others_wait=others_wait) == [(1, 2, 3), ()]


def test_forced_tokens_are_drafted_beside_many_sequences_and_without_guesses() -> None:
    others = [decoding() for _ in range(MAX_SEQUENCES + 1)]
    found = drafted(Speculation(guesses=False), forcing(1, 2, 3), *others)
    assert found == [(1, 2, 3), *[()] * len(others)]


def test_without_guesses_only_forced_tokens_are_drafted() -> None:
    assert drafted(Speculation(guesses=False), decoding()) == [()]


def test_a_step_with_a_prompt_has_no_drafts() -> None:
    scheduled = [*rows(forcing(1, 2)), ScheduledSequence(decoding(NEW), 4)]
    assert Speculation().with_drafts(scheduled, much_room, others_wait=False) == (scheduled, {})


def test_sequences_share_the_rows_of_a_step() -> None:
    long, longer, short = forcing(*range(1, 9)), forcing(*range(1, 10)), forcing(1)
    assert [len(one) for one in drafted(Speculation(12), long, longer, short)] == [4, 4, 1]
    assert [len(one) for one in drafted(Speculation(3), long, longer, short)] == [0, 0, 0]
    assert [len(one) for one in drafted(Speculation(4), long, longer, short)] == [0, 1, 0]


def test_forced_tokens_are_cut_to_the_room_in_pages() -> None:
    sequence = forcing(1, 2, 3)
    assert forced_drafts({sequence: (1, 2, 3)}, lambda one, count: 2, 20) == {sequence: Draft((1, 2), "grammar")}
    assert forced_drafts({sequence: (1, 2, 3)}, lambda one, count: 0, 20) == {}


def test_forced_tokens_leave_room_for_the_steps_own_token() -> None:
    assert forced_tokens(forcing(1, 2, 3, max_tokens=3)) == (1, 2)
    assert forced_tokens(forcing(1, 2, 3, max_tokens=1)) == ()


def test_sequences_without_forced_tokens() -> None:
    hybrid, scored = forcing(1, 2), forcing(1, 2)
    hybrid.state_pages = block_list([3])
    scored.num_unscored = 1
    assert [forced_tokens(one) for one in (hybrid, scored, forcing(1, 2, speculates=False), decoding())] == [()] * 4


def test_tokens_in_flight_are_waited_for_only_if_drafts_would_follow() -> None:
    for tokens, wants in (((1, 2, 3), True), ((1, 2), False)):
        speculation, sequence = Speculation(guesses=False), forcing(*tokens)
        # The first token is in flight, and the step chooses the second.
        sequence.num_in_flight += 1
        sequence.num_tokens += 1
        sequence.num_computed += 1
        assert drafted(speculation, sequence) == [()]
        assert speculation.wants_known_tokens is wants


def test_forced_tokens_count_as_no_guesses() -> None:
    speculation = measured(0.1)
    speculation.note_verified(Draft((1, 2, 3), "grammar"), 2)
    speculation.note_time(1, 4, 5.0)
    counts = speculation.counts()
    assert (counts.grammar_tokens, counts.accepted_grammar_tokens) == (3, 2)
    assert (counts.text_tokens, counts.prediction_tokens, counts.wasted_s) == (0, 0, 0.0)
