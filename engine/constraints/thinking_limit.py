"""Ends a model's thinking after a number of tokens."""

from __future__ import annotations

import copy

from loramux.engine.protocol.messages import ThinkingBudget

MAX_LEADING_TOKENS = 4
"""Maximum number of tokens, such as line breaks, between the start of an answer and its begin marker."""


class ThinkingLimit:
    """Follows one sequence's thinking and forces its end marker once the budget is used up.

    `tokens` is the sequence's own list, prompt first, which grows as tokens are committed. The thinking has begun if
    the prompt opened it or the answer starts with the begin marker. It ends with the end marker and does not begin
    again.
    """

    def __init__(self, budget: ThinkingBudget, tokens: list[int], num_prompt: int) -> None:
        self._num_tokens = budget.num_tokens
        self._begin = list(budget.begin)
        self._end = list(budget.end)
        self._tokens = tokens
        self._num_prompt = self._num_read = num_prompt
        self._start = num_prompt if budget.is_open else None
        """Position of the first thinking token. None if the thinking has not begun."""
        self._is_over = False

    def following(self, tokens: list[int]) -> ThinkingLimit:
        """A copy that follows `tokens`, which begin with the tokens followed so far."""
        other = copy.copy(self)
        other._tokens = tokens
        return other

    def forced_token(self) -> int | None:
        """Return the next token of the end marker if the budget is used up, otherwise None."""
        while self._num_read < len(self._tokens) and not self._is_over:
            self._num_read += 1
            self._read(self._num_read)
        if self._is_over or self._start is None or len(self._tokens) - self._start < self._num_tokens:
            return None
        # The model may have written the beginning of the marker itself.
        lengths = range(len(self._end) - 1, 0, -1)
        written = next((n for n in lengths if self._ends_with(self._end[:n], self._start, len(self._tokens))), 0)
        return self._end[written]

    def _read(self, position: int) -> None:
        """Record whether a marker ends before `position`."""
        if self._start is not None:
            self._is_over = self._ends_with(self._end, self._start, position)
        elif self._ends_with(self._begin, self._num_prompt, position):
            self._start = position
        else:
            self._is_over = position - self._num_prompt >= MAX_LEADING_TOKENS + len(self._begin)

    def _ends_with(self, marker: list[int], start: int, end: int) -> bool:
        return end - len(marker) >= start and self._tokens[end - len(marker) : end] == marker
