"""Turns the tokens of one choice into its answer text, its reasoning and its tool calls."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from loramux.engine.text.detokenizer import Detokenizer, StopStrings, new_detokenizer
from loramux.platform.generation.plan import TextRules
from loramux.platform.tokenizer.model_tokenizer import ModelTokenizer
from loramux.platform.tool_calls.events import (
    ArgumentsEvent,
    CallBegun,
    CallEnded,
    Part,
    ReasoningEvent,
    TextEvent,
)
from loramux.platform.tool_calls.harmony import Channels, Destination


class AnswerText(Protocol):
    """The text of one choice since the last `clear`."""

    text: str
    reasoning: str
    parts: list[Part]
    """The messages of an answer in channels: `text`, `reasoning` and tool calls, in order.

    Empty for other answers. Their reasoning comes before their text, and their tool calls are part of the text.
    """
    num_reasoning: int
    """Number of reasoning tokens so far, including the markers. `clear` does not reset it."""

    @property
    def num_hidden(self) -> int:
        """Number of tokens so far that are not part of `text`: reasoning, markers, headers and calls."""

    @property
    def is_stopped(self) -> bool:
        """True if a stop string was found. No text follows it."""

    @property
    def stopped_by(self) -> str | None:
        """The stop string that was found."""

    def feed(self, token_id: int, can_stop: bool) -> None:
        """Add a token. Stop strings take effect only if `can_stop`."""

    def finish(self, *, can_stop: bool, shown_token_id: int | None, is_cut_off: bool) -> None:
        """Add the rest of the text once the engine has ended the choice.

        `shown_token_id` is the token that ended the choice, if the text includes it. `is_cut_off` is True if the choice
        reached its token limit.
        """

    def clear(self) -> None: ...


def answer_text(tokenizer: ModelTokenizer, prompt: Sequence[int], rules: TextRules) -> AnswerText:
    detokenizer = new_detokenizer(tokenizer, prompt, skip_special_tokens=rules.skip_special_tokens)
    stops = StopStrings(rules.stops, is_shown=rules.include_stop_str_in_output)
    if rules.channels is not None:
        return ChannelText(detokenizer, stops, rules.channels)
    if not rules.stops and rules.reasoning is None:
        return PlainText(detokenizer)
    return MarkedText(detokenizer, stops, rules)


class PlainText:
    """Text without stop strings or reasoning markers, so all tokens of an output can be decoded at once."""

    is_stopped = False
    stopped_by = None
    num_hidden = 0

    def __init__(self, detokenizer: Detokenizer) -> None:
        self.text = self.reasoning = ""
        self.parts: list[Part] = []
        self.num_reasoning = 0
        self._detokenizer = detokenizer

    def feed(self, token_id: int, can_stop: bool) -> None:
        self.text += self._detokenizer.feed(token_id)

    def feed_all(self, token_ids: Sequence[int]) -> None:
        self.text += self._detokenizer.feed_all(token_ids)

    def finish(self, *, can_stop: bool, shown_token_id: int | None, is_cut_off: bool) -> None:
        self.text += self._detokenizer.finish()
        if shown_token_id is not None:
            self.text += self._detokenizer.feed(shown_token_id) + self._detokenizer.finish()

    def clear(self) -> None:
        self.text = ""


class MarkedText:
    """Text with stop strings or with markers that separate the reasoning from the answer."""

    def __init__(self, detokenizer: Detokenizer, stops: StopStrings, rules: TextRules) -> None:
        self.text = self.reasoning = ""
        self.parts: list[Part] = []
        self.num_reasoning = 0
        self._detokenizer = detokenizer
        self._stops = stops
        self._splitter = rules.splitter()
        self._num_fed = 0

    @property
    def is_stopped(self) -> bool:
        return self._stops.found is not None

    @property
    def stopped_by(self) -> str | None:
        return self._stops.found

    @property
    def num_hidden(self) -> int:
        return self.num_reasoning

    def feed(self, token_id: int, can_stop: bool) -> None:
        text = self._detokenizer.feed(token_id)
        shown = self._stops.feed(text, can_stop)
        if self._splitter is None:
            self.text += shown
            return
        self._num_fed += 1
        was_reasoning = self._splitter.is_thinking
        self._add(*self._splitter.feed(shown))
        if was_reasoning or self._splitter.is_thinking:
            # Reasoning always comes first, so all tokens so far belong to it.
            self.num_reasoning = self._num_fed
        if self.is_stopped:
            self._add(*self._splitter.flush())

    def finish(self, *, can_stop: bool, shown_token_id: int | None, is_cut_off: bool) -> None:
        text = self._detokenizer.finish()
        shown = self._stops.feed(text, can_stop)
        if not self.is_stopped:
            shown += self._stops.flush()
            if shown_token_id is not None:
                shown += self._detokenizer.feed(shown_token_id) + self._detokenizer.finish()
        if self._splitter is None:
            self.text += shown
        else:
            self._add(*self._splitter.feed(shown))
            self._add(*self._splitter.flush())

    def clear(self) -> None:
        self.text = self.reasoning = ""

    def _add(self, reasoning: str, text: str) -> None:
        self.reasoning += reasoning
        self.text += text


class ChannelText:
    """An answer of several messages in channels, as in OpenAI's harmony format. Headers and markers are never shown.

    Stop strings are searched for in the text of each message. In `text` and `reasoning`, a line break separates
    messages.
    """

    def __init__(self, detokenizer: Detokenizer, stops: StopStrings, channels: Channels) -> None:
        self.text = self.reasoning = ""
        self.parts: list[Part] = []
        self.num_reasoning = 0
        self.num_hidden = 0
        self.place = channels.place
        self._detokenizer = detokenizer
        self._stops = stops
        self._channels = channels
        self._open: Destination | None = None
        """The destination of the open message. None while a header is being read."""
        self._has_text = False
        """True if the open message has text."""
        self._earlier: set[Destination] = set()
        """The destinations of earlier messages that had text, except tool calls."""
        self._num_calls = 0
        self._num_header = 0
        """Number of tokens so far in the header that is being read."""
        self._begin()

    @property
    def is_stopped(self) -> bool:
        return self._stops.found is not None

    @property
    def stopped_by(self) -> str | None:
        return self._stops.found

    def feed(self, token_id: int, can_stop: bool) -> None:
        if self._open is None:
            self._num_header += 1
        elif self._open is Destination.REASONING:
            self.num_reasoning += 1
        is_text = self._channels.format.is_text(self.place, token_id)
        if not is_text or self._open is not Destination.CONTENT:
            self.num_hidden += 1
        if is_text:
            self._add(self._detokenizer.feed(token_id), can_stop)
            return
        before, self.place = self.place, self._channels.format.after(self.place, token_id)
        if self.place is not before:
            self._end(can_stop, is_cut_off=False)
            if not self.is_stopped:
                self._begin()

    def finish(self, *, can_stop: bool, shown_token_id: int | None, is_cut_off: bool) -> None:
        self._end(can_stop, is_cut_off=is_cut_off)

    def clear(self) -> None:
        self.text = self.reasoning = ""
        self.parts.clear()

    def _begin(self) -> None:
        message = self.place.message
        if message is None:
            return
        self._open = self._channels.destination(message)
        self._has_text = False
        if self._open is Destination.REASONING:
            self.num_reasoning += self._num_header
        self._num_header = 0
        if self._open is Destination.CALL:
            assert message.function is not None
            self.parts.append(CallBegun(self._num_calls, message.function))
            self._num_calls += 1

    def _end(self, can_stop: bool, *, is_cut_off: bool) -> None:
        if self._open is None:
            return
        self._add(self._detokenizer.finish(), can_stop)
        if self.is_stopped:
            return
        self._show(self._stops.flush())
        if self._open is Destination.CALL:
            if not is_cut_off:
                if not self._has_text:
                    self._show("{}")
                self.parts.append(CallEnded(self._num_calls - 1))
        elif self._has_text:
            self._earlier.add(self._open)
        self._open = None

    def _add(self, text: str, can_stop: bool) -> None:
        self._show(self._stops.feed(text, can_stop))

    def _show(self, text: str) -> None:
        if not text:
            return
        assert self._open is not None
        separator = "\n" if not self._has_text and self._open in self._earlier else ""
        if self._open is Destination.CALL:
            self.parts.append(ArgumentsEvent(self._num_calls - 1, text))
        elif self._open is Destination.REASONING:
            self.reasoning += separator + text
            self.parts.append(ReasoningEvent(text, separator))
        else:
            self.text += separator + text
            self.parts.append(TextEvent(text, separator))
        self._has_text = True
