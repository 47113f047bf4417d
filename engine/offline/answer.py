"""An answer, while the engine generates it and afterwards."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from loramux.engine.offline.engine_thread import EngineClosed, Event
from loramux.engine.offline.local_adapter import LocalAdapter
from loramux.engine.protocol.messages import Add, Finished, PromptLogprob, SequenceOutput, TokenLogprobs
from loramux.engine.text.detokenizer import StopStrings, new_detokenizer
from loramux.engine.text.text_tokenizer import TextTokenizer


class RequestFailed(ValueError):
    """The engine refused a request, or ended it with an error. `code` is one of those of `Finished`.

    `index` is the position of the prompt in the call, or None if the call has only one prompt.
    """

    def __init__(self, code: str, message: str, adapter: str | None, index: int | None = None) -> None:
        place = "" if index is None else f"prompts[{index}]: "
        super().__init__(f"{place}{message}" + ("" if adapter is None else f" (adapter {adapter})"))
        self.code = code
        self.index = index


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
    """An answer while it is generated. `name` is that of `adapter`, which stays in memory until the answer is freed."""

    def __init__(
        self,
        add: Add,
        name: str | None,
        adapter: LocalAdapter | None,
        tokenizer: TextTokenizer | None,
        stops: tuple[str, ...],
        index: int | None = None,
    ) -> None:
        """`index` is the position of the prompt among those of a call: see RequestFailed."""
        if tokenizer is None and stops:
            raise ValueError("stop strings need a tokenizer")
        self.add = add
        self.name = name
        self.adapter = adapter
        self.text = ""
        self.token_ids: list[int] = []
        self.finish_reason: str | None = None
        self._index = index
        self._detokenizer = (
            None if tokenizer is None else new_detokenizer(tokenizer, add.prompt, skip_special_tokens=True)
        )
        self._has_stops = bool(stops)
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
            case EngineClosed():
                raise event

    def _take_tokens(self, output: SequenceOutput) -> bool:
        if self._stops.found is not None:
            # These tokens were on their way when the stop string was found.
            return False
        if not self._has_stops:
            self.token_ids += output.token_ids
            self._logprobs += output.logprobs
            if self._detokenizer is not None:
                self.text += self._detokenizer.feed_all(output.token_ids)
            return False
        assert self._detokenizer is not None
        # How many tokens an output has depends on the times of steps, and must not change the answer.
        for position, token_id in enumerate(output.token_ids):
            self.token_ids.append(token_id)
            self._logprobs += output.logprobs[position : position + 1]
            self.text += self._stops.feed(self._detokenizer.feed(token_id), self._can_stop)
            if self._stops.found is not None:
                return True
        return False

    @property
    def _can_stop(self) -> bool:
        """Stop strings take effect only after `min_tokens` tokens, as in a server."""
        return len(self.token_ids) > self.add.sampling.min_tokens

    def _take_end(self, finished: Finished) -> None:
        if finished.reason == "error" and self._stops.found is None:
            self.finish_reason = "error"
            message = finished.message or "the request failed"
            raise RequestFailed(finished.code or "", message, self.name, self._index)
        if self._stops.found is None and self._detokenizer is not None:
            self.text += self._stops.feed(self._detokenizer.finish(), self._can_stop)
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
            adapter=self.name,
            logprobs=tuple(self._logprobs),
            prompt_logprobs=tuple(self._prompt_logprobs),
        )
