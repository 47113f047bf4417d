"""Keyset pagination by identifier: newest first, stable while rows are added."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from sqlalchemy import ColumnElement, Connection, Row, Select

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Page(Generic[T]):
    """One page of a list. `has_more` is true if more rows follow in the requested direction."""

    data: tuple[T, ...]
    has_more: bool


def keyset_page(
    connection: Connection,
    query: Select[*tuple[Any, ...]],
    id_column: ColumnElement[Any],
    record_of: Callable[[Row[Any]], T],
    limit: int,
    after: str | int | None,
    before: str | int | None,
) -> Page[T]:
    """Return one page of `query`, newest first by `id_column`. `record_of` makes an item of a row.

    `after` continues after that identifier, toward older rows. `before` alone goes in the other direction: it returns
    the `limit` rows just newer than that identifier, still newest first. With both, the page starts after `after` and
    ends before `before`. The identifiers need not exist. They are text, or integers such as sequence numbers.

    Raises ValueError if `limit` is not positive, or if an identifier is not printable ASCII.
    """
    if limit < 1:
        raise ValueError(f"limit must be at least 1, not {limit}")
    for position in (after, before):
        if isinstance(position, str) and not (position.isascii() and position.isprintable()):
            raise ValueError("after and before must be identifiers of this list")
    if after is not None:
        query = query.where(id_column < after)
    if before is not None:
        query = query.where(id_column > before)
    is_backward = before is not None and after is None
    order = id_column.asc() if is_backward else id_column.desc()
    # Read one extra row to find out if there are more.
    rows = list(connection.execute(query.order_by(order).limit(limit + 1)))
    has_more = len(rows) > limit
    rows = rows[:limit]
    if is_backward:
        rows.reverse()
    return Page(tuple(map(record_of, rows)), has_more)
