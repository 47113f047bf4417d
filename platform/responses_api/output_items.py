"""The items of a response's output, and the events that report them while they are generated."""

from __future__ import annotations

import secrets
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from loramux.platform.requests.answers import Document
from loramux.platform.responses_api.custom_input import CustomInput
from loramux.platform.responses_api.input_items import Status
from loramux.platform.responses_api.reasoning_text import sealed

Event = Document
"""An event without its sequence number."""


def new_item_id(prefix: str, home: str, number: int | None = None) -> str:
    """Return the ID of an item that is stored in `home`, the part of an object's ID after the underscore.

    The ID ends with `number`, or with a random number.
    """
    return f"{prefix}_{home}{secrets.randbits(64) if number is None else number:016x}"


def home_of(item_id: str) -> str:
    """Return the `home` of an item whose ID `new_item_id` has made. For other IDs, no object has this home."""
    return item_id.partition("_")[2][:-16]


@dataclass(frozen=True, slots=True)
class Called:
    """The tool that the model calls, and the ID of the call."""

    name: str
    namespace: str | None
    call_id: str

    def fields(self) -> Document:
        named = {"call_id": self.call_id, "name": self.name}
        return named if self.namespace is None else {**named, "namespace": self.namespace}


class OutputItem(Protocol):
    """One item. Call `begin`, then `add` for each piece of its text, then `finish`."""

    def begin(self) -> list[Event]: ...

    def add(self, text: str, logprobs: Sequence[Document] = ()) -> list[Event]: ...

    def finish(self, status: Status) -> list[Event]: ...

    def document(self) -> Document: ...


class _Item(ABC):
    """What all items have in common. `index` is the item's position in the output, `home` as in `new_item_id`."""

    PREFIX = ""

    def __init__(self, index: int, home: str) -> None:
        self._id = new_item_id(self.PREFIX, home)
        self._index = index
        self._status: Status = "in_progress"
        self._texts: list[str] = []

    @abstractmethod
    def document(self) -> Document: ...

    @property
    def _text(self) -> str:
        return "".join(self._texts)

    def _added(self) -> Event:
        return {"type": "response.output_item.added", "output_index": self._index, "item": self.document()}

    def _done(self) -> Event:
        return {"type": "response.output_item.done", "output_index": self._index, "item": self.document()}

    def _event(self, kind: str, **fields: object) -> Event:
        return {"type": f"response.{kind}", "item_id": self._id, "output_index": self._index, **fields}


class _PartItem(_Item):
    """An item whose text is its only content part."""

    TEXT_EVENT = ""

    def begin(self) -> list[Event]:
        return [self._added(), self._event("content_part.added", content_index=0, part=self._part())]

    def _add(self, text: str, **fields: object) -> list[Event]:
        self._texts.append(text)
        return [self._event(f"{self.TEXT_EVENT}.delta", content_index=0, delta=text, **fields)]

    def _finish(self, status: Status, **fields: object) -> list[Event]:
        self._status = status
        return [
            self._event(f"{self.TEXT_EVENT}.done", content_index=0, text=self._text, **fields),
            self._event("content_part.done", content_index=0, part=self._part()),
            self._done(),
        ]

    @abstractmethod
    def _part(self) -> Document: ...


class TextItem(_PartItem):
    """The model's message."""

    PREFIX = "msg"
    TEXT_EVENT = "output_text"

    def __init__(self, index: int, home: str) -> None:
        super().__init__(index, home)
        self._logprobs: list[Document] = []

    def add(self, text: str, logprobs: Sequence[Document] = ()) -> list[Event]:
        self._logprobs += logprobs
        return self._add(text, logprobs=list(logprobs))

    def finish(self, status: Status) -> list[Event]:
        return self._finish(status, logprobs=self._logprobs)

    def document(self) -> Document:
        content = [] if self._status == "in_progress" else [self._part()]
        return {"id": self._id, "type": "message", "role": "assistant", "status": self._status, "content": content}

    def _part(self) -> Document:
        return {"type": "output_text", "text": self._text, "annotations": [], "logprobs": list(self._logprobs)}


class ReasoningTextItem(_PartItem):
    """The model's reasoning. With `is_sealed`, the item has `encrypted_content`."""

    PREFIX = "rs"
    TEXT_EVENT = "reasoning_text"

    def __init__(self, index: int, home: str, *, is_sealed: bool) -> None:
        super().__init__(index, home)
        self._is_sealed = is_sealed

    def add(self, text: str, logprobs: Sequence[Document] = ()) -> list[Event]:
        return self._add(text)

    def finish(self, status: Status) -> list[Event]:
        return self._finish(status)

    def document(self) -> Document:
        is_open = self._status == "in_progress"
        return {
            "id": self._id,
            "type": "reasoning",
            "status": self._status,
            "summary": [],
            "content": [] if is_open else [self._part()],
            "encrypted_content": None if is_open or not self._is_sealed else sealed(self._text),
        }

    def _part(self) -> Document:
        return {"type": "reasoning_text", "text": self._text}


class FunctionItem(_Item):
    """A call of a function."""

    PREFIX = "fc"

    def __init__(self, index: int, home: str, called: Called) -> None:
        super().__init__(index, home)
        self._called = called

    def begin(self) -> list[Event]:
        return [self._added()]

    def add(self, text: str, logprobs: Sequence[Document] = ()) -> list[Event]:
        self._texts.append(text)
        return [self._event("function_call_arguments.delta", delta=text)]

    def finish(self, status: Status) -> list[Event]:
        self._status = status
        return [self._event("function_call_arguments.done", arguments=self._text), self._done()]

    def document(self) -> Document:
        return {
            "id": self._id,
            "type": "function_call",
            "status": self._status,
            **self._called.fields(),
            "arguments": self._text,
        }


class CustomItem(_Item):
    """A call of a custom tool, which the model made as a call of a function."""

    PREFIX = "ctc"

    def __init__(self, index: int, home: str, called: Called) -> None:
        super().__init__(index, home)
        self._called = called
        self._input = CustomInput()

    def begin(self) -> list[Event]:
        return [self._added()]

    def add(self, text: str, logprobs: Sequence[Document] = ()) -> list[Event]:
        return self._say(self._input.feed(text))

    def finish(self, status: Status) -> list[Event]:
        events = self._say(self._input.finish())
        self._status = status
        return [*events, self._event("custom_tool_call_input.done", input=self._text), self._done()]

    def document(self) -> Document:
        return {
            "id": self._id,
            "type": "custom_tool_call",
            "status": self._status,
            **self._called.fields(),
            "input": self._text,
        }

    def _say(self, text: str) -> list[Event]:
        if not text:
            return []
        self._texts.append(text)
        return [self._event("custom_tool_call_input.delta", delta=text)]
