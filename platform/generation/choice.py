"""One choice of one prompt: turns the engine's tokens into text, applies stop strings, and counts its tokens."""

from __future__ import annotations

from dataclasses import dataclass

from loramux.engine.messages import Add, Finished, PromptLogprob, SequenceOutput, TokenLogprobs
from loramux.platform.generation.plan import TextRules
from loramux.platform.tokenizer.detokenizer import StopStrings, new_detokenizer
from loramux.platform.tokenizer.model_tokenizer import ModelTokenizer


@dataclass(frozen=True, slots=True)
class ChoiceDelta:
    index: int
    text: str
    logprobs: tuple[TokenLogprobs, ...]
    finish_reason: str | None
    token_ids: tuple[int, ...] = ()
    """The new tokens, including one that ended the choice. Their text can be in a later delta."""
    reasoning: str = ""
    """New text of the model's reasoning, which precedes the answer's text."""
    prompt_logprobs: tuple[PromptLogprob, ...] = ()
    """Log-probabilities of the prompt's tokens from the second on, if the choice's sequence scores the prompt."""


class Choice:
    """Consumes tokens from the engine's stream until `is_done`."""

    def __init__(self, index: int, add: Add, tokenizer: ModelTokenizer, rules: TextRules) -> None:
        self.index = index
        self.add = add
        self._detokenizer = new_detokenizer(tokenizer, add.prompt, skip_special_tokens=rules.skip_special_tokens)
        self._stops = StopStrings(rules.stops, is_shown=rules.include_stop_str_in_output)
        self._shows_stop = rules.include_stop_str_in_output
        self._reasoning = rules.splitter()
        self.num_reasoning = 0
        """Number of received reasoning tokens, including the markers."""
        self._only_prompt = rules.only_prompt
        self._prompt_logprobs: list[PromptLogprob] = []
        self._min_tokens = add.sampling.min_tokens
        # Tokens that are in no delta yet, because their text was held back.
        self._unreported: list[int] = []
        self.num_received = 0
        self.keep: int | None = 0 if rules.only_prompt else None
        """Number of tokens to bill if a stop string ended the choice: up to and
        including the token that completed it.
        """
        self.finished: Finished | None = None
        self._is_given_up = False
        self.is_done = False
        """True if the last delta has been produced: a stop string was found or the engine finished successfully."""

    def feed(self, output: SequenceOutput) -> ChoiceDelta | None:
        """Return the text and log-probabilities that these tokens add, or None.
        Tokens after a stop string add nothing.
        """
        if self.is_done:
            return None
        self._prompt_logprobs += output.prompt_logprobs
        if self._only_prompt and output.token_ids:
            self.num_received += len(output.token_ids)
            return self._last("", "", (), "length")
        reasoning = text = ""
        for position, token_id in enumerate(output.token_ids):
            self.num_received += 1
            self._unreported.append(token_id)
            was_reasoning = self._is_reasoning
            more_reasoning, more_text = self._split(self._shown(self._detokenizer.feed(token_id)))
            if was_reasoning or self._is_reasoning:
                # Reasoning can only come first.
                self.num_reasoning = self.num_received
            reasoning, text = reasoning + more_reasoning, text + more_text
            if self._stops.is_found:
                self.keep = self.num_received
                return self._last(reasoning, text, output.logprobs[: position + 1], "stop")
        if not reasoning and not text and not output.logprobs:
            return None
        return self._delta(reasoning, text, output.logprobs, None)

    def finish(self, finished: Finished) -> ChoiceDelta | None:
        self.finished = finished
        if self.is_done or finished.reason not in ("stop", "length"):
            return None
        if self._only_prompt:
            return self._last("", "", (), "length")
        shown = self._shown(self._detokenizer.finish())
        if self._stops.is_found:
            self.keep = self.num_received
            return self._last(*self._split(shown), (), "stop")
        shown += self._stops.flush()
        if finished.stop_token_id is not None:
            self._unreported.append(finished.stop_token_id)
            if self._shows_stop:
                shown += self._detokenizer.feed(finished.stop_token_id) + self._detokenizer.finish()
        return self._last(*self._split(shown), (), finished.reason)

    def give_up(self) -> None:
        """Record that the engine never reported the end. The prompt and the received tokens are charged."""
        self._is_given_up = True

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
        return len(self.add.prompt) if self.finished is None else self.finished.prompt_tokens

    @property
    def completion_tokens(self) -> int:
        """Number of generated tokens to charge: the engine's count, or the received tokens if the engine reported no
        count.
        """
        finished = self.finished
        if finished is None:
            committed = self.num_received
        elif finished.reason == "error":
            committed = max(self.num_received, finished.completion_tokens)
        else:
            committed = finished.completion_tokens
        return committed if self.keep is None else min(committed, self.keep)

    @property
    def cached_tokens(self) -> int:
        return 0 if self.finished is None else self.finished.cached_tokens

    def _shown(self, text: str) -> str:
        # As in vLLM, stop strings take effect only after min_tokens tokens.
        if self.num_received <= self._min_tokens:
            return self._stops.flush() + text
        return self._stops.feed(text)

    @property
    def _is_reasoning(self) -> bool:
        return self._reasoning is not None and self._reasoning.is_thinking

    def _split(self, shown: str) -> tuple[str, str]:
        """Split new text into reasoning and answer."""
        return ("", shown) if self._reasoning is None else self._reasoning.feed(shown)

    def _delta(
        self, reasoning: str, text: str, logprobs: tuple[TokenLogprobs, ...], finish_reason: str | None
    ) -> ChoiceDelta:
        token_ids = tuple(self._unreported)
        self._unreported.clear()
        prompt_logprobs = tuple(self._prompt_logprobs)
        self._prompt_logprobs.clear()
        return ChoiceDelta(self.index, text, logprobs, finish_reason, token_ids, reasoning, prompt_logprobs)

    def _last(self, reasoning: str, text: str, logprobs: tuple[TokenLogprobs, ...], finish_reason: str) -> ChoiceDelta:
        self.is_done = True
        held_reasoning, held_text = ("", "") if self._reasoning is None else self._reasoning.flush()
        return self._delta(reasoning + held_reasoning, text + held_text, logprobs, finish_reason)
