"""Builds the response bodies of `/v1/chat/completions`."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import count

from loramux.engine.protocol.messages import TokenLogprobs
from loramux.platform.bodies.tools import ToolChoice
from loramux.platform.generation.choice import ChoiceDelta
from loramux.platform.generation.generation import Usage
from loramux.platform.openai_api.chat_message import MessageBuilder, whole_message
from loramux.platform.openai_api.chunks import Chunk, ChunkTemplates, UsageSoFar, fingerprint_field, usage_body
from loramux.platform.openai_api.prompt_logprobs import prompt_logprobs_body
from loramux.platform.requests.answers import Document, merged, name_by_id, shown_logprob
from loramux.platform.tokenizer.model_tokenizer import ModelTokenizer
from loramux.platform.tool_calls.call_parser import CallParser


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatAnswer:
    """Builds the bodies of one chat completion. `model` is the name that the client used.

    If `prompt_token_ids` is set, the token IDs of the prompt and of each choice are shown as in vLLM. With
    `hides_reasoning`, those of the choices are left out together with the reasoning, because they contain it.
    """

    id: str
    model: str
    created_s: int
    tokenizer: ModelTokenizer
    has_logprobs: bool
    include_usage: bool
    tool_choice: ToolChoice
    service_tier: str
    """The tier that the request got."""
    new_parser: Callable[[], CallParser] | None = None
    """Creates a parser that finds tool calls in the text of a choice. None if the text is not parsed."""
    note_call: Callable[[], None] | None = None
    """Called for each tool call."""
    fingerprint: str | None = None
    """The fingerprint of the version that answers, or None for the base."""
    echoes: Sequence[str] = ()
    """The text to repeat before the content of each choice. Empty if the request does not ask for it."""
    prompt_token_ids: Sequence[int] | None = None
    hides_reasoning: bool = False
    names_tokens_by_id: bool = False
    """Whether `logprobs` shows each token as `token_id:` and its ID."""
    num_prompt_logprobs: int | None = None
    """Number of most likely tokens per position in `prompt_logprobs`. None if the client did not ask for this field."""
    _builders: dict[int, MessageBuilder] = field(default_factory=dict)
    _ids: dict[int, list[str]] = field(default_factory=dict)
    _templates: ChunkTemplates = field(default_factory=ChunkTemplates)

    def chunks(self, delta: ChoiceDelta, so_far: UsageSoFar | None = None) -> list[Chunk]:
        chunks: list[Chunk] = []
        builder = self._builders.get(delta.index)
        shows_only_text = not self.has_logprobs and not self._shows_token_ids and so_far is None
        if shows_only_text and self.new_parser is None and builder is not None and delta.is_text:
            return [self._templates.chunk(delta.index, delta.text, self._text_chunk)]
        if builder is None:
            builder = self._builders[delta.index] = self._builder(delta.index)
            before = None if so_far is None else so_far.body()
            first = self._chunk(delta.index, {"role": "assistant", "content": self._echo(delta.index)}, before)
            chunks.append({**first, **self._prompt_token_ids()})
        usage = None
        if so_far is not None:
            so_far.add(delta)
            usage = so_far.body()
        # Log-probabilities and token IDs are sent once, with the first chunk of their delta.
        logprobs, token_ids = delta.logprobs if self.has_logprobs else (), delta.token_ids
        for shown in builder.feed(delta):
            if shows_only_text and shown.keys() == {"content"}:
                chunks.append(self._templates.chunk(delta.index, shown["content"], self._text_chunk))
            else:
                chunks.append(self._chunk(delta.index, shown, usage, logprobs, token_ids=token_ids))
            logprobs, token_ids = (), ()
        is_last = delta.finish_reason is not None
        if logprobs or (token_ids and self._shows_token_ids and not is_last):
            chunks.append(self._chunk(delta.index, {"content": ""}, usage, logprobs, token_ids=token_ids))
            token_ids = ()
        if is_last:
            reason = self._finish_reason(delta.finish_reason, builder)
            last = self._chunk(delta.index, {}, usage, finish_reason=reason, token_ids=token_ids)
            last["choices"][0]["stop_reason"] = delta.stop_reason
            chunks.append(last)
        return chunks

    def usage_chunk(self, usage: Usage) -> Document:
        return {**self._head("chat.completion.chunk"), "choices": [], "usage": usage_body(usage)}

    def whole(self, deltas: Sequence[ChoiceDelta], usage: Usage) -> Document:
        whole = merged(deltas)
        choices = [self._choice(choice) for choice in whole]
        body = {**self._head("chat.completion"), "choices": choices, "usage": usage_body(usage)}
        # Fields of vLLM are null unless the client asks for them.
        body |= {"prompt_token_ids": None, "prompt_logprobs": None}
        return body | self._prompt_token_ids() | self._prompt_logprobs(whole)

    def _prompt_logprobs(self, choices: Sequence[ChoiceDelta]) -> Document:
        count = self.num_prompt_logprobs
        if count is None:
            return {}
        return {"prompt_logprobs": prompt_logprobs_body(self.tokenizer, choices[0].prompt_logprobs, count)}

    def _choice(self, delta: ChoiceDelta) -> Document:
        builder = self._builder(delta.index)
        return {
            "index": delta.index,
            "message": whole_message(builder.feed(delta), self._echo(delta.index)),
            "logprobs": self._logprobs(delta.logprobs),
            "finish_reason": self._finish_reason(delta.finish_reason, builder),
            "stop_reason": delta.stop_reason,
            "token_ids": None,
            **self._token_ids(delta.token_ids),
        }

    def _echo(self, index: int) -> str:
        return self.echoes[index] if self.echoes else ""

    def _builder(self, index: int) -> MessageBuilder:
        parser = None if self.new_parser is None else self.new_parser()
        return MessageBuilder(parser, self._call_ids(index), hides_reasoning=self.hides_reasoning)

    def _call_ids(self, index: int) -> Iterator[str]:
        """Yield the IDs of a choice's tool calls, which are the same each time that its message is built.

        Mistral templates accept only IDs of nine letters and digits.
        """
        ids = self._ids.setdefault(index, [])
        for position in count():
            if position == len(ids):
                ids.append(secrets.token_hex(5)[:9])
                if self.note_call is not None:
                    self.note_call()
            yield ids[position]

    def _finish_reason(self, reason: str | None, builder: MessageBuilder) -> str | None:
        # As in the OpenAI API, the finish reason is `stop` if the request named the function to call.
        is_call = reason == "stop" and builder.ends_with_calls and self.tool_choice.mode != "named"
        return "tool_calls" if is_call else reason

    def _text_chunk(self, index: int, text: str) -> Document:
        return self._chunk(index, {"content": text}, None)

    def _chunk(
        self,
        index: int,
        delta: Document,
        usage: Document | None,
        logprobs: tuple[TokenLogprobs, ...] = (),
        finish_reason: str | None = None,
        token_ids: tuple[int, ...] = (),
    ) -> Document:
        shown = self._logprobs(logprobs) if logprobs else None
        choice = {"index": index, "delta": delta, "logprobs": shown, "finish_reason": finish_reason}
        choice |= self._token_ids(token_ids)
        chunk = {**self._head("chat.completion.chunk"), "choices": [choice]}
        return {**chunk, "usage": usage} if self.include_usage else chunk

    def _head(self, kind: str) -> Document:
        head = {"id": self.id, "object": kind, "created": self.created_s, "model": self.model}
        return head | {"service_tier": self.service_tier} | fingerprint_field(self.fingerprint)

    def _prompt_token_ids(self) -> Document:
        return {} if self.prompt_token_ids is None else {"prompt_token_ids": list(self.prompt_token_ids)}

    @property
    def _shows_token_ids(self) -> bool:
        return self.prompt_token_ids is not None and not self.hides_reasoning

    def _token_ids(self, token_ids: tuple[int, ...]) -> Document:
        return {"token_ids": list(token_ids)} if self._shows_token_ids else {}

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
            "token": name_by_id(token_id) if self.names_tokens_by_id else spelled.decode("utf-8", "replace"),
            "logprob": shown_logprob(logprob),
            "bytes": list(spelled),
        }
