"""Turns the input items of a response request into the messages of a chat request."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from loramux.engine.chat_templates.content_form import Content, joined_content
from loramux.platform.bodies.conversation import reminder
from loramux.platform.errors import InvalidRequest
from loramux.platform.requests.answers import Document
from loramux.platform.responses_api.input_items import (
    CustomCallItem,
    CustomOutputItem,
    FunctionCallItem,
    FunctionOutputItem,
    InputItem,
    MessageItem,
    ReasoningItem,
)
from loramux.platform.responses_api.reasoning_text import opened
from loramux.platform.responses_api.response_tools import INPUT, joined_name


@dataclass(slots=True)
class Messages:
    """Chat messages, and the request field that each of them comes from, such as `input[3]`.

    Until `finish`, `content` and `reasoning_content` are lists of what the items of a message contain.
    """

    documents: list[Document] = field(default_factory=list)
    places: list[str] = field(default_factory=list)

    def add(self, message: Document, place: str) -> Document:
        self.documents.append(message)
        self.places.append(place)
        return message

    def finish(self) -> None:
        for message in self.documents:
            contents = message.pop("content", None)
            if contents is not None:
                message["content"] = _shown(contents[0] if len(contents) == 1 else joined_content(contents))
            elif "tool_calls" not in message:
                message["content"] = ""
            if "reasoning_content" in message:
                message["reasoning_content"] = "\n".join(message["reasoning_content"])


def messages_of(
    instructions: str | None,
    given: str | Sequence[InputItem],
    earlier: Sequence[InputItem] = (),
    earlier_place: str = "previous_response_id",
) -> Messages:
    """Return the conversation of a request that continues after the `earlier` items, which the field `earlier_place`
    names.

    Many chat templates allow only one system message, at the start, and require that the roles alternate. So
    instructions and the system messages directly after them become one message. A later system message becomes a part
    of the user's turn, and consecutive messages of the user become one, which follows the outputs of calls.
    Consecutive reasoning, text and calls of the model become one message too, up to the outputs of the calls. Raises
    InvalidRequest for the output of a call that does not exist.
    """
    found = Messages()
    if instructions is not None:
        found.add({"role": "system", "content": [instructions]}, "instructions")
    places = [earlier_place] * len(earlier)
    if isinstance(given, str):
        given, places = [MessageItem(role="user", content=given)], [*places, "input"]
    else:
        places += [f"input[{index}]" for index in range(len(given))]
    called: set[str] = set()
    turn: Document | None = None
    """The model's message that further items can extend."""
    for item, place in _outputs_first(zip((*earlier, *given), places, strict=True)):
        match item:
            case MessageItem(role="assistant", content=content):
                turn = _add_text(found, turn, content, place)
            case MessageItem(role=role, content=content):
                turn = None
                _add_message(found, role, content, place)
            case ReasoningItem():
                turn = _add_reasoning(found, turn, _reasoning(item), place)
            case FunctionCallItem(call_id=call_id, arguments=arguments):
                turn = _add_call(found, turn, item, arguments, place)
                called.add(call_id)
            case CustomCallItem(call_id=call_id, input=text):
                turn = _add_call(found, turn, item, json.dumps({INPUT: text}, ensure_ascii=False), place)
                called.add(call_id)
            case FunctionOutputItem(call_id=call_id) | CustomOutputItem(call_id=call_id):
                if call_id not in called:
                    raise InvalidRequest("no earlier item is a call with this call_id", param=f"{place}.call_id")
                turn = None
                found.add({"role": "tool", "tool_call_id": call_id, "content": [item.output]}, place)
    found.finish()
    return found


def _outputs_first(items: Iterable[tuple[InputItem, str]]) -> Iterator[tuple[InputItem, str]]:
    """Move messages of the system and of the user behind the outputs of the calls before them, because many templates
    want outputs directly after the calls.
    """
    waiting: set[str] = set()
    held: list[tuple[InputItem, str]] = []
    for item, place in items:
        match item:
            case MessageItem(role=role) if role != "assistant":
                if waiting:
                    held.append((item, place))
                    continue
            case FunctionOutputItem(call_id=call_id) | CustomOutputItem(call_id=call_id):
                waiting.discard(call_id)
            case _:
                if held:
                    # The model has gone on without the outputs.
                    waiting.clear()
                    yield from held
                    held.clear()
                if isinstance(item, FunctionCallItem | CustomCallItem):
                    waiting.add(item.call_id)
        yield item, place
        if not waiting:
            yield from held
            held.clear()
    yield from held


def _add_message(found: Messages, role: str, content: Content, place: str) -> None:
    """Add a message of the system or of the user, or make it a part of the last message."""
    last = found.documents[-1] if found.documents else None
    if role in ("system", "developer"):
        is_leading = last is None or last["role"] == "system"
        role = "system" if is_leading else "user"
        if not is_leading:
            texts = [text for text in ((content,) if isinstance(content, str) else content) if text]
            if not texts:
                return
            content = joined_content(map(reminder, texts))
    if last is not None and last["role"] == role:
        last["content"].append(content)
    else:
        found.add({"role": role, "content": [content]}, place)


def _add_text(found: Messages, turn: Document | None, content: Content, place: str) -> Document:
    # Text after calls belongs to their message, because many templates want outputs directly after the calls.
    if turn is None or ("content" in turn and "tool_calls" not in turn):
        turn = found.add({"role": "assistant"}, place)
    turn.setdefault("content", []).append(content)
    return turn


def _add_reasoning(found: Messages, turn: Document | None, text: str, place: str) -> Document | None:
    if not text:
        return turn
    if turn is None or ("content" in turn and "tool_calls" not in turn):
        turn = found.add({"role": "assistant"}, place)
    turn.setdefault("reasoning_content", []).append(text)
    return turn


def _add_call(
    found: Messages, turn: Document | None, item: FunctionCallItem | CustomCallItem, arguments: str, place: str
) -> Document:
    if turn is None:
        turn = found.add({"role": "assistant"}, place)
    function = {"name": joined_name(item.namespace, item.name), "arguments": arguments}
    call = {"id": item.call_id, "type": "function", "function": function}
    turn.setdefault("tool_calls", []).append(call)
    return turn


def _reasoning(item: ReasoningItem) -> str:
    if item.content:
        return "".join(part.text for part in item.content)
    return opened(item.encrypted_content or "")


def _shown(content: Content) -> str | list[Document]:
    """Return content in the form of a chat message's."""
    if isinstance(content, str):
        return content
    return content[0] if len(content) == 1 else [{"type": "text", "text": text} for text in content]
