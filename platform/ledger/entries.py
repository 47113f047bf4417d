"""The ledger entries that settlements write: events, adjustments, and batches that queue both for the rollups."""

from __future__ import annotations

import secrets
from collections.abc import Collection, Mapping
from dataclasses import dataclass

import msgspec
from sqlalchemy import Connection, select

from loramux.migrations import schema
from loramux.migrations.bulk_rows import BulkStatement, Write
from loramux.migrations.identifiers import new_id
from loramux.platform.ledger.price_list import PriceReader
from loramux.platform.ledger.prices import PURGED, Price, PriceBook, rate_of
from loramux.platform.ledger.settlement import Settlement


class RequestRow(msgspec.Struct, frozen=True, gc=False):
    """The fields of a request that the ledger needs, named after columns of `reservations`."""

    id: str
    tenant_id: str
    api_key_id: str
    adapter_version_id: str | None
    model: str
    endpoint: str
    base: str
    end_user: str | None
    service_tier: str
    created_us: int


class _EventRow(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    request_id: str
    tenant_id: str
    api_key_id: str
    adapter_id: str | None
    adapter_version_id: str | None
    model: str
    endpoint: str
    base: str
    end_user: str | None
    service_tier: str
    status: str
    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int
    cost_nanos: int
    price_id: str | None
    started_us: int
    finished_us: int
    first_token_us: int | None
    batch_id: int


class _AdjustmentRow(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    id: str
    request_id: str
    tenant_id: str
    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int
    cost_nanos: int
    created_us: int
    batch_id: int


class _BatchRow(msgspec.Struct, frozen=True, gc=False):
    id: int
    at_us: int


_EVENTS = BulkStatement.insert(schema.usage_events, _EventRow)
_ADJUSTMENTS = BulkStatement.insert(schema.usage_adjustments, _AdjustmentRow)
_BATCHES = BulkStatement.insert(schema.usage_batches, _BatchRow)


@dataclass(frozen=True, slots=True)
class _Batch:
    id: int
    at_us: int
    adapters: Mapping[str, str]
    book: PriceBook

    def adapter_and_price(self, request: RequestRow) -> tuple[str | None, Price | None]:
        priced_id = priced_adapter(request.adapter_version_id, self.adapters)
        rate = rate_of(request.endpoint, request.service_tier)
        price = self.book.price_of(request.tenant_id, priced_id, request.created_us, rate)
        return priced_id or None, price


class LedgerEntries:
    """One transaction's ledger entries, collected in memory and written at its end.

    A request is charged at the price in force when it was admitted, no matter how long it runs. A batch row in the same
    transaction lets `UsageRollups` find the entries.
    """

    def __init__(self, connection: Connection, prices: PriceReader) -> None:
        self._connection = connection
        self._prices = prices
        self._events: list[tuple[RequestRow, Settlement]] = []
        self._corrections: list[tuple[RequestRow, Settlement, Settlement]] = []

    def charge(self, request: RequestRow, settlement: Settlement) -> None:
        self._events.append((request, settlement))

    def correct(self, request: RequestRow, charged: Settlement, truth: Settlement) -> None:
        """Add an adjustment for the difference between a request's actual and charged usage."""
        self._corrections.append((request, charged, truth))

    def writes(self, now_us: int) -> list[Write]:
        if not self._events and not self._corrections:
            return []
        entered = [entry[0] for entry in self._events] + [entry[0] for entry in self._corrections]
        versions = {one.adapter_version_id for one in entered if one.adapter_version_id is not None}
        batch = _Batch(
            secrets.randbits(62) + 1,
            now_us,
            adapters_of(self._connection, versions),
            self._prices.book(self._connection, now_us),
        )
        return [
            (_EVENTS, [_event(*entry, batch) for entry in self._events]),
            (_ADJUSTMENTS, [_adjustment(*entry, batch) for entry in self._corrections]),
            (_BATCHES, [_BatchRow(batch.id, now_us)]),
        ]


def adapters_of(connection: Connection, version_ids: Collection[str]) -> dict[str, str]:
    if not version_ids:
        return {}
    versions = schema.adapter_versions.c
    query = select(versions.id, versions.adapter_id).where(versions.id.in_(version_ids))
    return {row.id: row.adapter_id for row in connection.execute(query)}


def priced_adapter(version_id: str | None, adapters: Mapping[str, str]) -> str | None:
    """Return the adapter whose price applies to a version, PURGED if the version no longer exists, or None without a
    version. `adapters` is the result of `adapters_of`.
    """
    return None if version_id is None else adapters.get(version_id, PURGED)


def _event(request: RequestRow, settlement: Settlement, batch: _Batch) -> _EventRow:
    adapter_id, price = batch.adapter_and_price(request)
    return _EventRow(
        request_id=request.id,
        tenant_id=request.tenant_id,
        api_key_id=request.api_key_id,
        adapter_id=adapter_id,
        adapter_version_id=request.adapter_version_id,
        model=request.model,
        endpoint=request.endpoint,
        base=request.base,
        end_user=request.end_user,
        service_tier=request.service_tier,
        status=settlement.status,
        prompt_tokens=settlement.prompt_tokens,
        cached_tokens=settlement.cached_tokens,
        completion_tokens=settlement.completion_tokens,
        cost_nanos=settlement.cost_nanos(price),
        price_id=None if price is None else price.id,
        started_us=request.created_us,
        finished_us=batch.at_us,
        first_token_us=settlement.first_token_us,
        batch_id=batch.id,
    )


def _adjustment(request: RequestRow, charged: Settlement, truth: Settlement, batch: _Batch) -> _AdjustmentRow:
    _, price = batch.adapter_and_price(request)
    return _AdjustmentRow(
        id=new_id("adj"),
        request_id=request.id,
        tenant_id=request.tenant_id,
        prompt_tokens=truth.prompt_tokens - charged.prompt_tokens,
        cached_tokens=truth.cached_tokens - charged.cached_tokens,
        completion_tokens=truth.completion_tokens - charged.completion_tokens,
        cost_nanos=truth.cost_nanos(price) - charged.cost_nanos(price),
        created_us=batch.at_us,
        batch_id=batch.id,
    )
