"""The common shape of lists: `{object, data, first_id, last_id, has_more}`. Lists with pages are newest first."""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import wraps
from inspect import Parameter, signature
from typing import Annotated, Any, Generic, Literal, NamedTuple, TypeVar, get_type_hints, overload

from fastapi import Query
from typing_extensions import TypedDict

from loramux.migrations.paging import Page
from loramux.platform.errors import NotFound

T = TypeVar("T")
D = TypeVar("D", bound=Mapping[str, Any])
Document = dict[str, Any]

IDENTIFIER = r"^[a-z]{3}_[0-9a-f]{32}$"

TenantParam = Annotated[str | None, Query(max_length=64, description="Only this tenant, by identifier or slug.")]


class DeletedDocument(TypedDict):
    """Confirms a deletion."""

    id: str
    object: str
    deleted: Literal[True]


class ListDocument(TypedDict, Generic[D]):
    """A page of a list. `has_more` means that there are more items in the requested direction."""

    object: Literal["list"]
    data: list[D]
    first_id: str | None
    last_id: str | None
    has_more: bool


class Paging(NamedTuple):
    """The query parameters that select a page of a list."""

    limit: Annotated[int, Query(ge=1, le=100, description="Items per page.")] = 20
    after: Annotated[str | None, Query(pattern=IDENTIFIER, description="Start after this identifier.")] = None
    before: Annotated[str | None, Query(pattern=IDENTIFIER, description="End before this identifier.")] = None


_PAGING = [
    Parameter(name, Parameter.KEYWORD_ONLY, default=Paging._field_defaults[name], annotation=kind)
    for name, kind in get_type_hints(Paging, include_extras=True).items()
]


def paged(route: Callable[..., Awaitable[D]]) -> Callable[..., Awaitable[D]]:
    """Add the query parameters `limit`, `after` and `before` to a list route, which gets them as `paging`.

    They are not a dependency, because FastAPI validates dependencies first. An invalid `limit` would then be reported
    before an invalid parameter of the route itself.
    """

    @wraps(route)
    async def listed(*, limit: int, after: str | None, before: str | None, **others: Any) -> D:
        return await route(**others, paging=Paging(limit, after, before))

    given = signature(route)
    others = [parameter for name, parameter in given.parameters.items() if name != "paging"]
    vars(listed)["__signature__"] = given.replace(parameters=[*others, *_PAGING])
    return listed


def list_document(page: Page[T], describe: Callable[[T], D]) -> ListDocument[D]:
    """The document for a page of items that have an `id`."""
    data = [describe(item) for item in page.data]
    return {
        "object": "list",
        "data": data,
        "first_id": data[0]["id"] if data else None,
        "last_id": data[-1]["id"] if data else None,
        "has_more": page.has_more,
    }


def whole_list(data: Sequence[D], has_more: bool = False) -> ListDocument[D]:
    """The document for a list without paging, whose items need no `id`."""
    return {"object": "list", "data": list(data), "first_id": None, "last_id": None, "has_more": has_more}


def check_identifier(value: str, what: str) -> str:
    """Raise NotFound for text that cannot be an identifier, so that it never reaches the database."""
    if re.fullmatch(IDENTIFIER[1:-1], value) is None:
        named = what.replace("api_key", "API key").replace("_", " ")
        raise NotFound(f"there is no such {named}", code=f"{what}_not_found")
    return value


@overload
def seconds(time_us: int) -> int: ...
@overload
def seconds(time_us: None) -> None: ...
@overload
def seconds(time_us: int | None) -> int | None: ...
def seconds(time_us: int | None) -> int | None:
    """Convert a Unix time from microseconds to whole seconds, the unit of times in responses."""
    return None if time_us is None else time_us // 1_000_000


def micros(time_s: int | None) -> int | None:
    """Convert a Unix time from seconds, the unit of times in requests, to microseconds."""
    return None if time_s is None else time_s * 1_000_000
