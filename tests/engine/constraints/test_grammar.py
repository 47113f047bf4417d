from __future__ import annotations

import math
import signal

import numpy as np
import pytest
from llguidance import LLMatcher

from loramux.engine.constraints.grammar import Grammar, Mask
from loramux.engine.constraints.grammar_messages import Follow
from loramux.engine.constraints.grammar_process import MAX_FORCED, Follower
from loramux.engine.constraints.limits import COMPILE_CPU_S, TOKEN_CPU_S, parser_limits
from tests.engine.byte_vocabulary import EOS, byte_vocabulary, ids, text
from tests.engine.constraints.forcing_grammars import FORCING
from tests.engine.constraints.masks import allowed_tokens

VOCAB_SIZE = 50
ALLOWED = b"\x06"
"""The mask of tokens 1 and 2."""


class Followed:
    """Counts what a grammar asks of its followers."""

    def __init__(self) -> None:
        self.num_follows = self.num_settled = 0

    def follow(self, grammar: Grammar) -> None:
        self.num_follows += 1

    def note_settled(self, grammar: Grammar) -> None:
        self.num_settled += 1

    def leave(self, grammar: Grammar) -> None:
        pass

    def is_awaited(self, grammar: Grammar) -> bool:
        return True

    def is_throttled(self, grammar: Grammar) -> bool:
        return False


def mask_of(grammar: Grammar, num_forced: int = 0) -> list[int] | None:
    mask = grammar.mask(num_forced)
    return None if mask is None else allowed_tokens(mask)


def mask_now(matcher: LLMatcher) -> Mask:
    return np.frombuffer(matcher.compute_bitmask(), np.uint8)


def test_forced_tokens_are_known_before_the_mask_after_them() -> None:
    followers = Followed()
    grammar = Grammar("", VOCAB_SIZE, b"", "", followers)
    assert not grammar.is_ready
    grammar.settle(ALLOWED, (7, 9))
    assert grammar.forced == (7, 9)
    assert [mask_of(grammar, count) for count in range(3)] == [[7], [9], [1, 2]]
    for token, forced, allowed in ((7, (9,), [9]), (9, (), [1, 2])):
        grammar.accept(token)
        assert (grammar.is_ready, grammar.forced, mask_of(grammar)) == (True, forced, allowed)
    assert (followers.num_follows, followers.num_settled) == (0, 2)
    grammar.accept(2)
    assert (grammar.is_ready, grammar.tokens) == (False, [7, 9, 2])
    assert (followers.num_follows, followers.num_settled) == (1, 2)


def test_a_grammar_is_complete_after_its_last_forced_token() -> None:
    grammar = Grammar("", VOCAB_SIZE, b"", "", Followed())
    grammar.settle(None, (7, 9))
    # No token can be chosen after the last.
    assert grammar.forced == (7,)
    grammar.accept(7)
    assert (grammar.forced, mask_of(grammar), grammar.has_ended) == ((), [9], False)
    grammar.accept(9)
    assert (grammar.is_complete, grammar.failure, mask_of(grammar)) == (True, None, None)


def test_a_grammar_fails_after_its_last_forced_token() -> None:
    grammar = Grammar("", VOCAB_SIZE, b"", "", Followed())
    grammar.settle(None, (7,), "too deep")
    assert (grammar.has_ended, mask_of(grammar)) == (False, [7])
    grammar.accept(7)
    assert (grammar.is_complete, grammar.failure) == (False, "too deep")


def test_a_forced_token_beyond_the_vocabulary_is_no_token() -> None:
    grammar = Grammar("", VOCAB_SIZE, b"", "", Followed())
    grammar.settle(ALLOWED, (7, VOCAB_SIZE, 9))
    assert (grammar.forced, mask_of(grammar), grammar.has_ended) == ((), [7], False)
    grammar.accept(7)
    assert grammar.failure == "no token of the model's vocabulary can follow"


def test_another_token_than_the_forced_one_ends_the_grammar() -> None:
    followers = Followed()
    grammar = Grammar("", VOCAB_SIZE, b"", "", followers)
    grammar.settle(ALLOWED, (7, 9))
    grammar.accept(3)
    assert grammar.failure is not None
    assert (followers.num_follows, followers.num_settled) == (0, 1)


def test_forced_tokens_are_those_that_masks_of_one_token_allow() -> None:
    """A fork that looks ahead finds the same masks as a matcher that follows one token at a time."""
    vocabulary, num_forced = byte_vocabulary(), 0
    for number, text_of_grammar in enumerate(FORCING.values()):
        follower = Follower(vocabulary, math.inf)
        matcher = LLMatcher(vocabulary, text_of_grammar, log_level=0, limits=parser_limits())
        message = Follow(number, (), text_of_grammar)
        for step in range(200):
            answer = follower.follow(message)
            assert answer.failure is None
            for token in answer.forced:
                assert allowed_tokens(mask_now(matcher)) == [token]
                assert matcher.consume_token(token)
            num_forced += len(answer.forced)
            if answer.mask is None:
                assert matcher.is_stopped()
                break
            assert answer.mask == matcher.compute_bitmask()
            allowed = [token for token in allowed_tokens(mask_now(matcher)) if token != EOS]
            assert len(allowed) > 1 or len(answer.forced) == MAX_FORCED
            token = allowed[step % len(allowed)]
            assert matcher.consume_token(token)
            message = Follow(number, (token,))
        else:
            raise AssertionError("the answer does not end")
    assert num_forced > 100


@pytest.mark.parametrize(("ahead_cpu_s", "looks_ahead"), [(0.0, True), (math.inf, False)])
def test_a_fork_does_not_look_ahead_without_time_or_permission(ahead_cpu_s: float, looks_ahead: bool) -> None:
    follower = Follower(byte_vocabulary(), ahead_cpu_s)
    answer = follower.follow(Follow(0, (), FORCING["one text"], looks_ahead))
    assert answer.forced == ()
    assert allowed_tokens(np.frombuffer(answer.mask or b"", np.uint8)) == ids("T")


def test_the_time_to_look_ahead_does_not_grow_with_the_forced_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    limits: list[float] = []
    monkeypatch.setattr(signal, "setitimer", lambda timer, limit_s: limits.append(limit_s))
    follower = Follower(byte_vocabulary(), math.inf)
    assert len(follower.follow(Follow(0, (), FORCING["one text"])).forced) == MAX_FORCED
    assert limits == [COMPILE_CPU_S + TOKEN_CPU_S, TOKEN_CPU_S, 0]


def test_no_more_tokens_are_followed_at_once_than_allowed() -> None:
    follower = Follower(byte_vocabulary(), math.inf)
    sentence = "There is nothing to choose in this answer."
    answer = follower.follow(Follow(0, (), FORCING["one text"]))
    assert text(list(answer.forced)) == sentence[:MAX_FORCED]
    assert answer.mask is not None
    answer = follower.follow(
        Follow(
            0,
            tuple(ids(sentence[MAX_FORCED])),
        )
    )
    assert text(list(answer.forced)) == sentence[MAX_FORCED + 1 : 2 * MAX_FORCED + 1]
