"""Builds the response bodies of `/v1/completions`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import inf

from msgspec.structs import replace

from loramux.engine.protocol.messages import PromptLogprob, TokenLogprobs
from loramux.engine.text.detokenizer import new_detokenizer
from loramux.platform.generation.choice import ChoiceDelta
from loramux.platform.generation.generation import Usage
from loramux.platform.openai_api.chunks import Chunk, ChunkTemplates, UsageSoFar, fingerprint_field, usage_body
from loramux.platform.openai_api.prompt_logprobs import prompt_logprobs_body, shared_by_choices
from loramux.platform.openai_api.text_offsets import TextOffsets, prompt_offsets
from loramux.platform.requests.answers import Document, merged, name_by_id, shown_logprob
from loramux.platform.tokenizer.model_tokenizer import ModelTokenizer

_NOT_ASKED: Document = {"token_ids": None, "prompt_token_ids": None, "prompt_logprobs": None}
"""Fields of vLLM's choices that are null unless the client asks for them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CompletionAnswer:
    """Builds the bodies of one text completion. `model` is the name that the client used.

    `prompts` contains the token IDs of each choice's prompt, and `echoes` the prompt text to repeat before each choice.
    Of the `num_generated` choices of each prompt, the best `num_choices` are returned.
    """

    id: str
    model: str
    created_s: int
    tokenizer: ModelTokenizer
    has_logprobs: bool
    include_usage: bool
    prompts: Sequence[Sequence[int]]
    service_tier: str
    """The tier that the request got."""
    fingerprint: str | None = None
    """The fingerprint of the version that answers, or None for the base."""
    echoes: Sequence[str] = ()
    echoes_logprobs: bool = False
    """Whether `logprobs` also covers the prompt."""
    skips_special_tokens: bool = True
    """Whether the text leaves out special tokens."""
    shows_token_ids: bool = False
    """Whether to show the token IDs of prompts and choices, as vLLM does."""
    num_choices: int = 1
    num_generated: int = 1
    num_alternatives: int = 0
    """Number of most likely tokens per position of the prompt in `top_logprobs`."""
    names_tokens_by_id: bool = False
    """Whether `logprobs` shows each token as `token_id:` and its ID."""
    num_prompt_logprobs: int | None = None
    """Number of most likely tokens per position in `prompt_logprobs`. None if the client did not ask for this field."""
    _begun: set[int] = field(default_factory=set)
    _offsets: dict[int, TextOffsets] = field(default_factory=dict)
    _lengths: dict[int, int] = field(default_factory=dict)
    """Number of characters that each choice has shown so far, if log-probabilities are shown."""
    _templates: ChunkTemplates = field(default_factory=ChunkTemplates)

    def chunks(self, delta: ChoiceDelta, so_far: UsageSoFar | None = None) -> list[Chunk]:
        shows_only_text = not self.has_logprobs and not self.shows_token_ids and self.num_prompt_logprobs is None
        if shows_only_text and so_far is None and delta.index in self._begun and delta.finish_reason is None:
            return [self._templates.chunk(delta.index, delta.text, self._text_chunk)]
        usage = None
        if so_far is not None:
            so_far.add(delta)
            usage = so_far.body()
        shown = self._logprobs(delta)
        if not delta.logprobs:
            return [self._chunk(delta, usage)]
        if delta.finish_reason is None:
            return [self._chunk(delta, usage, shown)]
        # As in the OpenAI API, the chunk with the finish reason has no log-probabilities.
        end = ChoiceDelta(delta.index, "", (), delta.finish_reason, stop_reason=delta.stop_reason)
        before = replace(delta, finish_reason=None, stop_reason=None)
        return [self._chunk(before, usage, shown), self._chunk(end, usage)]

    def usage_chunk(self, usage: Usage) -> Document:
        return {**self._head(), "choices": [], "usage": usage_body(usage)}

    def whole(self, deltas: Sequence[ChoiceDelta], usage: Usage) -> Document:
        shared = shared_by_choices(merged(deltas), self.num_generated)
        choices = [{**_NOT_ASKED, **self._choice(one, self._logprobs(one))} for one in self._best(shared)]
        return {**self._head(), "choices": choices, "usage": usage_body(usage)}

    def _text_chunk(self, index: int, text: str) -> Document:
        return self._chunk(ChoiceDelta(index, text, (), None))

    def _chunk(self, delta: ChoiceDelta, usage: Document | None = None, logprobs: Document | None = None) -> Document:
        chunk = {**self._head(), "choices": [self._choice(delta, logprobs)]}
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
        head = {"id": self.id, "object": "text_completion", "created": self.created_s, "model": self.model}
        return head | {"service_tier": self.service_tier} | fingerprint_field(self.fingerprint)

    def _choice(self, delta: ChoiceDelta, logprobs: Document | None) -> Document:
        is_first = delta.index not in self._begun
        self._begun.add(delta.index)
        return {
            "text": (self.echoes[delta.index] if self.echoes and is_first else "") + delta.text,
            "index": delta.index,
            "logprobs": logprobs,
            "finish_reason": delta.finish_reason,
            "stop_reason": delta.stop_reason,
            **self._token_ids(delta, is_first),
            **self._prompt_logprobs(delta),
        }

    def _prompt_logprobs(self, delta: ChoiceDelta) -> Document:
        count = self.num_prompt_logprobs
        if count is None:
            return {}
        return {"prompt_logprobs": prompt_logprobs_body(self.tokenizer, delta.prompt_logprobs, count)}

    def _token_ids(self, delta: ChoiceDelta, is_first: bool) -> Document:
        if not self.shows_token_ids:
            return {}
        prompt = list(self.prompts[delta.index]) if is_first else None
        return {"token_ids": list(delta.token_ids), "prompt_token_ids": prompt}

    def _logprobs(self, delta: ChoiceDelta) -> Document | None:
        if not self.has_logprobs:
            return None
        logprobs, offsets = delta.logprobs, self._text_offsets(delta)
        shown: Document = {
            "tokens": [self._spelled(entry.token_id) for entry in logprobs],
            "token_logprobs": [shown_logprob(entry.logprob) for entry in logprobs],
            "top_logprobs": [self._top(entry, entry.top) for entry in logprobs],
            "text_offset": offsets,
        }
        return self._with_prompt(delta, shown) if self.echoes_logprobs else shown

    def _text_offsets(self, delta: ChoiceDelta) -> list[int]:
        """Return the offset in the choice's text of each token that has log-probabilities."""
        index = delta.index
        counter = self._offsets.get(index)
        if counter is None:
            detokenizer = new_detokenizer(
                self.tokenizer, self.prompts[index], skip_special_tokens=self.skips_special_tokens
            )
            counter = self._offsets[index] = TextOffsets(detokenizer)
        offsets = counter.of(entry.token_id for entry in delta.logprobs)
        length = self._lengths[index] = self._lengths.get(index, 0) + len(delta.text)
        # The tokens of a stop string have no place in the text.
        return offsets if delta.finish_reason is None else [min(offset, length) for offset in offsets]

    def _with_prompt(self, delta: ChoiceDelta, shown: Document) -> Document:
        """Return the log-probabilities of the prompt and the choice. The prompt's first token has none."""
        echo, prompt, scored = self.echoes[delta.index], self.prompts[delta.index], delta.prompt_logprobs
        return {
            "tokens": [*map(self._spelled, prompt), *shown["tokens"]],
            "token_logprobs": [None, *(shown_logprob(one.logprob) for one in scored), *shown["token_logprobs"]],
            "top_logprobs": [
                None,
                *(self._top(one, one.top[: self.num_alternatives]) for one in scored),
                *shown["top_logprobs"],
            ],
            "text_offset": [
                *prompt_offsets(self.tokenizer, prompt, echo),
                *(len(echo) + offset for offset in shown["text_offset"]),
            ],
        }

    def _top(self, entry: TokenLogprobs | PromptLogprob, top: Sequence[tuple[int, float]]) -> dict[str, float]:
        """Return the entry's own token first, as in vLLM, and then the tokens in `top`."""
        ranked = {self._spelled(entry.token_id): shown_logprob(entry.logprob)}
        for token_id, logprob in top:
            ranked.setdefault(self._spelled(token_id), shown_logprob(logprob))
        return ranked

    def _spelled(self, token_id: int) -> str:
        if self.names_tokens_by_id:
            return name_by_id(token_id)
        spelled = self.tokenizer.token_bytes(token_id)
        try:
            return spelled.decode()
        except UnicodeDecodeError:
            # A token that is not valid UTF-8 would be shown as U+FFFD, so spell out its bytes as OpenAI does.
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in spelled)


def _mean_logprob(choice: ChoiceDelta) -> float:
    # An empty choice has no log-probabilities, so it ranks last.
    logprobs = [entry.logprob for entry in choice.logprobs]
    return sum(logprobs) / len(logprobs) if logprobs else -inf
