"""Builds the response bodies of `/v1/completions`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate
from math import inf

from loramux.engine.messages import PromptLogprob, TokenLogprobs
from loramux.platform.generation.choice import ChoiceDelta
from loramux.platform.generation.generation import Usage
from loramux.platform.openai_api.answers import Chunk, ChunkTemplates, Document, merged, shown_logprob, usage_body
from loramux.platform.openai_api.prompt_logprobs import prompt_logprobs_body, shared_by_choices
from loramux.platform.tokenizer.model_tokenizer import ModelTokenizer


@dataclass(frozen=True, slots=True, kw_only=True)
class CompletionAnswer:
    """Builds the bodies of one text completion. `model` is the name that the client used.

    `echoes` contains the prompt text to repeat before each choice. If `prompt_token_ids` is set, it has an entry for
    each choice, and the token IDs of prompts and choices are shown as in vLLM. Of the `num_generated` choices of each
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
    num_alternatives: int = 0
    """Number of most likely tokens per position in `top_logprobs`."""
    num_prompt_logprobs: int | None = None
    """Number of most likely tokens per position in `prompt_logprobs`. None if the client did not ask for this field."""
    echoed_tokens: Sequence[Sequence[int]] = ()
    """The token IDs of each choice's prompt, if `logprobs` also covers the prompt. Otherwise empty."""
    _begun: set[int] = field(default_factory=set)
    _offsets: dict[int, int] = field(default_factory=dict)
    """Number of characters in each choice's tokens so far, if log-probabilities are shown."""
    _templates: ChunkTemplates = field(init=False)

    def __post_init__(self) -> None:
        templates = ChunkTemplates(lambda index, text: self._chunk(ChoiceDelta(index, text, (), None), None))
        object.__setattr__(self, "_templates", templates)

    def chunks(self, delta: ChoiceDelta, usage: Document | None = None) -> list[Chunk]:
        shows_only_text = not self.has_logprobs and self.prompt_token_ids is None and self.num_prompt_logprobs is None
        if shows_only_text and usage is None and delta.index in self._begun and delta.finish_reason is None:
            return [self._templates.chunk(delta.index, delta.text)]
        return [self._chunk(delta, usage)]

    def usage_chunk(self, usage: Usage) -> Document:
        return {**self._head(), "choices": [], "usage": usage_body(usage)}

    def whole(self, deltas: Sequence[ChoiceDelta], usage: Usage) -> Document:
        shared = shared_by_choices(merged(deltas), self.num_generated)
        choices = [self._choice(choice) for choice in self._best(shared)]
        return {**self._head(), "choices": choices, "usage": usage_body(usage)}

    def _chunk(self, delta: ChoiceDelta, usage: Document | None) -> Document:
        chunk = {**self._head(), "choices": [self._choice(delta)]}
        return {**chunk, "usage": usage} if self.include_usage else chunk

    def _best(self, choices: list[ChoiceDelta]) -> list[ChoiceDelta]:
        """Return the choices of each prompt with the highest mean log-probability, best first."""
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
            "logprobs": self._logprobs(delta),
            "finish_reason": delta.finish_reason,
            **self._token_ids(delta, is_first),
            **self._prompt_logprobs(delta),
        }

    def _prompt_logprobs(self, delta: ChoiceDelta) -> Document:
        count = self.num_prompt_logprobs
        if count is None:
            return {}
        return {"prompt_logprobs": prompt_logprobs_body(self.tokenizer, delta.prompt_logprobs, count)}

    def _token_ids(self, delta: ChoiceDelta, is_first: bool) -> Document:
        if self.prompt_token_ids is None:
            return {}
        prompt = list(self.prompt_token_ids[delta.index]) if is_first else None
        return {"token_ids": list(delta.token_ids), "prompt_token_ids": prompt}

    def _logprobs(self, delta: ChoiceDelta) -> Document | None:
        if not self.has_logprobs:
            return None
        tokens, logprobs = [self._spelled(entry.token_id) for entry in delta.logprobs], delta.logprobs
        offsets = _text_offsets(tokens, self._offsets.get(delta.index, 0))
        self._offsets[delta.index] = offsets[-1]
        shown: Document = {
            "tokens": tokens,
            "token_logprobs": [shown_logprob(entry.logprob) for entry in logprobs],
            "top_logprobs": [self._top(entry) for entry in logprobs],
            "text_offset": offsets[:-1],
        }
        return self._with_prompt(delta, shown) if self.echoed_tokens else shown

    def _with_prompt(self, delta: ChoiceDelta, shown: Document) -> Document:
        """Return the log-probabilities of the prompt and the choice. The prompt's first token has none."""
        length = len(self.echoes[delta.index])
        tokens = [self._spelled(token_id) for token_id in self.echoed_tokens[delta.index]]
        # The echoed text may omit special tokens, so offsets computed from the tokens can exceed its length.
        offsets = [min(offset, length) for offset in _text_offsets(tokens, 0)[:-1]]
        scored = delta.prompt_logprobs
        return {
            "tokens": [*tokens, *shown["tokens"]],
            "token_logprobs": [None, *(shown_logprob(one.logprob) for one in scored), *shown["token_logprobs"]],
            "top_logprobs": [None, *(self._top(one) for one in scored), *shown["top_logprobs"]],
            "text_offset": [*offsets, *(length + offset for offset in shown["text_offset"])],
        }

    def _top(self, entry: TokenLogprobs | PromptLogprob) -> dict[str, float]:
        """Return the most likely tokens and the chosen token, best first."""
        top = entry.top[: self.num_alternatives]
        ranked = {self._spelled(token_id): shown_logprob(logprob) for token_id, logprob in top}
        ranked.setdefault(self._spelled(entry.token_id), shown_logprob(entry.logprob))
        return ranked

    def _spelled(self, token_id: int) -> str:
        spelled = self.tokenizer.token_bytes(token_id)
        try:
            return spelled.decode()
        except UnicodeDecodeError:
            # A token that is not valid UTF-8 would be shown as U+FFFD, so spell out its bytes as OpenAI does.
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in spelled)


def _text_offsets(tokens: Sequence[str], begin: int) -> list[int]:
    """Return the offset of each token in the text, followed by the offset of the end."""
    return list(accumulate((len(token) for token in tokens), initial=begin))


def _mean_logprob(choice: ChoiceDelta) -> float:
    # An empty choice has no log-probabilities, so it ranks last.
    logprobs = [entry.logprob for entry in choice.logprobs]
    return sum(logprobs) / len(logprobs) if logprobs else -inf
