"""Drafts of the tokens that grammars force."""

from __future__ import annotations

from collections.abc import Mapping

from loramux.engine.drafting.draft import Draft, DraftRoom, max_drafts
from loramux.engine.sequences.sequence import Sequence


def forced_tokens(sequence: Sequence) -> tuple[int, ...]:
    """The tokens after the sequence's newest token that its grammar forces, as far as a step can verify them.

    A token in flight is the first that the grammar forces, and is left out.
    """
    # Each row of a sequence with penalties would copy the counts of all its tokens.
    if sequence.grammar is None or sequence.add.sampling.has_penalties:
        return ()
    begin = sequence.num_in_flight
    return sequence.grammar.forced[begin : begin + max_drafts(sequence)]


def forced_drafts(forced: Mapping[Sequence, tuple[int, ...]], room: DraftRoom, num_rows: int) -> dict[Sequence, Draft]:
    """Divide `num_rows` rows equally among the sequences with forced tokens.

    A forced token has a row in this step instead of one in a later step.
    """
    drafts: dict[Sequence, Draft] = {}
    # Rows that sequences with few forced tokens leave go to those with more.
    for place, (sequence, tokens) in enumerate(sorted(forced.items(), key=lambda item: len(item[1]))):
        count = room(sequence, min(len(tokens), num_rows // (len(forced) - place)))
        if count > 0:
            drafts[sequence] = Draft(tokens[:count], "grammar")
            num_rows -= count
    return drafts


def worth_copies(
    forced: Mapping[Sequence, tuple[int, ...]], num_least: int, max_copies: int
) -> dict[Sequence, tuple[int, ...]]:
    """The sequences of a hybrid decoder whose states a step copies: those with the most forced tokens, and each with at
    least `num_least`.
    """
    by_length = sorted(forced.items(), key=lambda item: len(item[1]), reverse=True)
    return {one: tokens for one, tokens in by_length[:max_copies] if len(tokens) >= num_least}
