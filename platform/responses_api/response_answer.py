"""Builds the response object and the events of `/v1/responses`."""

from __future__ import annotations

import secrets
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from msgspec.structs import replace

from loramux.engine.protocol.messages import TokenLogprobs
from loramux.platform.errors import ApiError
from loramux.platform.generation.choice import ChoiceDelta
from loramux.platform.generation.generation import Usage
from loramux.platform.requests import sse
from loramux.platform.requests.answers import Document, shown_logprob
from loramux.platform.requests.message_reader import MessageReader
from loramux.platform.responses_api.input_items import Status
from loramux.platform.responses_api.output_items import (
    Called,
    CustomItem,
    Event,
    FunctionItem,
    OutputItem,
    ReasoningTextItem,
    TextItem,
)
from loramux.platform.responses_api.response_tools import OfferedTool
from loramux.platform.tokenizer.model_tokenizer import ModelTokenizer
from loramux.platform.tool_calls.events import ArgumentsEvent, CallBegun, CallEnded, ReasoningEvent, TextEvent


@dataclass(frozen=True, slots=True, kw_only=True)
class ResponseRules:
    """How an answer is shown.

    `head` are the fields of the response object that stay the same. `now_s` is a clock in seconds since 1970.
    """

    head: Document
    tokenizer: ModelTokenizer
    has_logprobs: bool
    seals_reasoning: bool
    tools: Mapping[str, OfferedTool]
    """The tools of the request, by the names by which the model calls them."""
    note_call: Callable[[], None] | None
    """Called for each tool call."""
    now_s: Callable[[], int]
    home: str
    """The part of the response's ID after the underscore, by which the IDs of its items name it."""
    keep: Callable[[Document], Awaitable[Document]]
    """Stores what is to be stored of the complete response object, and returns it as it turned out."""


class ResponseAnswer:
    """An `Answer` whose stream is a sequence of numbered events.

    A message begins when its first text arrives, so that an answer that only calls tools has no message. An answer
    without any output has one empty message.
    """

    def __init__(self, rules: ResponseRules, reader: MessageReader) -> None:
        self._rules = rules
        self._reader = reader
        self._items: list[OutputItem] = []
        self._is_open = False
        """True while the last item can still grow."""
        self.num_events = 0
        self._has_begun = False
        """True if the stream has said that the response is in progress."""
        self._held_logprobs: list[Document] = []
        """Log-probabilities of tokens whose text the parser of tool calls holds back, or drops around a call."""
        self._finish_reason: str | None = None
        self._kept: Document | None = None
        """The complete response object, once `keep` has been called."""

    def events(self, delta: ChoiceDelta) -> bytes:
        begin: list[Event] = []
        if not self._has_begun:
            self._has_begun = True
            document = self._document("in_progress")
            kinds = ("in_progress",) if self.num_events else ("created", "in_progress")
            begin = [{"type": f"response.{kind}", "response": document} for kind in kinds]
        return self._encoded([*begin, *self._feed(delta)])

    def queued(self) -> tuple[Document, bytes]:
        """Return the response object and the first events of a response that is made in the background."""
        document = self._document("queued")
        return document, self._encoded(
            [{"type": f"response.{kind}", "response": document} for kind in ("created", "queued")]
        )

    async def keep(self, deltas: Sequence[ChoiceDelta], usage: Usage) -> None:
        """Complete the response object with the deltas that `events` has not received, and store it."""
        for delta in deltas:
            for _ in self._feed(delta):
                pass
        self._kept = await self._rules.keep(self._finished(usage))

    def end(self, usage: Usage) -> bytes:
        return self._encoded([_last_event(self._kept or self._finished(usage))])

    def failure(self, error: ApiError) -> bytes:
        return self.failed(error)[1]

    def failed(self, error: ApiError) -> tuple[Document, bytes]:
        """Return the response object and the last events of a response that failed."""
        for _ in self._close("incomplete"):
            pass
        document, events = failed_response(self._document("failed"), error)
        return document, self._encoded(events)

    def cancelled(self, usage: Usage) -> tuple[Document, bytes]:
        """Return the response object and the last event of a response that was cancelled."""
        for _ in self._close("incomplete"):
            pass
        document = {**self._document("cancelled"), "usage": _usage(usage)}
        return document, self._encoded([_last_event(document)])

    def whole(self, deltas: Sequence[ChoiceDelta], usage: Usage) -> Document:
        if self._kept is not None:
            return self._kept
        for delta in deltas:
            for _ in self._feed(delta):
                pass
        return self._finished(usage)

    def _feed(self, delta: ChoiceDelta) -> Iterator[Event]:
        # Log-probabilities are sent once, with the first text that follows. Those of calls are never sent.
        for one in _by_part(delta) if delta.parts else _by_token(delta):
            if self._rules.has_logprobs:
                self._held_logprobs += self._logprobs([token.logprobs for token in one.text_tokens if token.logprobs])
            yield from self._read(one)
        if delta.finish_reason is not None:
            self._finish_reason = delta.finish_reason
            yield from self._last()

    def _read(self, delta: ChoiceDelta) -> Iterator[Event]:
        for part in self._reader.feed(delta):
            match part:
                case ReasoningEvent(text, separator):
                    yield from self._write(ReasoningTextItem, text, separator)
                case TextEvent(text, separator):
                    logprobs, self._held_logprobs = self._held_logprobs, []
                    if self._items and isinstance(self._items[-1], FunctionItem | CustomItem):
                        logprobs = _last_tokens(logprobs, text)
                    yield from self._write(TextItem, text, separator, logprobs)
                case CallBegun(_, name):
                    self._held_logprobs.clear()
                    yield from self._begin(self._call(name))
                case ArgumentsEvent(_, text):
                    self._held_logprobs.clear()
                    yield from self._items[-1].add(text)
                case CallEnded():
                    yield from self._close()

    def _last(self) -> Iterator[Event]:
        if not self._items:
            yield from self._write(TextItem, "")
        if self._held_logprobs and self._is_open and isinstance(self._items[-1], TextItem):
            yield from self._items[-1].add("", self._held_logprobs)
        is_cut_off = self._finish_reason != "stop" or (self._reader.has_calls and not self._reader.ends_with_calls)
        yield from self._close("incomplete" if is_cut_off else "completed")

    def _write(
        self,
        kind: type[TextItem | ReasoningTextItem],
        text: str,
        separator: str = "",
        logprobs: Sequence[Document] = (),
    ) -> Iterator[Event]:
        if self._is_open and isinstance(self._items[-1], kind):
            text = separator + text
        else:
            index, home = len(self._items), self._rules.home
            yield from self._begin(
                TextItem(index, home)
                if kind is TextItem
                else ReasoningTextItem(index, home, is_sealed=self._rules.seals_reasoning)
            )
        if text:
            yield from self._items[-1].add(text, logprobs)

    def _call(self, name: str) -> OutputItem:
        if self._rules.note_call is not None:
            self._rules.note_call()
        tool = self._rules.tools.get(name)
        kind = CustomItem if tool is not None and tool.is_custom else FunctionItem
        # A model can also call functions that were not offered. They have no namespace.
        namespace = None if tool is None or tool.namespace is None else tool.namespace.name
        called = name if tool is None else tool.tool.name
        # Mistral templates accept only IDs of nine letters and digits.
        return kind(len(self._items), self._rules.home, Called(called, namespace, secrets.token_hex(5)[:9]))

    def _begin(self, item: OutputItem) -> Iterator[Event]:
        yield from self._close()
        self._items.append(item)
        self._is_open = True
        yield from item.begin()

    def _close(self, status: Status = "completed") -> Iterator[Event]:
        if self._is_open:
            self._is_open = False
            yield from self._items[-1].finish(status)

    def _finished(self, usage: Usage) -> Document:
        is_complete = self._finish_reason == "stop"
        document = self._document("completed" if is_complete else "incomplete")
        if is_complete:
            document["completed_at"] = self._rules.now_s()
        else:
            document["incomplete_details"] = {"reason": "max_output_tokens"}
        return {**document, "usage": _usage(usage)}

    def _document(self, status: str) -> Document:
        output = [item.document() for item in self._items]
        return {**self._rules.head, "status": status, "output": output}

    def _encoded(self, events: Sequence[Event]) -> bytes:
        encoded = numbered(events, self.num_events)
        self.num_events += len(events)
        return b"".join(encoded)

    def _logprobs(self, entries: Sequence[TokenLogprobs]) -> list[Document]:
        return [
            {
                **self._token(entry.token_id, entry.logprob),
                "top_logprobs": [self._token(token_id, logprob) for token_id, logprob in entry.top],
            }
            for entry in entries
        ]

    def _token(self, token_id: int, logprob: float) -> Document:
        spelled = self._rules.tokenizer.token_bytes(token_id)
        token = spelled.decode("utf-8", "replace")
        return {"token": token, "logprob": shown_logprob(logprob), "bytes": list(spelled)}


def _by_token(delta: ChoiceDelta) -> Iterator[ChoiceDelta]:
    """Yield a delta for each token of the text, as if the engine had reported them singly."""
    tokens = delta.text_tokens
    for token in tokens[:-1]:
        yield replace(delta, text=token.text, text_tokens=(token,), finish_reason=None)
        delta = replace(delta, reasoning="")
    yield replace(delta, text=tokens[-1].text, text_tokens=tokens[-1:]) if tokens else delta


def _by_part(delta: ChoiceDelta) -> Iterator[ChoiceDelta]:
    """Yield a delta for each part of an answer in channels, with the tokens of the part's text."""
    tokens = iter(delta.text_tokens)
    for part in delta.parts:
        num_left = len(part.separator + part.text) if isinstance(part, TextEvent) else 0
        own = []
        while num_left > 0 and (token := next(tokens, None)) is not None:
            own.append(token)
            num_left -= len(token.text)
        yield replace(delta, parts=(part,), text_tokens=tuple(own), finish_reason=None)
    yield replace(delta, text="", reasoning="", parts=(), text_tokens=tuple(tokens))


def _last_tokens(logprobs: Sequence[Document], text: str) -> list[Document]:
    """Return the last entries that spell a text after a call. Those before them are the end of the call."""
    first, num_bytes = len(logprobs), len(text.encode())
    while first and num_bytes > 0:
        first -= 1
        num_bytes -= len(logprobs[first]["bytes"])
    return list(logprobs[first:])


def numbered(events: Sequence[Event], first: int) -> list[bytes]:
    """Encode events, numbered from `first`."""
    return [
        sse.event({"type": event["type"], "sequence_number": number, **event}, event["type"])
        for number, event in enumerate(events, first)
    ]


def failed_response(document: Document, error: ApiError) -> tuple[Document, list[Event]]:
    """Return a response object with an error, and the last events of its stream."""
    told = {"code": error.code, "message": error.message, "param": error.param}
    # The response object allows only some codes. The type of the error is this server's code.
    code = "rate_limit_exceeded" if error.status == 429 else "server_error"
    shown = {"code": code, "message": error.message, "type": error.code}
    failed = {**document, "status": "failed", "error": shown}
    return failed, [{"type": "error", **told}, {"type": "response.failed", "response": failed}]


def complete_response(document: Document) -> tuple[Document, list[Event]]:
    """Return a complete response object that is in no conversation, and the last event of its stream."""
    alone = {**document, "conversation": None}
    return alone, [_last_event(alone)]


def cancelled_response(document: Document) -> tuple[Document, list[Event]]:
    """Return a response object that was cancelled, and the last event of its stream."""
    cancelled = {**document, "status": "cancelled"}
    return cancelled, [_last_event(cancelled)]


def _last_event(document: Document) -> Event:
    # OpenAI has no event for a cancelled response.
    kind = "incomplete" if document["status"] == "cancelled" else document["status"]
    return {"type": f"response.{kind}", "response": document}


def _usage(usage: Usage) -> Document:
    return {
        "input_tokens": usage.prompt_tokens,
        "input_tokens_details": {"cached_tokens": usage.cached_tokens, "cache_write_tokens": 0},
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": usage.reasoning_tokens or 0},
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
    }
