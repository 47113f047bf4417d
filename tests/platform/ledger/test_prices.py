from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from loramux.migrations.database import Database
from loramux.migrations.identifiers import new_id
from loramux.platform.accounts.tenants import Tenant
from loramux.platform.admission.admission import Admission
from loramux.platform.admission.records import ReservationRequest
from loramux.platform.errors import Conflict, InvalidRequest, NotFound
from loramux.platform.ledger.events import Ledger
from loramux.platform.ledger.price_list import NOTICE_US, PriceList, PriceReader
from loramux.platform.ledger.prices import MAX_PRICE_NANOS, MILLION, Price, PriceBook, cost_of
from loramux.platform.ledger.settlement import Settlement

DOLLAR = 1_000_000_000


def price(
    prompt: int, cached: int, completion: int, tenant_id: str | None = None, scope: str = "all", effective_us: int = 0
) -> Price:
    return Price(
        id=f"prc_{tenant_id}_{scope}_{effective_us}",
        tenant_id=tenant_id,
        scope=scope,
        currency="USD",
        prompt_nanos=prompt,
        cached_nanos=cached,
        completion_nanos=completion,
        effective_us=effective_us,
        created_us=0,
    )


amounts = st.integers(0, MAX_PRICE_NANOS)
counts = st.integers(0, 2**24)


@st.composite
def prices(draw: st.DrawFn) -> Price:
    prompt = draw(amounts)
    return price(prompt, draw(st.integers(0, prompt)), draw(amounts))


def test_million_tokens_cost_the_list_price() -> None:
    listed = price(DOLLAR // 2, DOLLAR // 20, 3 * DOLLAR)
    assert cost_of(listed, MILLION, 0, 0) == DOLLAR // 2
    assert cost_of(listed, MILLION, MILLION, 0) == DOLLAR // 20
    assert cost_of(listed, 0, 0, MILLION) == 3 * DOLLAR
    assert cost_of(listed, 1000, 400, 10) == 600 * 500 + 400 * 50 + 10 * 3000
    assert cost_of(None, MILLION, 0, MILLION) == 0


@pytest.mark.parametrize(
    ("percent", "expected"), [(100, (3, 1, 200)), (50, (2, 1, 100)), (0, (0, 0, 0)), (1, (1, 1, 2))]
)
def test_batches_pay_a_part_of_the_price_rounded_up(percent: int, expected: tuple[int, int, int]) -> None:
    book = PriceBook([replace(price(3, 1, 200), batch_percent=percent)], 0)
    paid = book.price_of("ten_a", None, 0, "batch")
    assert paid is not None
    assert (paid.prompt_nanos, paid.cached_nanos, paid.completion_nanos) == expected
    assert book.price_of("ten_a", None, 0) == replace(price(3, 1, 200), batch_percent=percent)


@pytest.mark.parametrize(("tokens", "nanos"), [(0, 0), (1, 1), (2, 1), (3, 2), (1_000_000, 500_000)])
def test_fraction_of_a_nano_is_rounded_up_once(tokens: int, nanos: int) -> None:
    assert cost_of(price(500_000, 0, 0), tokens, 0, 0) == nanos


@settings(deadline=None)
@given(prices(), counts, counts, counts, counts)
def test_cost_reserved_in_two_parts_covers_the_actual_cost(
    one: Price, prompt: int, first: int, second: int, cached: int
) -> None:
    held = cost_of(one, prompt, 0, first) + cost_of(one, 0, 0, second)
    for completion in (0, first, first + second):
        truth = cost_of(one, prompt, min(cached, prompt), completion)
        assert 0 <= truth <= held < 2**63


def test_most_specific_price_of_the_nearest_owner_applies() -> None:
    book = PriceBook(
        [
            price(1, 0, 0),
            price(2, 0, 0, scope="adapters"),
            price(3, 0, 0, scope="ada_1"),
            price(4, 0, 0, tenant_id="ten_a"),
            price(5, 0, 0, tenant_id="ten_a", scope="base"),
            price(6, 0, 0, tenant_id="ten_b", scope="ada_1"),
        ],
        0,
    )

    def prompt_price(tenant_id: str, adapter_id: str | None) -> int:
        found = book.price_of(tenant_id, adapter_id, 0)
        assert found is not None
        return found.prompt_nanos

    assert prompt_price("ten_a", "ada_1") == 4, "a tenant's own price overrides the list"
    assert prompt_price("ten_a", None) == 5
    assert prompt_price("ten_b", "ada_1") == 6
    assert prompt_price("ten_b", "ada_2") == 2
    assert prompt_price("ten_c", "ada_1") == 3
    assert prompt_price("ten_c", None) == 1


@settings(deadline=None)
@given(st.lists(st.integers(1, 100), unique=True, min_size=1), st.integers(0, 101))
def test_price_applies_until_the_next_one(dates: list[int], at: int) -> None:
    book = PriceBook([price(date, 0, 0, effective_us=date) for date in dates], 0)
    found = book.price_of("ten_a", None, at)
    assert (found.prompt_nanos if found else None) == max((date for date in dates if date <= at), default=None)


@pytest.fixture
def price_list(clocked: Database) -> PriceList:
    return PriceList(clocked)


def announce(price_list: PriceList, dollars: int, **more: Any) -> Price:
    fields: dict[str, Any] = {"tenant_id": None, "scope": "all", "cached_nanos": 0, "completion_nanos": 0}
    return price_list.add(prompt_nanos=dollars * DOLLAR, **{**fields, **more})


def test_past_prices_cannot_change(price_list: PriceList, clock: Any) -> None:
    one = announce(price_list, 1)
    assert one.effective_us == clock.now_us + NOTICE_US
    for moment in (0, clock.now_us, one.effective_us - 1):
        with pytest.raises(InvalidRequest) as caught:
            announce(price_list, 2, effective_us=moment)
        assert caught.value.param == "effective_at"
    later = announce(price_list, 2, effective_us=clock.now_us + 10 * NOTICE_US)
    clock.advance(1)
    with pytest.raises(Conflict) as refused:
        price_list.withdraw(one.id)
    assert refused.value.code == "price_in_force"
    price_list.withdraw(later.id)
    with pytest.raises(NotFound):
        price_list.withdraw(later.id)
    assert price_list.list(None, 10).data == (one,)


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"scope": "everything"}, "scope"),
        ({"scope": "ada_" + "0" * 32}, "scope"),
        ({"tenant_id": "ten_" + "0" * 32}, "tenant"),
        ({"prompt_nanos": -1}, "prompt"),
        ({"completion_nanos": MAX_PRICE_NANOS + 1}, "completion"),
        ({"cached_nanos": 2 * DOLLAR}, "cached"),
        ({"batch_percent": 101}, "batch_percent"),
        ({"batch_percent": -1}, "batch_percent"),
        ({"currency": "usd"}, "currency"),
        ({"currency": "EUR"}, "currency"),
        ({"effective_us": 2**62}, "effective_at"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_invalid_price_error_names_the_field(
    price_list: PriceList, change: dict[str, Any], param: str, clocked: Database
) -> None:
    announce(price_list, 1)
    fields: dict[str, Any] = {"tenant_id": None, "scope": "base", "prompt_nanos": DOLLAR}
    with pytest.raises((InvalidRequest, NotFound)) as caught:
        price_list.add(**{**fields, "cached_nanos": None, "completion_nanos": 0, **change})
    assert caught.value.param == param
    assert len(price_list.list(None, 10).data) == 1


def test_second_price_for_the_same_scope_and_time_is_refused(price_list: PriceList, acme: Tenant) -> None:
    one = announce(price_list, 1)
    with pytest.raises(Conflict) as caught:
        announce(price_list, 2)
    assert (caught.value.code, caught.value.param) == ("price_exists", "effective_at")
    announce(price_list, 2, scope="base")
    announce(price_list, 2, tenant_id=acme.id)
    assert price_list.currency() == "USD"
    assert one in price_list.list(acme.id, 10).data


def test_request_costs_the_price_at_its_admission(
    clocked: Database, clock: Any, acme: Tenant, acme_key: str, price_list: PriceList
) -> None:
    admission = Admission(clocked)

    def reserve() -> str:
        request = ReservationRequest(
            request_id=new_id("req"),
            tenant_id=acme.id,
            api_key_id=acme_key,
            model="base",
            adapter_version_id=None,
            endpoint="completions",
            prompt_tokens=1000,
            reserved_tokens=2000,
            base="base",
            end_user="someone",
        )
        return admission.reserve(request).request_id

    truth = Settlement(status="completed", prompt_tokens=1000, completion_tokens=10, cached_tokens=400)
    free = reserve()
    first = announce(price_list, 1, completion_nanos=5 * DOLLAR)
    # This request is settled before the price takes effect, even though the price list was just read again.
    admission.settle(free, truth)
    clock.now_us = first.effective_us
    early, recovered = reserve(), reserve()
    second = announce(price_list, 7)
    clock.now_us = second.effective_us
    late = reserve()
    for request_id in (early, late):
        admission.settle(request_id, truth)
    clock.advance(60)
    admission.recover_expired()
    admission.settle(recovered, truth)
    events = {event.request_id: event for event in Ledger(clocked).events(acme.id, 10).data}
    costs = {name: events[name].cost_nanos for name in (free, early, late, recovered)}
    at_first = 600 * 1000 + 10 * 5000
    assert costs == {free: 0, early: at_first, late: 600 * 7000, recovered: at_first}
    assert events[early].price_id == first.id
    assert (events[early].base, events[early].end_user) == ("base", "someone")


def test_clock_jumps_forward_and_back_hide_no_price(price_list: PriceList, clocked: Database, clock: Any) -> None:
    first, reader = announce(price_list, 1), PriceReader(clocked)
    clock.advance(7 * 86_400)
    with clocked.read() as connection:
        assert reader.book(connection, clock.now_us).price_of("ten_any", None, clock.now_us) == first
    clock.advance(1 - 7 * 86_400)
    second = announce(price_list, 2)
    clock.advance(60)
    with clocked.read() as connection:
        assert reader.book(connection, clock.now_us).price_of("ten_any", None, clock.now_us) == second
