"""Pages of a list of objects that was read as a whole."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Literal, TypeAlias

from fastapi import Query

from loramux.platform.errors import InvalidRequest
from loramux.platform.requests.answers import Document

Limit: TypeAlias = Annotated[int, Query(ge=1, le=100)]
Order: TypeAlias = Literal["asc", "desc"]
After: TypeAlias = Annotated[str | None, Query(max_length=256)]


def item_page(items: Sequence[Document], limit: int, order: Order, after: str | None) -> Document:
    """Return a page of items that are in ascending order. Raises InvalidRequest if no item has the ID `after`."""
    if order == "desc":
        items = items[::-1]
    if after is not None:
        place = next((index for index, item in enumerate(items) if item["id"] == after), None)
        if place is None:
            raise InvalidRequest("the list has no item with this id", param="after")
        items = items[place + 1 :]
    return shown_page(items[:limit], has_more=len(items) > limit)


def shown_page(shown: Sequence[Document], *, has_more: bool) -> Document:
    return {
        "object": "list",
        "data": list(shown),
        "first_id": shown[0]["id"] if shown else None,
        "last_id": shown[-1]["id"] if shown else None,
        "has_more": has_more,
    }
