"""Builds the response bodies of `/v1/chat/completions`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from loramux.engine.messages import TokenLogprobs
from loramux.platform.generation.choice import ChoiceDelta
from loramux.platform.generation.generation import Usage
from loramux.platform.openai_api.answers import Document, merged, shown_logprob, usage_body
from loramux.platform.tokenizer.model_tokenizer import ModelTokenizer


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatAnswer:
    """Builds the bodies of one chat completion; `model` is the name that the client used."""

    id: str
    model: str
    created_s: int
    tokenizer: ModelTokenizer
    has_logprobs: bool
    include_usage: bool
    _begun: set[int] = field(default_factory=set)

    def chunks(self, delta: ChoiceDelta) -> list[Document]:
        chunks = []
        if delta.index not in self._begun:
            self._begun.add(delta.index)
            chunks.append(self._chunk(delta.index, {"role": "assistant", "content": ""}))
        if delta.text or delta.logprobs:
            chunks.append(self._chunk(delta.index, {"content": delta.text}, logprobs=delta.logprobs))
        if delta.finish_reason is not None:
            chunks.append(self._chunk(delta.index, {}, finish_reason=delta.finish_reason))
        return chunks

    def usage_chunk(self, usage: Usage) -> Document:
        return {**self._head("chat.completion.chunk"), "choices": [], "usage": usage_body(usage)}

    def whole(self, deltas: Sequence[ChoiceDelta], usage: Usage) -> Document:
        choices = [
            {
                "index": choice.index,
                "message": {"role": "assistant", "content": choice.text, "refusal": None},
                "logprobs": self._logprobs(choice.logprobs),
                "finish_reason": choice.finish_reason,
            }
            for choice in merged(deltas)
        ]
        return {**self._head("chat.completion"), "choices": choices, "usage": usage_body(usage)}

    def _chunk(
        self,
        index: int,
        delta: Document,
        logprobs: tuple[TokenLogprobs, ...] = (),
        finish_reason: str | None = None,
    ) -> Document:
        shown = self._logprobs(logprobs) if logprobs else None
        choice = {"index": index, "delta": delta, "logprobs": shown, "finish_reason": finish_reason}
        chunk = {**self._head("chat.completion.chunk"), "choices": [choice]}
        return {**chunk, "usage": None} if self.include_usage else chunk

    def _head(self, kind: str) -> Document:
        return {"id": self.id, "object": kind, "created": self.created_s, "model": self.model}

    def _logprobs(self, logprobs: tuple[TokenLogprobs, ...]) -> Document | None:
        if not self.has_logprobs:
            return None
        content = [
            {
                **self._token(entry.token_id, entry.logprob),
                "top_logprobs": [self._token(token_id, logprob) for token_id, logprob in entry.top],
            }
            for entry in logprobs
        ]
        return {"content": content, "refusal": None}

    def _token(self, token_id: int, logprob: float) -> Document:
        spelled = self.tokenizer.token_bytes(token_id)
        return {
            "token": spelled.decode("utf-8", "replace"),
            "logprob": shown_logprob(logprob),
            "bytes": list(spelled),
        }
