"""Turns the engine's tokens for one choice into text, applies stop strings, and counts the tokens."""

from __future__ import annotations

from dataclasses import dataclass

import msgspec

from loramux.engine.protocol.messages import Add, Finished, PromptLogprob, SequenceOutput, TokenLogprobs
from loramux.platform.generation.answer_text import PlainText, answer_text
from loramux.platform.generation.plan import TextRules
from loramux.platform.tokenizer.model_tokenizer import ModelTokenizer
from loramux.platform.tool_calls.events import Part, joined_parts


@dataclass(frozen=True, slots=True)
class TextToken:
    """The text that became certain with a token, and the token's log-probabilities.

    These are None for text that came with the reasoning, with markers, or at the end of the choice.
    """

    text: str
    logprobs: TokenLogprobs | None


class ChoiceDelta(msgspec.Struct, frozen=True):
    """New output of a choice. One is made for almost every token, and a dataclass takes several times as long."""

    index: int
    text: str
    logprobs: tuple[TokenLogprobs, ...]
    finish_reason: str | None
    token_ids: tuple[int, ...] = ()
    """The new tokens, including a token that ended the choice. Their text can be in a later delta."""
    reasoning: str = ""
    """New text of the model's reasoning."""
    prompt_logprobs: tuple[PromptLogprob, ...] = ()
    """Log-probabilities of the prompt's tokens, starting with the second, if this choice scores the prompt."""
    parts: tuple[Part, ...] = ()
    """See `AnswerText.parts`."""
    stop_reason: str | int | None = None
    """The stop string, or the ID of the stop token in `TextRules.stop_token_ids`, that ended the choice."""
    pooled: bytes = b""
    """The prompt's pooled state if the request asks for it: see `SequenceOutput.pooled`."""
    text_tokens: tuple[TextToken, ...] = ()
    """The tokens of `text`, which can be tokens of earlier deltas, if log-probabilities were requested. Unlike
    `logprobs`, they leave out the reasoning, markers, and a stop token that is not shown.
    """

    @property
    def is_text(self) -> bool:
        """True if the delta adds only text to the choice's message, and does not end the choice."""
        return bool(self.text) and not self.reasoning and not self.parts and self.finish_reason is None


class Choice:
    """Consumes tokens from the engine's stream until `is_done`."""

    def __init__(self, index: int, add: Add, tokenizer: ModelTokenizer, rules: TextRules) -> None:
        self.index = index
        self.add = add
        self._answer = answer_text(tokenizer, add.prompt, rules)
        self._shows_stop = rules.include_stop_str_in_output
        self._stop_token_ids = rules.stop_token_ids
        self._only_prompt = rules.only_prompt
        self._prompt_logprobs: list[PromptLogprob] = []
        self._pooled = b""
        # Stop strings take effect only after this many tokens, as in vLLM.
        self._min_tokens = add.sampling.min_tokens
        # Tokens that are in no delta yet, because their text was held back.
        self._unreported: list[int] = []
        self._text_tokens: list[TextToken] = []
        """Tokens of the text that are in no delta yet, because their text was held back."""
        self.num_received = 0
        self.keep: int | None = 0 if rules.only_prompt else None
        """Maximum number of tokens to bill, or None for all.

        After a stop string, this is the number of tokens up to and including the token that completed the string. It is
        0 if the request asks only for the prompt.
        """
        self.finished: Finished | None = None
        self._cached_tokens = 0
        self._is_given_up = False
        self.is_done = False
        """True if the last delta has been returned."""

    def feed(self, output: SequenceOutput) -> ChoiceDelta | None:
        """Return the text and log-probabilities that `output` adds, or None if it adds nothing.

        Tokens after a stop string add nothing.
        """
        if self.is_done:
            return None
        self._cached_tokens = max(self._cached_tokens, output.cached_tokens)
        self._prompt_logprobs += output.prompt_logprobs
        self._pooled += output.pooled
        if self._only_prompt and output.token_ids:
            self.num_received += len(output.token_ids)
            return self._last((), "length")
        answer = self._answer
        if isinstance(answer, PlainText) and not output.logprobs:
            self.num_received += len(output.token_ids)
            self._unreported += output.token_ids
            answer.feed_all(output.token_ids)
            return self._delta((), None) if answer.text else None
        for position, token_id in enumerate(output.token_ids):
            self.num_received += 1
            self._unreported.append(token_id)
            num_hidden, num_characters = answer.num_hidden, len(answer.text)
            answer.feed(token_id, self.num_received > self._min_tokens)
            if output.logprobs:
                self._text_tokens.append(TextToken(answer.text[num_characters:], output.logprobs[position]))
                # A marker of several tokens is known only when it is complete.
                if answer.num_hidden > num_hidden:
                    hidden = slice(num_hidden - answer.num_hidden, None)
                    shown = [TextToken(one.text, None) for one in self._text_tokens[hidden] if one.text]
                    self._text_tokens[hidden] = shown
            if answer.is_stopped:
                self.keep = self.num_received
                return self._last(output.logprobs[: position + 1], "stop", answer.stopped_by)
        if not (answer.text or answer.reasoning or answer.parts or output.logprobs):
            return None
        return self._delta(output.logprobs, None)

    def finish(self, finished: Finished) -> ChoiceDelta | None:
        self.finished = finished
        if self.is_done or finished.reason not in ("stop", "length"):
            return None
        if self._only_prompt:
            return self._last((), "length")
        self._answer.finish(
            can_stop=self.num_received > self._min_tokens,
            shown_token_id=finished.stop_token_id if self._shows_stop else None,
            is_cut_off=finished.reason == "length",
        )
        if self._answer.is_stopped:
            self.keep = self.num_received
            return self._last((), "stop", self._answer.stopped_by)
        token_id = finished.stop_token_id
        if token_id is not None:
            self._unreported.append(token_id)
        logprobs = () if finished.stop_logprobs is None else (finished.stop_logprobs,)
        if self._shows_stop and finished.stop_logprobs is not None:
            self._text_tokens.append(TextToken("", finished.stop_logprobs))
        return self._last(logprobs, finished.reason, token_id if token_id in self._stop_token_ids else None)

    def give_up(self) -> None:
        """Record that the engine never reported this choice's end. The prompt and the received tokens are charged."""
        self._is_given_up = True

    @property
    def was_in_step(self) -> bool:
        """True if a step of the engine included the choice, even if the choice then failed and costs nothing."""
        return self.num_received > 0 or (self.finished is not None and self.finished.prompt_tokens > 0)

    @property
    def has_run(self) -> bool:
        """True if the engine ran the choice. A choice can fail or be aborted before it runs."""
        if self.num_received or self._is_given_up:
            return True
        finished = self.finished
        return finished is not None and (
            finished.completion_tokens > 0 or (finished.reason != "error" and finished.prompt_tokens > 0)
        )

    @property
    def prompt_tokens(self) -> int:
        if not self.has_run:
            return 0
        # A server whose engine died does not know whether a sequence had begun, but its tokens prove that it had.
        if self.finished is None or self.num_received:
            return len(self.add.prompt)
        return self.finished.prompt_tokens

    @property
    def completion_tokens(self) -> int:
        """Number of generated tokens to charge: the committed tokens, but at most `keep`."""
        return self._num_committed if self.keep is None else min(self._num_committed, self.keep)

    @property
    def discarded_tokens(self) -> int:
        """Number of committed tokens that are not charged."""
        return self._num_committed - self.completion_tokens

    @property
    def _num_committed(self) -> int:
        """The engine's count, or the received tokens if the engine reported no count."""
        if self.finished is None:
            return self.num_received
        # A lost engine reports no token that it had not sent before.
        return max(self.num_received, self.finished.completion_tokens)

    @property
    def cached_tokens(self) -> int:
        # The final report can be late, and a lost engine sends none.
        return self._cached_tokens if self.finished is None else max(self._cached_tokens, self.finished.cached_tokens)

    @property
    def accepted_prediction_tokens(self) -> int:
        """Number of charged tokens that were drafted from the prediction. The engine may have accepted more, after a
        stop string.
        """
        return 0 if self.finished is None else min(self.finished.accepted_prediction_tokens, self.completion_tokens)

    @property
    def rejected_prediction_tokens(self) -> int:
        """Number of tokens that were drafted from the prediction and are not charged."""
        if self.finished is None:
            return 0
        drafted = self.finished.accepted_prediction_tokens + self.finished.rejected_prediction_tokens
        return drafted - self.accepted_prediction_tokens

    @property
    def num_reasoning(self) -> int:
        """Number of received reasoning tokens, including the markers."""
        return self._answer.num_reasoning

    def _delta(
        self,
        logprobs: tuple[TokenLogprobs, ...],
        finish_reason: str | None,
        stop_reason: str | int | None = None,
    ) -> ChoiceDelta:
        token_ids = tuple(self._unreported)
        self._unreported.clear()
        prompt_logprobs = tuple(self._prompt_logprobs)
        self._prompt_logprobs.clear()
        answer = self._answer
        text_tokens: tuple[TextToken, ...] = ()
        if self._text_tokens and (answer.text or finish_reason is not None):
            rest = answer.text[sum(len(token.text) for token in self._text_tokens) :]
            text_tokens = (*self._text_tokens, *([TextToken(rest, None)] if rest else ()))
            self._text_tokens.clear()
        delta = ChoiceDelta(
            self.index,
            answer.text,
            logprobs,
            finish_reason,
            token_ids,
            answer.reasoning,
            prompt_logprobs,
            joined_parts(answer.parts) if answer.parts else (),
            stop_reason,
            self._pooled,
            text_tokens,
        )
        answer.clear()
        return delta

    def _last(
        self, logprobs: tuple[TokenLogprobs, ...], finish_reason: str, stop_reason: str | int | None = None
    ) -> ChoiceDelta:
        self.is_done = True
        return self._delta(logprobs, finish_reason, stop_reason)
