from __future__ import annotations

from loramux.engine.drafting.drafter import FIRST_RATES, Drafter


def drafted(drafter: Drafter, max_tokens: int = 4) -> tuple[int, ...]:
    proposal = drafter.propose(max_tokens)
    return () if proposal is None else proposal.tokens


def test_a_text_that_repeats_itself_is_continued() -> None:
    tokens = [1, 2, 3, 4, 5, 6, 7, 1, 2, 3]
    assert drafted(Drafter(tokens, num_prompt=7)) == (4, 5, 6, 7)


def test_a_period_goes_on_beyond_the_end() -> None:
    tokens = [7, 1, 2, 1, 2, 1, 2]
    assert drafted(Drafter(tokens, num_prompt=7), 7) == (1, 2, 1, 2, 1, 2, 1)


def test_new_text_has_no_draft() -> None:
    assert drafted(Drafter(list(range(50)), num_prompt=50)) == ()
    assert drafted(Drafter([1], num_prompt=1)) == ()


def test_a_draft_has_at_most_the_wanted_tokens() -> None:
    tokens = [1, 2, 3, 4, 5, 6, 1, 2, 3]
    drafter = Drafter(tokens, num_prompt=9, prediction=(8, 9, 8))
    assert drafted(drafter, 1) == (8,)


def test_a_prediction_is_drafted_from_its_beginning() -> None:
    tokens = [1, 2]
    drafter = Drafter(tokens, num_prompt=2, prediction=(5, 6, 7, 8, 9))
    assert drafted(drafter) == (5, 6, 7, 8)
    tokens += [5, 6, 7]
    assert drafted(drafter) == (8, 9)
    tokens += [8, 9]
    assert drafted(drafter) == ()


def test_a_prediction_is_found_again_after_a_divergence() -> None:
    tokens = [1]
    drafter = Drafter(tokens, num_prompt=1, prediction=(10, 11, 12, 13, 14, 15, 16))
    assert drafted(drafter) == (10, 11, 12, 13)
    tokens += [10, 99]
    assert drafted(drafter) == ()
    tokens += [12, 13]
    assert drafted(drafter) == ()
    tokens += [14]
    proposal = drafter.propose(4)
    assert proposal is not None
    assert (proposal.tokens, proposal.source) == ((15, 16), "prediction")


def test_rates_follow_what_is_committed() -> None:
    tokens = [1, 2, 3, 4, 1, 2, 3]
    drafter = Drafter(tokens, num_prompt=7)
    proposal = drafter.propose(4)
    assert proposal is not None
    assert proposal.rate == FIRST_RATES[proposal.kind]
    for _ in range(12):
        # The tokens that the drafts propose: whether a step verified them does not matter.
        tokens.append(tokens[-4])
        proposal = drafter.propose(4)
    assert proposal is not None
    right = proposal.rate
    assert right > FIRST_RATES[proposal.kind]
    tokens[-1:] = [tokens[-1], 50, 1, 2, 3]
    wrong = drafter.propose(4)
    assert wrong is not None
    for number in range(60, 90):
        tokens += [number, 1, 2, 3]
        wrong = drafter.propose(4)
    assert wrong is not None
    assert wrong.rate < FIRST_RATES[0] / 4


def test_expected_tokens_grow_with_the_length_and_stay_below_it() -> None:
    proposal = Drafter([1, 2, 3, 4, 1, 2, 3], num_prompt=7).propose(4)
    assert proposal is not None
    counts = [proposal.expected(length) for length in range(1, 5)]
    assert counts[0] == proposal.rate
    assert counts == sorted(counts)
    assert counts[-1] < proposal.rate / (1 - proposal.rate)


def test_a_long_prompt_is_indexed_over_several_steps() -> None:
    tokens = [*range(100, 5000), *range(100, 110)]
    drafter = Drafter(tokens, num_prompt=len(tokens))
    found = [drafted(drafter) for _ in range(6)]
    assert found[-1] == (110, 111, 112, 113)
