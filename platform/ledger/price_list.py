"""The prices in the database: announced ahead, in force from their date on, and never changed after it."""

from __future__ import annotations

import re
from collections.abc import Collection
from typing import Any

from sqlalchemy import Connection, Row, delete, func, insert, select, text

from loramux.migrations import schema
from loramux.migrations.audit import audit
from loramux.migrations.database import Database
from loramux.migrations.identifiers import new_id
from loramux.migrations.paging import Page, keyset_rows
from loramux.platform.errors import Conflict, InvalidRequest, NotFound
from loramux.platform.ledger.prices import GENERAL_SCOPES, MAX_PRICE_NANOS, Price, PriceBook

NOTICE_US = 2_000_000
"""So long before it takes effect a price must be known, and can no longer be taken back."""

MAX_AHEAD_US = 10 * 366 * 86_400_000_000
MAX_PRICES = 10_000

_CURRENCY = re.compile(r"[A-Z]{3}")
_ADAPTER = re.compile(r"ada_[0-9a-f]{32}")


class PriceInForce(Conflict):
    """The price holds already, or is about to, and what was charged by it must stay explicable."""

    code = "price_in_force"


class PriceExists(Conflict):
    """Another price of the same owner and scope takes effect at the same time."""

    code = "price_exists"


class PriceList:
    """The prices of the platform and of single tenants. A scope without a price costs nothing."""

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
        currency: str = "USD",
        effective_us: int | None = None,
    ) -> Price:
        """Announce a price; by default it takes effect as soon as every gateway can know it, `NOTICE_US` from now.

        `cached_nanos` defaults to the price of the prompt. Raises InvalidRequest that names the field, NotFound, and
        PriceExists.
        """
        cached_nanos = prompt_nanos if cached_nanos is None else cached_nanos
        _check(scope, prompt_nanos, cached_nanos, completion_nanos, currency)
        prices = schema.prices
        with self._database.write() as connection:
            now_us = self._lock(connection)
            _check_owner(connection, tenant_id, scope)
            effective_us = now_us + NOTICE_US if effective_us is None else effective_us
            if not now_us + NOTICE_US <= effective_us <= now_us + MAX_AHEAD_US:
                raise InvalidRequest(
                    f"a price takes effect between {NOTICE_US // 1_000_000} s and 10 years from now: "
                    "what is past stays as it was",
                    param="effective_at",
                )
            others = select(prices.c.currency).limit(1)
            if (known := connection.execute(others).scalar()) not in (None, currency):
                raise InvalidRequest(f"the prices here are in {known}, and amounts must add up", param="currency")
            if connection.execute(select(func.count()).select_from(prices)).scalar_one() >= MAX_PRICES:
                raise InvalidRequest(f"there are {MAX_PRICES} prices already", param="scope", code="too_many_prices")
            same = _same_owner(tenant_id) & (prices.c.scope == scope) & (prices.c.effective_us == effective_us)
            if connection.execute(select(prices.c.id).where(same)).first() is not None:
                raise PriceExists("a price of this scope takes effect at that time already", param="effective_at")
            price = Price(
                id=new_id("prc"),
                tenant_id=tenant_id,
                scope=scope,
                currency=currency,
                prompt_nanos=prompt_nanos,
                cached_nanos=cached_nanos,
                completion_nanos=completion_nanos,
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
        """Prices, those announced last first: with a tenant, its own and the list's; else all.

        With `only`, of single adapters only these.
        """
        prices = schema.prices
        query = select(prices)
        if tenant_id is not None:
            query = query.where(prices.c.tenant_id.is_(None) | (prices.c.tenant_id == tenant_id))
        if only is not None:
            query = query.where(prices.c.scope.in_((*GENERAL_SCOPES, *only)))
        with self._database.read() as connection:
            rows, has_more = keyset_rows(connection, query, prices.c.id, limit, after, before)
        return Page(tuple(_price(row) for row in rows), has_more)

    def get(self, price_id: str) -> Price | None:
        with self._database.read() as connection:
            row = connection.execute(select(schema.prices).where(schema.prices.c.id == price_id)).one_or_none()
        return None if row is None else _price(row)

    def withdraw(self, price_id: str) -> None:
        """Take back a price that is still to come; raises NotFound and PriceInForce."""
        prices = schema.prices
        with self._database.write() as connection:
            now_us = self._lock(connection)
            row = connection.execute(select(prices).where(prices.c.id == price_id)).one_or_none()
            if row is None:
                raise NotFound("there is no such price", code="price_not_found")
            if row.effective_us < now_us + NOTICE_US:
                raise PriceInForce("the price is in force or about to be; announce another one that follows it")
            connection.execute(delete(prices).where(prices.c.id == price_id))
            before = _shown(_price(row))
            audit(connection, now_us, "price.withdraw", price_id, tenant_id=row.tenant_id, before=before)

    def currency(self) -> str | None:
        """What amounts are in; None while nothing has a price."""
        with self._database.read() as connection:
            return connection.execute(select(schema.prices.c.currency).limit(1)).scalar()

    def _lock(self, connection: Connection) -> int:
        """Keep out other changes and readings until this one is done; the time, read after that."""
        if not self._database.is_sqlite:
            connection.execute(text("LOCK TABLE prices IN SHARE ROW EXCLUSIVE MODE"))
        return self._database.now_us(connection)


class PriceReader:
    """Keeps the price book between transactions, and reads it anew where it no longer says what holds now.

    One a process; safe from several threads, since a book is replaced as a whole.
    """

    def __init__(self, database: Database) -> None:
        self._database = database
        self._book = PriceBook((), 0)

    def book(self, connection: Connection, now_us: int) -> PriceBook:
        """A book that knows every price until `now_us`, read in the caller's transaction where that is needed."""
        # A book that knows more than twice the notice was read before the clock went back.
        if not now_us < self._book.known_until_us <= now_us + 2 * NOTICE_US:
            self._book = self._read(connection)
        return self._book

    def _read(self, connection: Connection) -> PriceBook:
        if not self._database.is_sqlite:
            # Waits for a change that is under way and holds off the next: who changes prices after this reads the
            # time after it, and may then touch nothing that takes effect sooner than NOTICE_US from here.
            connection.execute(text("LOCK TABLE prices IN SHARE MODE"))
        read_us = self._database.now_us(connection)
        rows = connection.execute(select(schema.prices)).all()
        return PriceBook([_price(row) for row in rows], read_us + NOTICE_US)


def _check(scope: str, prompt_nanos: int, cached_nanos: int, completion_nanos: int, currency: str) -> None:
    if scope not in GENERAL_SCOPES and not _ADAPTER.fullmatch(scope):
        raise InvalidRequest("a scope is all, base, adapters or an adapter's identifier", param="scope")
    named = {"prompt": prompt_nanos, "cached": cached_nanos, "completion": completion_nanos}
    for name, nanos in named.items():
        if not 0 <= nanos <= MAX_PRICE_NANOS:
            raise InvalidRequest(f"a price lies in 0 to {MAX_PRICE_NANOS} nanos a million tokens", param=name)
    if cached_nanos > prompt_nanos:
        raise InvalidRequest("cached tokens may not cost more than others of the prompt", param="cached")
    if not _CURRENCY.fullmatch(currency):
        raise InvalidRequest("a currency has three capital letters, such as USD", param="currency")


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
    """For the audit log."""
    return {name: value for name, value in _values(price).items() if name not in ("id", "tenant_id", "created_us")}


def _values(price: Price) -> dict[str, Any]:
    return {column.name: getattr(price, column.name) for column in schema.prices.c}


def _price(row: Row[Any]) -> Price:
    return Price(**row._mapping)
