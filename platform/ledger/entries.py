"""What settlements write into the ledger: events, adjustments, and the word to the rollups that they are there."""

from __future__ import annotations

import secrets
from collections.abc import Collection, Mapping
from typing import Any

from sqlalchemy import Connection, select

from loramux.migrations import schema
from loramux.migrations.bulk_rows import BulkStatement
from loramux.migrations.identifiers import new_id
from loramux.platform.ledger.price_list import PriceReader
from loramux.platform.ledger.prices import PriceBook
from loramux.platform.ledger.settlement import Settlement

_EVENTS = BulkStatement.insert(schema.usage_events)
_ADJUSTMENTS = BulkStatement.insert(schema.usage_adjustments)
_BATCHES = BulkStatement.insert(schema.usage_batches)


class LedgerEntries:
    """The ledger's part of one transaction, gathered in memory and written at its end.

    A request costs what the price in force at its admission says, however long it runs. The batch that is written
    beside the entries is how `UsageRollups` finds them: it is there exactly when they are.
    """

    def __init__(self, connection: Connection, prices: PriceReader) -> None:
        self._connection = connection
        self._prices = prices
        self._events: list[tuple[Mapping[str, Any], Settlement]] = []
        self._corrections: list[tuple[Mapping[str, Any], Settlement, Settlement]] = []

    def charge(self, reservation: Mapping[str, Any], settlement: Settlement) -> None:
        """Enter a request, by the row of its reservation."""
        self._events.append((reservation, settlement))

    def correct(self, reservation: Mapping[str, Any], charged: Settlement, truth: Settlement) -> None:
        """Enter by how much a request cost more, or less, than it was charged."""
        self._corrections.append((reservation, charged, truth))

    def writes(self, now_us: int) -> list[tuple[BulkStatement, list[dict[str, Any]]]]:
        """What writes all of it, as finished now."""
        if not self._events and not self._corrections:
            return []
        batch_id = secrets.randbits(62) + 1
        book = self._prices.book(self._connection, now_us)
        entered = [entry[0] for entry in self._events] + [entry[0] for entry in self._corrections]
        adapters = adapters_of(self._connection, {one["adapter_version_id"] for one in entered} - {None})
        return [
            (_EVENTS, [_event(*entry, adapters, book, now_us, batch_id) for entry in self._events]),
            (_ADJUSTMENTS, [_adjustment(*entry, adapters, book, now_us, batch_id) for entry in self._corrections]),
            (_BATCHES, [{"id": batch_id, "at_us": now_us}]),
        ]


def adapters_of(connection: Connection, version_ids: Collection[str]) -> dict[str, str]:
    """The adapter of each version."""
    if not version_ids:
        return {}
    versions = schema.adapter_versions.c
    query = select(versions.id, versions.adapter_id).where(versions.id.in_(version_ids))
    return {row.id: row.adapter_id for row in connection.execute(query)}


def _event(
    reservation: Mapping[str, Any],
    settlement: Settlement,
    adapters: Mapping[str, str],
    book: PriceBook,
    now_us: int,
    batch_id: int,
) -> dict[str, Any]:
    version_id = reservation["adapter_version_id"]
    adapter_id = adapters.get(version_id)
    price = book.price_of(reservation["tenant_id"], adapter_id, reservation["created_us"])
    return {
        "request_id": reservation["id"],
        "tenant_id": reservation["tenant_id"],
        "api_key_id": reservation["api_key_id"],
        "adapter_id": adapter_id,
        "adapter_version_id": version_id,
        "model": reservation["model"],
        "endpoint": reservation["endpoint"],
        "base": reservation["base"],
        "end_user": reservation["end_user"],
        "status": settlement.status,
        "prompt_tokens": settlement.prompt_tokens,
        "cached_tokens": settlement.cached_tokens,
        "completion_tokens": settlement.completion_tokens,
        "cost_nanos": settlement.cost_nanos(price),
        "price_id": None if price is None else price.id,
        "started_us": reservation["created_us"],
        "finished_us": now_us,
        "first_token_us": settlement.first_token_us,
        "batch_id": batch_id,
    }


def _adjustment(
    reservation: Mapping[str, Any],
    charged: Settlement,
    truth: Settlement,
    adapters: Mapping[str, str],
    book: PriceBook,
    now_us: int,
    batch_id: int,
) -> dict[str, Any]:
    adapter_id = adapters.get(reservation["adapter_version_id"])
    price = book.price_of(reservation["tenant_id"], adapter_id, reservation["created_us"])
    return {
        "id": new_id("adj"),
        "request_id": reservation["id"],
        "tenant_id": reservation["tenant_id"],
        "prompt_tokens": truth.prompt_tokens - charged.prompt_tokens,
        "cached_tokens": truth.cached_tokens - charged.cached_tokens,
        "completion_tokens": truth.completion_tokens - charged.completion_tokens,
        "cost_nanos": truth.cost_nanos(price) - charged.cost_nanos(price),
        "created_us": now_us,
        "batch_id": batch_id,
    }
