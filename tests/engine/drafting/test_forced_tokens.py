from __future__ import annotations

from typing import Any

import msgspec
import pytest

from loramux.engine.constraints.grammar import Grammar
from loramux.engine.drafting.draft import Draft
from loramux.engine.drafting.forced_tokens import forced_drafts, forced_tokens
from loramux.engine.drafting.speculation import MAX_FORCED_BESIDE_OTHERS, MAX_SEQUENCES, Speculation
from loramux.engine.protocol.messages import SamplingParams
from loramux.engine.sequences.batch import ScheduledSequence
from loramux.engine.sequences.sequence import Sequence
from tests.engine.constraints.test_grammar import ALLOWED, VOCAB_SIZE, Followed
from tests.engine.drafting.test_speculation import NEW, decoding, measured, much_room, rows, with_state


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


def test_beside_other_shares_forced_tokens_get_few_rows() -> None:
    one, neighbour = forcing(*range(1, 10), share_key="one"), decoding(NEW, share_key="other")
    assert [len(tokens) for tokens in drafted(Speculation(), one, neighbour)] == [MAX_FORCED_BESIDE_OTHERS, 0]
    both = drafted(Speculation(), one, forcing(*range(1, 10), share_key="other"))
    assert sum(len(tokens) for tokens in both) == MAX_FORCED_BESIDE_OTHERS
    assert [len(tokens) for tokens in drafted(Speculation(), one, decoding(NEW, share_key="one"))] == [9, 0]


@pytest.mark.parametrize(
    ("counts", "expected"),
    [
        ([1], [1]),
        ([1, 1, 1, 2], [1, 1, 1, 2]),
        ([1, 1, 1, 2, 1], [0, 0, 0, 2, 0]),
        ([1] * 16, [0] * 16),
        ([3] * 15 + [4], [0] * 15 + [4]),
        ([5, 9] * 8, [0, 4] * 4 + [0, 0] * 4),
    ],
)
def test_a_state_is_copied_only_for_several_forced_tokens_of_a_large_step(
    counts: list[int], expected: list[int]
) -> None:
    sequences = [with_state(forcing(*range(1, count + 1))) for count in counts]
    assert [len(tokens) for tokens in drafted(Speculation(), *sequences)] == expected


def test_beside_other_shares_one_state_is_copied() -> None:
    sequences = [with_state(forcing(*range(1, count + 1), share_key=str(count))) for count in (3, 4, 9)]
    assert [len(tokens) for tokens in drafted(Speculation(), *sequences)] == [0, 0, MAX_FORCED_BESIDE_OTHERS]


def test_a_full_step_does_not_look_for_forced_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    sequences = [forcing(1, 2, 3) for _ in range(4)]
    monkeypatch.setattr(Grammar, "forced", None)
    assert drafted(Speculation(4), *sequences) == [()] * 4


def test_background_sequences_have_no_forced_rows_beside_others() -> None:
    background = forcing(1, 2, is_background=True)
    assert drafted(Speculation(), background, decoding(NEW, is_background=True)) == [(1, 2), ()]
    assert drafted(Speculation(), background, decoding(NEW)) == [(), ()]
    assert drafted(Speculation(), background, forcing(1, 2)) == [(), (1, 2)]


@pytest.mark.parametrize(
    ("sampling", "expected"),
    [
        (SamplingParams(logit_bias=((3, 1.0),)), (1, 2)),
        (SamplingParams(repetition_penalty=1.1), ()),
        (SamplingParams(frequency_penalty=0.1), ()),
    ],
)
def test_sequences_with_penalties_have_no_forced_rows(sampling: SamplingParams, expected: tuple[int, ...]) -> None:
    sequence = forcing(1, 2)
    sequence.add = msgspec.structs.replace(sequence.add, sampling=sampling)
    assert forced_tokens(sequence) == expected


def test_forced_tokens_are_cut_to_the_room_in_pages() -> None:
    sequence = forcing(1, 2, 3)
    assert forced_drafts({sequence: (1, 2, 3)}, lambda one, count: 2, 20) == {sequence: Draft((1, 2), "grammar")}
    assert forced_drafts({sequence: (1, 2, 3)}, lambda one, count: 0, 20) == {}


def test_forced_tokens_leave_room_for_the_steps_own_token() -> None:
    assert forced_tokens(forcing(1, 2, 3, max_tokens=3)) == (1, 2)
    assert forced_tokens(forcing(1, 2, 3, max_tokens=1)) == ()


def test_sequences_without_forced_tokens() -> None:
    scored = forcing(1, 2)
    scored.num_unscored = 1
    assert [forced_tokens(one) for one in (scored, forcing(1, 2, speculates=False), decoding())] == [()] * 3


@pytest.mark.parametrize(
    ("num_forced", "neighbours", "wants"),
    [
        (2, "", False),
        (3, "", True),
        (3, "a", True),
        (3, "aa", False),
        (9, "a" * 13, True),
        (9, "a" * 14, False),
        (9, "ab" + "a" * 5, True),
        (9, "ab" + "a" * 6, False),
    ],
)
def test_tokens_in_flight_are_waited_for_only_if_it_pays(num_forced: int, neighbours: str, wants: bool) -> None:
    """One letter of `neighbours` is the share of one sequence without forced tokens."""
    speculation = Speculation(guesses=False, lookahead=True)
    sequence = forcing(*range(1, num_forced + 1), share_key="a")
    # The first token is in flight, and the step chooses the second.
    sequence.num_in_flight += 1
    sequence.num_tokens += 1
    sequence.num_computed += 1
    others = [decoding(NEW, share_key=share) for share in neighbours]
    assert not any(drafted(speculation, sequence, *others))
    assert speculation.wants_known_tokens is wants


@pytest.mark.parametrize(("num_others", "expected"), [(3, (1, 2)), (4, ())])
def test_with_lookahead_few_forced_tokens_are_not_worth_a_step_with_drafts(
    num_others: int, expected: tuple[int, ...]
) -> None:
    """All tokens are known, for example after a late mask."""
    speculation, others = Speculation(guesses=False, lookahead=True), [decoding(NEW) for _ in range(num_others)]
    assert drafted(speculation, forcing(1, 2), *others)[0] == expected
    assert drafted(Speculation(guesses=False), forcing(1, 2), *others)[0] == (1, 2)


def test_forced_tokens_count_as_no_guesses() -> None:
    speculation = measured(0.1)
    speculation.note_verified(Draft((1, 2, 3), "grammar"), 2)
    speculation.note_time(1, 4, 5.0)
    counts = speculation.counts()
    assert (counts.grammar_tokens, counts.accepted_grammar_tokens) == (3, 2)
    assert (counts.text_tokens, counts.prediction_tokens, counts.wasted_s) == (0, 0, 0.0)
