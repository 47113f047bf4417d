"""Builds the response bodies of `/v1/completions`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from math import inf

from loramux.engine.messages import TokenLogprobs
from loramux.platform.generation.choice import ChoiceDelta
from loramux.platform.generation.generation import Usage
from loramux.platform.openai_api.answers import Document, merged, shown_logprob, usage_body
from loramux.platform.tokenizer.model_tokenizer import ModelTokenizer


@dataclass(frozen=True, slots=True, kw_only=True)
class CompletionAnswer:
    """Builds the bodies of one text completion. `model` is the name that the client used.

    `echoes` contains the prompt text to repeat before each choice. If `prompt_token_ids` is set, which has an entry for
    each choice, the token ids of prompts and choices are shown as vLLM does. Of the `num_generated` choices of each
    prompt, the best `num_choices` are returned.
    """

    id: str
    model: str
    created_s: int
    tokenizer: ModelTokenizer
    has_logprobs: bool
    include_usage: bool
    echoes: Sequence[str] = ()
    prompt_token_ids: Sequence[Sequence[int]] | None = None
    num_choices: int = 1
    num_generated: int = 1
    _begun: set[int] = field(default_factory=set)
    _offsets: dict[int, int] = field(default_factory=dict)
    """Number of characters of each choice whose log-probabilities have been sent."""

    def chunks(self, delta: ChoiceDelta) -> list[Document]:
        chunk = {**self._head(), "choices": [self._choice(delta)]}
        return [{**chunk, "usage": None} if self.include_usage else chunk]

    def usage_chunk(self, usage: Usage) -> Document:
        return {**self._head(), "choices": [], "usage": usage_body(usage)}

    def whole(self, deltas: Sequence[ChoiceDelta], usage: Usage) -> Document:
        choices = [self._choice(choice) for choice in self._best(merged(deltas))]
        return {**self._head(), "choices": choices, "usage": usage_body(usage)}

    def _best(self, choices: list[ChoiceDelta]) -> list[ChoiceDelta]:
        """The choices of each prompt with the highest mean log-probability, best first; all if none is left out."""
        if self.num_generated == self.num_choices:
            return choices
        best: list[ChoiceDelta] = []
        for start in range(0, len(choices), self.num_generated):
            ranked = sorted(choices[start : start + self.num_generated], key=_mean_logprob, reverse=True)
            best += ranked[: self.num_choices]
        return [replace(choice, index=index) for index, choice in enumerate(best)]

    def _head(self) -> Document:
        return {"id": self.id, "object": "text_completion", "created": self.created_s, "model": self.model}

    def _choice(self, delta: ChoiceDelta) -> Document:
        is_first = delta.index not in self._begun
        self._begun.add(delta.index)
        return {
            "text": (self.echoes[delta.index] if self.echoes and is_first else "") + delta.text,
            "index": delta.index,
            "logprobs": self._logprobs(delta.index, delta.logprobs),
            "finish_reason": delta.finish_reason,
            **self._token_ids(delta, is_first),
        }

    def _token_ids(self, delta: ChoiceDelta, is_first: bool) -> Document:
        if self.prompt_token_ids is None:
            return {}
        prompt = list(self.prompt_token_ids[delta.index]) if is_first else None
        return {"token_ids": list(delta.token_ids), "prompt_token_ids": prompt}

    def _logprobs(self, index: int, logprobs: tuple[TokenLogprobs, ...]) -> Document | None:
        if not self.has_logprobs:
            return None
        tokens = [self._spelled(entry.token_id) for entry in logprobs]
        offsets = []
        offset = self._offsets.get(index, 0)
        for token in tokens:
            offsets.append(offset)
            offset += len(token)
        self._offsets[index] = offset
        return {
            "tokens": tokens,
            "token_logprobs": [shown_logprob(entry.logprob) for entry in logprobs],
            "top_logprobs": [self._top(entry) for entry in logprobs],
            "text_offset": offsets,
        }

    def _top(self, entry: TokenLogprobs) -> dict[str, float]:
        """The most likely tokens and the chosen one, best first."""
        ranked = {self._spelled(token_id): shown_logprob(logprob) for token_id, logprob in entry.top}
        ranked.setdefault(self._spelled(entry.token_id), shown_logprob(entry.logprob))
        return ranked

    def _spelled(self, token_id: int) -> str:
        spelled = self.tokenizer.token_bytes(token_id)
        try:
            return spelled.decode()
        except UnicodeDecodeError:
            # Parts of a character would all be shown as U+FFFD, so spell out their bytes as OpenAI does.
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in spelled)


def _mean_logprob(choice: ChoiceDelta) -> float:
    # A choice that ended at once has no token to judge it by.
    logprobs = [entry.logprob for entry in choice.logprobs]
    return sum(logprobs) / len(logprobs) if logprobs else -inf
