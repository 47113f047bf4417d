"""One choice of one prompt: the engine's tokens become text, stop strings end it, and it knows what it costs."""

from __future__ import annotations

from dataclasses import dataclass

from loramux.engine.messages import Add, Finished, SequenceOutput, TokenLogprobs
from loramux.platform.tokenizer.detokenizer import Detokenizer, StopStrings
from loramux.platform.tokenizer.model_tokenizer import ModelTokenizer


@dataclass(frozen=True, slots=True)
class ChoiceDelta:
    """News of one choice; `finish_reason` only on its last."""

    index: int
    text: str
    logprobs: tuple[TokenLogprobs, ...]
    finish_reason: str | None


class Choice:
    """Fed by the engine's stream until `is_done`."""

    def __init__(self, index: int, add: Add, tokenizer: ModelTokenizer, stops: tuple[str, ...]) -> None:
        self.index = index
        self.add = add
        self._detokenizer = Detokenizer(tokenizer, add.prompt)
        self._stops = StopStrings(stops)
        self._min_tokens = add.sampling.min_tokens
        self.num_received = 0
        self.keep: int | None = None
        """Tokens up to the one that completed a stop string."""
        self.finished: Finished | None = None
        self._is_given_up = False
        self.is_done = False
        """Its last delta was made: a stop string was found or the engine finished it well."""

    def feed(self, output: SequenceOutput) -> ChoiceDelta | None:
        """What these tokens add; None when it is nothing yet. Tokens behind a stop string add nothing."""
        if self.is_done:
            return None
        text = ""
        for position, token_id in enumerate(output.token_ids):
            self.num_received += 1
            text += self._shown(self._detokenizer.feed(token_id))
            if self._stops.is_found:
                self.keep = self.num_received
                self.is_done = True
                return ChoiceDelta(self.index, text, output.logprobs[: position + 1], "stop")
        if not text and not output.logprobs:
            return None
        return ChoiceDelta(self.index, text, output.logprobs, None)

    def finish(self, finished: Finished) -> ChoiceDelta | None:
        """The last delta, with the text that was held; None when there was one, or when it did not end well."""
        self.finished = finished
        if self.is_done or finished.reason not in ("stop", "length"):
            return None
        self.is_done = True
        text = self._shown(self._detokenizer.finish())
        if self._stops.is_found:
            self.keep = self.num_received
            return ChoiceDelta(self.index, text, (), "stop")
        return ChoiceDelta(self.index, text + self._stops.flush(), (), finished.reason)

    def give_up(self) -> None:
        """The engine was asked to run it and never says how it ended: its prompt and what was received are paid for."""
        self._is_given_up = True

    @property
    def has_run(self) -> bool:
        """Whether the engine began it: one that failed or was cut before its first token may not have."""
        if self.num_received or self._is_given_up:
            return True
        finished = self.finished
        return finished is not None and (
            finished.completion_tokens > 0 or (finished.reason != "error" and finished.prompt_tokens > 0)
        )

    @property
    def prompt_tokens(self) -> int:
        """What its prompt costs."""
        if not self.has_run:
            return 0
        return len(self.add.prompt) if self.finished is None else self.finished.prompt_tokens

    @property
    def completion_tokens(self) -> int:
        """What it generated: the engine's word, or what was received where the engine can no longer say."""
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
        # As in vLLM, stop strings only count once the least number of tokens is there.
        if self.num_received <= self._min_tokens:
            return self._stops.flush() + text
        return self._stops.feed(text)
