"""Input items in the form in which a stored response lists them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pydantic import TypeAdapter

from loramux.engine.chat_templates.content_form import Content
from loramux.platform.requests.answers import Document
from loramux.platform.responses_api.input_items import InputItem, MessageItem
from loramux.platform.responses_api.output_items import new_item_id

_PREFIXES = {
    "reasoning": "rs",
    "function_call": "fc",
    "function_call_output": "fco",
    "custom_tool_call": "ctc",
    "custom_tool_call_output": "ctco",
}
_ITEMS: TypeAdapter[list[Any]] = TypeAdapter(list[InputItem])


def listed_items(given: str | Sequence[InputItem], home: str, first: int = 0) -> list[Document]:
    """Return the input items of a request, each with an ID and with its content in parts. `home` names the object in
    which new items are stored, and their IDs have numbers from `first` on.
    """
    if isinstance(given, str):
        given = [MessageItem(role="user", content=given)]
    return [_listed(item, home, number) for number, item in enumerate(given, first)]


def read_items(items: list[Document]) -> list[InputItem]:
    """Return stored items, of the input or of the output, as the input of a request."""
    return _ITEMS.validate_python(items)


def _listed(item: InputItem, home: str, number: int) -> Document:
    if isinstance(item, MessageItem):
        shown: Document = {
            "type": "message",
            "role": item.role,
            "content": _parts(item.content, is_output=item.role == "assistant"),
        }
        return {"id": item.id or new_item_id("msg", home, number), **shown, "status": item.status or "completed"}
    document = item.model_dump(exclude_none=True)
    if isinstance(document.get("output"), tuple):
        document["output"] = _parts(document["output"], is_output=False)
    if document["type"] == "reasoning":
        document = {"summary": [], **document}
    return {**document, "id": item.id or new_item_id(_PREFIXES[document["type"]], home, number)}


def _parts(content: Content, *, is_output: bool) -> list[Document]:
    texts = (content,) if isinstance(content, str) else content
    if is_output:
        return [{"type": "output_text", "text": text, "annotations": [], "logprobs": []} for text in texts]
    return [{"type": "input_text", "text": text} for text in texts]
