"""An answer, while the engine generates it and afterwards."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from loramux.engine.offline.engine_thread import Event
from loramux.engine.protocol.messages import Add, Finished, PromptLogprob, SequenceOutput, TokenLogprobs
from loramux.engine.text.detokenizer import StopStrings, new_detokenizer
from loramux.engine.text.text_tokenizer import TextTokenizer


class RequestFailed(ValueError):
    """The engine refused a request, or ended it with an error. `code` is one of those of `Finished`."""

    def __init__(self, code: str, message: str, adapter: str | None) -> None:
        super().__init__(message if adapter is None else f"{message} (adapter {adapter})")
        self.code = code


@dataclass(frozen=True, slots=True)
class Generation:
    """An answer. `finish_reason` is `stop` or `length`. `stopped_by` is the stop string or end token, if there is one.

    `logprobs` has one entry for each token if the sampling parameters ask for log-probabilities.
    """

    text: str
    token_ids: tuple[int, ...]
    finish_reason: str
    stopped_by: str | int | None
    prompt_token_ids: tuple[int, ...]
    cached_tokens: int
    """Tokens of the prompt that were found in the prefix cache."""
    adapter: str | None
    logprobs: tuple[TokenLogprobs, ...] = ()
    prompt_logprobs: tuple[PromptLogprob, ...] = ()


@dataclass(frozen=True, slots=True)
class Piece:
    """New text of a streamed answer. `token_ids` are all tokens since the last piece. The last piece has a reason."""

    text: str
    token_ids: tuple[int, ...]
    finish_reason: str | None = None


@dataclass(frozen=True, slots=True)
class Score:
    """Log-probabilities of a prompt's tokens, each given those before it. The first token has none."""

    token_ids: tuple[int, ...]
    logprobs: tuple[float | None, ...]
    adapter: str | None

    @property
    def total(self) -> float:
        return sum(one for one in self.logprobs if one is not None)


@dataclass(frozen=True, slots=True, eq=False)
class Classes:
    """The likeliest class of a prompt, and the probability of each of `labels`, float64 `[num_labels]`.

    With the problem type `regression`, the probabilities are the logits.
    """

    label: str
    labels: tuple[str, ...]
    probabilities: npt.NDArray[np.float64]
    adapter: str | None


class Answer:
    """An answer while it is generated."""

    def __init__(self, add: Add, adapter: str | None, tokenizer: TextTokenizer | None, stops: tuple[str, ...]) -> None:
        if tokenizer is None and stops:
            raise ValueError("stop strings need a tokenizer")
        self.add = add
        self.text = ""
        self.token_ids: list[int] = []
        self.finish_reason: str | None = None
        self.adapter = adapter
        self._detokenizer = (
            None if tokenizer is None else new_detokenizer(tokenizer, add.prompt, skip_special_tokens=True)
        )
        self._stops = StopStrings(stops)
        self._logprobs: list[TokenLogprobs] = []
        self._prompt_logprobs: list[PromptLogprob] = []
        self.pooled = b""
        """The prompt's pooled state, if the sequence is to return it: see `SequenceOutput.pooled`."""
        self._finished: Finished | None = None

    def take(self, event: Event) -> bool:
        """Add what the engine says. Return True if a stop string was found, so that the sequence must be stopped.

        Raises EngineClosed or RequestFailed.
        """
        match event:
            case SequenceOutput():
                self._prompt_logprobs += event.prompt_logprobs
                self.pooled += event.pooled
                return self._take_tokens(event)
            case Finished():
                self._take_end(event)
                return False
            case _:
                raise event

    def _take_tokens(self, output: SequenceOutput) -> bool:
        if self._stops.found is not None:
            # These tokens were on their way when the stop string was found.
            return False
        self.token_ids += output.token_ids
        self._logprobs += output.logprobs
        if self._detokenizer is not None:
            self.text += self._stops.feed(self._detokenizer.feed_all(output.token_ids))
        return self._stops.found is not None

    def _take_end(self, finished: Finished) -> None:
        if finished.reason == "error":
            self.finish_reason = "error"
            raise RequestFailed(finished.code or "", finished.message or "the request failed", self.adapter)
        if self._stops.found is None and self._detokenizer is not None:
            self.text += self._stops.feed(self._detokenizer.finish())
            if self._stops.found is None:
                self.text += self._stops.flush()
        self._finished = finished
        self.finish_reason = "stop" if self._stops.found is not None else finished.reason

    def generation(self) -> Generation:
        assert self._finished is not None
        assert self.finish_reason is not None
        return Generation(
            text=self.text,
            token_ids=tuple(self.token_ids),
            finish_reason=self.finish_reason,
            stopped_by=self._stops.found if self._stops.found is not None else self._finished.stop_token_id,
            prompt_token_ids=self.add.prompt,
            cached_tokens=self._finished.cached_tokens,
            adapter=self.adapter,
            logprobs=tuple(self._logprobs),
            prompt_logprobs=tuple(self._prompt_logprobs),
        )
