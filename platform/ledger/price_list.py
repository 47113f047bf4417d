"""The prices in the database. Each is added in advance and never changes once it is in force."""

from __future__ import annotations

import re
from collections.abc import Collection
from typing import Any

from sqlalchemy import Connection, Row, delete, func, insert, select, text

from loramux.migrations import schema
from loramux.migrations.audit import audit
from loramux.migrations.database import Database
from loramux.migrations.identifiers import new_id
from loramux.migrations.paging import Page, keyset_page
from loramux.platform.amounts import money_text
from loramux.platform.errors import Conflict, InvalidRequest, NotFound
from loramux.platform.ledger.prices import GENERAL_SCOPES, MAX_PERCENT, MAX_PRICE_NANOS, Price, PriceBook

NOTICE_US = 2_000_000
"""Minimum notice for a price, in microseconds. A price that takes effect within this time cannot be withdrawn."""

MAX_AHEAD_US = 10 * 366 * 86_400_000_000
MAX_PRICES = 10_000

_CURRENCY = re.compile(r"[A-Z]{3}")
_ADAPTER = re.compile(r"ada_[0-9a-f]{32}")


class PriceList:
    """The platform's list prices and the prices of individual tenants. Usage without a price is free.

    Prices are added in advance and never change once they are in force.
    """

    def __init__(self, database: Database) -> None:
        self._database = database

    def add(
        self,
        *,
        tenant_id: str | None,
        scope: str,
        prompt_nanos: int,
        cached_nanos: int | None,
        completion_nanos: int,
        batch_percent: int = 100,
        flex_percent: int = 100,
        priority_percent: int = 100,
        currency: str = "USD",
        effective_us: int | None = None,
    ) -> Price:
        """Add a price. By default it takes effect after `NOTICE_US`, when every gateway has read it.

        `cached_nanos` defaults to `prompt_nanos`. Raises InvalidRequest with the field's name, NotFound for an unknown
        tenant or adapter, or Conflict if another price for the same owner and scope takes effect at the same time.
        """
        cached_nanos = prompt_nanos if cached_nanos is None else cached_nanos
        _check(scope, prompt_nanos, cached_nanos, completion_nanos, currency)
        _check_percents(batch_percent, flex_percent, priority_percent)
        prices = schema.prices
        with self._database.write() as connection:
            now_us = self._lock(connection)
            _check_owner(connection, tenant_id, scope)
            effective_us = now_us + NOTICE_US if effective_us is None else effective_us
            # A gateway may use its copy of the prices for NOTICE_US, and would miss a price that takes effect sooner.
            if not now_us + NOTICE_US <= effective_us <= now_us + MAX_AHEAD_US:
                raise InvalidRequest(
                    f"a price must take effect between {NOTICE_US // 1_000_000} s and 10 years from now: "
                    "past usage keeps its price",
                    param="effective_at",
                )
            others = select(prices.c.currency).limit(1)
            if (known := connection.execute(others).scalar()) not in (None, currency):
                raise InvalidRequest(f"all prices must be in one currency, which is {known}", param="currency")
            if connection.execute(select(func.count()).select_from(prices)).scalar_one() >= MAX_PRICES:
                raise InvalidRequest(f"there are already {MAX_PRICES} prices", param="scope", code="too_many_prices")
            same = _same_owner(tenant_id) & (prices.c.scope == scope) & (prices.c.effective_us == effective_us)
            if connection.execute(select(prices.c.id).where(same)).first() is not None:
                problem = "another price for this scope takes effect at the same time"
                raise Conflict(problem, param="effective_at", code="price_exists")
            price = Price(
                id=new_id("prc"),
                tenant_id=tenant_id,
                scope=scope,
                currency=currency,
                prompt_nanos=prompt_nanos,
                cached_nanos=cached_nanos,
                completion_nanos=completion_nanos,
                batch_percent=batch_percent,
                flex_percent=flex_percent,
                priority_percent=priority_percent,
                effective_us=effective_us,
                created_us=now_us,
            )
            connection.execute(insert(prices).values(**_values(price)))
            audit(connection, now_us, "price.add", price.id, tenant_id=tenant_id, after=_shown(price))
        return price

    def list(
        self,
        tenant_id: str | None,
        limit: int,
        after: str | None = None,
        before: str | None = None,
        only: Collection[str] | None = None,
    ) -> Page[Price]:
        """List a tenant's own prices and the list prices, newest first. If `tenant_id` is None, list all prices.

        `only` restricts prices for single adapters to these adapters.
        """
        prices = schema.prices
        query = select(prices)
        if tenant_id is not None:
            query = query.where(prices.c.tenant_id.is_(None) | (prices.c.tenant_id == tenant_id))
        if only is not None:
            query = query.where(prices.c.scope.in_((*GENERAL_SCOPES, *only)))
        with self._database.read() as connection:
            return keyset_page(connection, query, prices.c.id, _price, limit, after, before)

    def get(self, price_id: str) -> Price | None:
        with self._database.read() as connection:
            row = connection.execute(select(schema.prices).where(schema.prices.c.id == price_id)).one_or_none()
        return None if row is None else _price(row)

    def withdraw(self, price_id: str) -> None:
        """Withdraw a future price. Raises NotFound, or Conflict if the price is in force or will be within
        `NOTICE_US`.
        """
        prices = schema.prices
        with self._database.write() as connection:
            now_us = self._lock(connection)
            row = connection.execute(select(prices).where(prices.c.id == price_id)).one_or_none()
            if row is None:
                raise NotFound("there is no such price", code="price_not_found")
            if row.effective_us < now_us + NOTICE_US:
                # It must stay on record to explain charges.
                problem = "the price is in force or about to be: add a new price that replaces it"
                raise Conflict(problem, code="price_in_force")
            connection.execute(delete(prices).where(prices.c.id == price_id))
            before = _shown(_price(row))
            audit(connection, now_us, "price.withdraw", price_id, tenant_id=row.tenant_id, before=before)

    def currency(self) -> str | None:
        """Return the currency of all amounts, or None if there are no prices."""
        with self._database.read() as connection:
            return connection.execute(select(schema.prices.c.currency).limit(1)).scalar()

    def _lock(self, connection: Connection) -> int:
        """Block other changes, and reads by `PriceReader`, until the transaction ends. Return the current time.

        The time is read while the lock is held.
        """
        if not self._database.is_sqlite:
            connection.execute(text("LOCK TABLE prices IN SHARE ROW EXCLUSIVE MODE"))
        return self._database.now_us(connection)


class PriceReader:
    """Caches the price book between transactions and reloads an expired one.

    Create one reader per process. Thread-safe, because the book is replaced as a whole.
    """

    def __init__(self, database: Database) -> None:
        self._database = database
        self._book = PriceBook((), 0)

    def book(self, connection: Connection, now_us: int) -> PriceBook:
        """Return a book that is valid at `now_us`. If necessary, reload it in the caller's transaction."""
        # If the book is valid for more than twice the notice, the clock has been set back since it was read.
        if not now_us < self._book.known_until_us <= now_us + 2 * NOTICE_US:
            self._book = self._read(connection)
        return self._book

    def _read(self, connection: Connection) -> PriceBook:
        if not self._database.is_sqlite:
            # The lock waits for a change in progress and blocks later changes. A later change reads a later time, so
            # its price takes effect at least NOTICE_US after `read_us`.
            connection.execute(text("LOCK TABLE prices IN SHARE MODE"))
        read_us = self._database.now_us(connection)
        rows = connection.execute(select(schema.prices)).all()
        return PriceBook([_price(row) for row in rows], read_us + NOTICE_US)


def _check(scope: str, prompt_nanos: int, cached_nanos: int, completion_nanos: int, currency: str) -> None:
    if scope not in GENERAL_SCOPES and not _ADAPTER.fullmatch(scope):
        raise InvalidRequest("a scope must be all, base, adapters or an adapter's identifier", param="scope")
    named = {"prompt": prompt_nanos, "cached": cached_nanos, "completion": completion_nanos}
    for name, nanos in named.items():
        if not 0 <= nanos <= MAX_PRICE_NANOS:
            raise InvalidRequest(
                f"a price must be from 0 to {MAX_PRICE_NANOS} nanos, which is {money_text(MAX_PRICE_NANOS)} "
                "in the currency, per million tokens",
                param=name,
            )
    if cached_nanos > prompt_nanos:
        raise InvalidRequest("cached tokens must not cost more than other prompt tokens", param="cached")
    if not _CURRENCY.fullmatch(currency):
        raise InvalidRequest("a currency must be three capital letters, such as USD", param="currency")


def _check_percents(batch_percent: int, flex_percent: int, priority_percent: int) -> None:
    if not 0 <= batch_percent <= 100:
        raise InvalidRequest("batches must cost from 0 to 100 percent of the price", param="batch_percent")
    for name, percent in (("flex_percent", flex_percent), ("priority_percent", priority_percent)):
        if not 0 <= percent <= MAX_PERCENT:
            raise InvalidRequest(f"a service tier must cost from 0 to {MAX_PERCENT} percent of the price", param=name)


def _check_owner(connection: Connection, tenant_id: str | None, scope: str) -> None:
    if tenant_id is not None:
        tenant = select(schema.tenants.c.id).where(schema.tenants.c.id == tenant_id)
        if connection.execute(tenant).first() is None:
            raise NotFound("there is no such tenant", param="tenant", code="tenant_not_found")
    if scope.startswith("ada_"):
        adapter = select(schema.adapters.c.id).where(schema.adapters.c.id == scope)
        if connection.execute(adapter).first() is None:
            raise NotFound("there is no such adapter", param="scope", code="adapter_not_found")


def _same_owner(tenant_id: str | None) -> Any:
    owner = schema.prices.c.tenant_id
    return owner.is_(None) if tenant_id is None else owner == tenant_id


def _shown(price: Price) -> dict[str, Any]:
    return {name: value for name, value in _values(price).items() if name not in ("id", "tenant_id", "created_us")}


def _values(price: Price) -> dict[str, Any]:
    return {column.name: getattr(price, column.name) for column in schema.prices.c}


def _price(row: Row[Any]) -> Price:
    return Price(**row._mapping)
