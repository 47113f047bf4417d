from __future__ import annotations

import csv
import io
from typing import Any

import pytest

from loramux.migrations.database import Database
from loramux.migrations.identifiers import new_id
from loramux.platform.accounts.api_keys import ApiKeys
from loramux.platform.accounts.tenants import Tenants
from loramux.platform.admission.admission import Admission
from loramux.platform.admission.records import ReservationRequest
from loramux.platform.errors import InvalidRequest
from loramux.platform.ledger.csv_lines import csv_line, csv_lines
from loramux.platform.ledger.events import Ledger
from loramux.platform.ledger.query import UsageQuery
from loramux.platform.ledger.report import UsageRow, answer, largest
from loramux.platform.ledger.settlement import Settlement

HOUR_US = 3_600_000_000


@pytest.fixture
def used(clocked: Database, clock: Any) -> list[str]:
    tenants, keys, admission = Tenants(clocked), ApiKeys(clocked), Admission(clocked)
    clock.now_us = 500_000 * HOUR_US
    made = []
    for slug, model, prompt, completion, status in [
        ("acme", "acme/support@1", 10, 1, "completed"),
        ("acme", "base", 20, 2, "completed"),
        ("other", "base", 40, 4, "aborted"),
        ("acme", "base", 80, 8, "completed"),
    ]:
        tenant = tenants.get(slug) or tenants.create(slug)
        request = ReservationRequest(
            request_id=new_id("req"),
            tenant_id=tenant.id,
            api_key_id=keys.create(tenant.id, "test").key.id,
            model=model,
            adapter_version_id=None,
            endpoint="completions",
            prompt_tokens=prompt,
            reserved_tokens=prompt + completion,
        )
        admission.reserve(request)
        clock.advance(1200)
        settlement = Settlement(
            status=status, prompt_tokens=prompt, completion_tokens=completion, cached_tokens=prompt // 2
        )
        admission.settle(request.request_id, settlement)
        made.append(request.request_id)
    return made


def sums(rows: tuple[UsageRow, ...]) -> list[tuple[int, int, int, int]]:
    return [(row.requests, row.prompt_tokens, row.cached_tokens, row.completion_tokens) for row in rows]


def test_the_total_is_the_sum_of_the_events(clocked: Database, used: list[str], clock: Any) -> None:
    ledger = Ledger(clocked)
    total = ledger.report(None, 0, clock.now_us + 1)
    assert sums(total) == [(4, 150, 75, 15)]
    events = ledger.events(None, limit=10).data
    assert {event.request_id for event in events} == set(used)
    assert sum(event.prompt_tokens for event in events) == 150


def test_tenant_sees_only_its_own_usage(clocked: Database, used: list[str], clock: Any) -> None:
    ledger, tenants = Ledger(clocked), Tenants(clocked)
    other = tenants.get("other")
    assert other is not None
    assert sums(ledger.report(other.id, 0, clock.now_us + 1)) == [(1, 40, 20, 4)]
    assert [event.tenant for event in ledger.events(other.id, limit=10).data] == ["other"]


@pytest.mark.parametrize(
    ("group_by", "expected"),
    [
        (("tenant",), {("acme",): 110, ("other",): 40}),
        (("model",), {("acme/support@1",): 10, ("base",): 140}),
        (("status",), {("completed",): 110, ("aborted",): 40}),
        (("tenant", "model"), {("acme", "acme/support@1"): 10, ("acme", "base"): 100, ("other", "base"): 40}),
        (("endpoint",), {("completions",): 150}),
        (("adapter", "version"), {(None, None): 150}),
    ],
    ids=lambda value: "+".join(value) if isinstance(value, tuple) else "",
)
def test_groups_partition_the_total(
    clocked: Database, used: list[str], clock: Any, group_by: tuple[str, ...], expected: dict[tuple[str, ...], int]
) -> None:
    rows = Ledger(clocked).report(None, 0, clock.now_us + 1, group_by=group_by)
    assert {tuple(getattr(row, name) for name in group_by): row.prompt_tokens for row in rows} == expected


@pytest.mark.parametrize("group_by", [("tenant", "model"), ("model",), ("tenant",), ("status",), ()], ids="+".join)
@pytest.mark.parametrize("top", [1, 2, 1000])
def test_largest_groups_come_with_the_total_of_all_groups(
    clocked: Database, used: list[str], clock: Any, group_by: tuple[str, ...], top: int
) -> None:
    query = UsageQuery(tenant_id=None, start_us=0, end_us=clock.now_us + 1, group_by=group_by)
    everything = sorted(answer(clocked, query), key=lambda row: -(row.prompt_tokens + row.completion_tokens))
    found = largest(clocked, query, top)
    assert list(found.rows) == everything[:top]
    assert found.num_groups == len(everything)
    assert sums((found.total,)) == [(4, 150, 75, 15)]
    assert found.total.cost_nanos == sum(row.cost_nanos for row in everything)


def test_empty_range_has_no_largest_groups(clocked: Database, used: list[str]) -> None:
    found = largest(clocked, UsageQuery(tenant_id=None, start_us=0, end_us=1, group_by=("tenant",)), 5)
    assert (found.rows, found.num_groups, sums((found.total,))) == ((), 0, [(0, 0, 0, 0)])


@pytest.mark.parametrize(("top", "bucket"), [(0, None), (1001, None), (5, "1h")], ids=["none", "too many", "by hour"])
def test_invalid_top_or_bucket_for_largest_groups_is_refused(clocked: Database, top: int, bucket: str | None) -> None:
    query = UsageQuery(tenant_id=None, start_us=0, end_us=1, bucket=bucket, group_by=("tenant",))
    with pytest.raises(InvalidRequest) as caught:
        largest(clocked, query, top)
    assert caught.value.param == "top"


def test_buckets_are_half_open_hours_clipped_to_the_range(clocked: Database, used: list[str]) -> None:
    start = 500_000 * HOUR_US
    rows = Ledger(clocked).report(None, start + 1, start + HOUR_US + 600_000_000, bucket="1h")
    # Requests finish after 20, 40, 60 and 80 minutes. The third is in the second hour, and the fourth is too late.
    assert [(row.start_us - start, row.end_us - start) for row in rows] == [
        (1, HOUR_US),
        (HOUR_US, HOUR_US + 600_000_000),
    ]
    assert sums(rows) == [(2, 30, 15, 3), (1, 40, 20, 4)]


def test_events_page_newest_first(clocked: Database, used: list[str]) -> None:
    ledger = Ledger(clocked)
    newest = sorted(used, reverse=True)
    first = ledger.events(None, limit=3)
    assert [event.request_id for event in first.data] == newest[:3]
    assert first.has_more
    assert [event.request_id for event in ledger.events(None, limit=3, after=newest[2]).data] == newest[3:]


def test_empty_range_reports_zeros(clocked: Database, used: list[str]) -> None:
    assert sums(Ledger(clocked).report(None, 0, 1)) == [(0, 0, 0, 0)]
    assert Ledger(clocked).report(None, 0, 1, group_by=["tenant"]) == ()


@pytest.mark.parametrize(
    ("arguments", "param"),
    [
        ((5, 5, None, ()), "end"),
        ((-1, 5, None, ()), "start"),
        ((0, 2**63, None, ()), "end"),
        ((0, 5, "1w", ()), "bucket"),
        ((0, 2 * HOUR_US * 24 * 365, "1m", ()), "bucket"),
        ((0, 5, None, ("tenant_id",)), "group_by"),
        ((0, 5, None, ("tenant", "tenant")), "group_by"),
        ((3 * 10**17, 3 * 10**17 + 5, "1d", (), "Europe/Berlin"), "end"),
    ],
    ids=[
        "empty",
        "before 1970",
        "overflow",
        "unknown bucket",
        "too many buckets",
        "unknown group",
        "group twice",
        "beyond calendars",
    ],
)
def test_invalid_report_query_error_names_the_field(clocked: Database, arguments: Any, param: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        Ledger(clocked).report(None, *arguments)
    assert caught.value.param == param


@pytest.mark.parametrize("start", ["=", "+", "-", "@", "\t", "\r"])
def test_csv_round_trips_and_contains_no_formulas(start: str) -> None:
    documents = [
        {"model": f'{start}HYPERLINK("x")', "tenant": "a,b\nc", "requests": 1},
        {"model": None, "tenant": "", "requests": -2},
    ]
    text = csv_line(["tenant", "model", "requests"]) + "".join(csv_lines(documents, ["tenant", "model", "requests"]))
    header, first, second = csv.reader(io.StringIO(text, newline=""))
    assert header == ["tenant", "model", "requests"]
    assert first == ["a,b\nc", f'\'{start}HYPERLINK("x")', "1"]
    assert second == ["", "", "-2"]
