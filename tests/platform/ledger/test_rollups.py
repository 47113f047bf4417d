from __future__ import annotations

import random
import threading
from collections import Counter
from contextlib import suppress
from datetime import UTC, datetime, time
from itertools import pairwise
from typing import Any
from zoneinfo import ZoneInfo

import pytest
from sqlalchemy import Connection, func, insert, select

from loramux.engine.protocol.service_tiers import SERVICE_TIERS
from loramux.migrations import schema
from loramux.migrations.database import Database
from loramux.migrations.identifiers import new_id
from loramux.platform.accounts.api_keys import ApiKeys
from loramux.platform.accounts.tenants import Tenants
from loramux.platform.admission.admission import Admission
from loramux.platform.admission.records import Closing, ReservationRequest
from loramux.platform.ledger.events import Ledger
from loramux.platform.ledger.grains import (
    AMOUNTS,
    DAY_US,
    DOUBLED_US,
    GRAINS,
    HOUR_US,
    MINUTE_US,
    QUARTER_DAY_US,
    WEEK_US,
)
from loramux.platform.ledger.price_list import PriceList
from loramux.platform.ledger.query import GROUPS, UsageQuery
from loramux.platform.ledger.ranges import cut
from loramux.platform.ledger.report import UsageRow, answer
from loramux.platform.ledger.rollups import UsageRollups
from loramux.platform.ledger.settlement import Settlement
from tests.platform.ledger.rollup_checks import all_rollups, num_waiting, rebuild_rollups

ZONES = ("UTC", "Europe/Berlin", "America/New_York", "Asia/Kolkata", "Australia/Lord_Howe")


class Killed(BaseException):
    """Simulates the death of a process in the middle of a transaction."""


class Ledgers:
    def __init__(self, database: Database, clock: Any, seed: int) -> None:
        self.database, self.clock, self.random = database, clock, random.Random(seed)
        self.admissions = [Admission(database) for _ in range(3)]
        self.rollups = UsageRollups(database)
        tenants, keys = Tenants(database), ApiKeys(database)
        self.keys = []
        for slug in ("acme", "globex", "initech"):
            tenant = tenants.create(slug)
            self.keys += [(tenant, keys.create(tenant.id, "test").key.id) for _ in range(2)]
        self.adapters = self._make_adapters()
        PriceList(database).add(
            tenant_id=None,
            scope="all",
            prompt_nanos=333_333_333,
            cached_nanos=7,
            completion_nanos=1_234_567_891,
            flex_percent=50,
            priority_percent=175,
        )
        self.recovered: list[tuple[ReservationRequest, Settlement]] = []

    def _make_adapters(self) -> dict[str, str]:
        found = {}
        with self.database.write() as connection:
            for name in ("support", "sales"):
                adapter = {"id": new_id("ada"), "tenant_id": self.keys[0][0].id, "name": name, "created_us": 1}
                version = {"id": new_id("adv"), "adapter_id": adapter["id"], "number": 1, "upload_id": new_id("upl")}
                connection.execute(insert(schema.adapters).values(**adapter))
                connection.execute(
                    insert(schema.adapter_versions).values(**version, state="rejected", report={}, created_us=1)
                )
                found[version["id"]] = adapter["id"]
        return found  # type: ignore[return-value]

    def settle(self, admission: Admission | None = None) -> None:
        admission = admission or self.random.choice(self.admissions)
        requests = [self._request() for _ in range(self.random.randint(1, 4))]
        admission.commit(requests)
        self.clock.advance(self.random.choice((0, 0.000001, 5, 700, 4000, 50_000)))
        truths = [self._truth(request) for request in requests]
        if self.random.random() < 0.2:
            self.clock.advance(31)
            admission.recover_expired()
            self.recovered += zip(requests, truths, strict=True)
        else:
            closings = [Closing(request_id=r.request_id, settlement=t) for r, t in zip(requests, truths, strict=True)]
            assert set(admission.commit(closings)) == {True}
        if self.recovered and self.random.random() < 0.3:
            request, truth = self.recovered.pop()
            assert admission.settle(request.request_id, truth)

    def _request(self) -> ReservationRequest:
        tenant, key_id = self.random.choice(self.keys)
        return ReservationRequest(
            request_id=new_id("req"),
            tenant_id=tenant.id,
            api_key_id=key_id,
            model=self.random.choice(("base", "acme/support@1")),
            adapter_version_id=self.random.choice((None, *self.adapters)),
            endpoint=self.random.choice(("chat", "completions")),
            prompt_tokens=20,
            reserved_tokens=100,
            base=self.random.choice(("base", "")),
            end_user=self.random.choice((None, "one", "two")),
            service_tier=self.random.choice(SERVICE_TIERS),
        )

    def _truth(self, request: ReservationRequest) -> Settlement:
        return Settlement(
            status=self.random.choice(("completed", "aborted")),
            prompt_tokens=request.prompt_tokens,
            completion_tokens=self.random.randint(0, 80),
            cached_tokens=self.random.randint(0, 20),
        )

    def facts(self) -> list[dict[str, Any]]:
        events, adjustments, tenants = schema.usage_events, schema.usage_adjustments, schema.tenants
        with self.database.read() as connection:
            slugs = {row.id: row.slug for row in connection.execute(select(tenants.c.id, tenants.c.slug))}
            entered = {row["request_id"]: dict(row) for row in connection.execute(select(events)).mappings()}
            corrected = [dict(row) for row in connection.execute(select(adjustments)).mappings()]
        found = []
        for row, at_us, requests in [(event, event["finished_us"], 1) for event in entered.values()] + [
            (adjustment, adjustment["created_us"], 0) for adjustment in corrected
        ]:
            event = entered[row["request_id"]]
            groups = {"tenant": slugs[event["tenant_id"]], "key": event["api_key_id"]}
            groups |= {"adapter": event["adapter_id"], "version": event["adapter_version_id"]}
            groups |= {
                name: event[name] for name in ("model", "base", "endpoint", "end_user", "status", "service_tier")
            }
            amounts = {name: row[name] for name in AMOUNTS[1:]}
            found.append({"at_us": at_us, "tenant_id": event["tenant_id"], **groups, "requests": requests, **amounts})
        return found


def bucket_start(at_us: int, bucket: str | None, zone: str, start_us: int) -> int:
    if bucket is None:
        return start_us
    if bucket != "1d" or zone == "UTC":
        span = {"1m": MINUTE_US, "1h": HOUR_US, "1d": DAY_US}[bucket]
        return max(start_us, at_us // span * span)
    day = datetime.fromtimestamp(at_us // 1_000_000, UTC).astimezone(ZoneInfo(zone)).date()
    midnight = datetime.combine(day, time(), ZoneInfo(zone)).timestamp()
    return max(start_us, int(midnight) * 1_000_000)


def summed(facts: list[dict[str, Any]], asked: dict[str, Any]) -> dict[tuple[Any, ...], tuple[int, ...]]:
    sums: dict[tuple[Any, ...], list[int]] = {}
    if not asked["bucket"] and not asked["group_by"]:
        sums[(asked["start_us"],)] = [0] * len(AMOUNTS)
    for fact in facts:
        if not asked["start_us"] <= fact["at_us"] < asked["end_us"]:
            continue
        if asked["tenant_id"] not in (None, fact["tenant_id"]):
            continue
        if (only := asked.get("adapter_ids")) is not None and fact["adapter"] not in only:
            continue
        start_us = bucket_start(fact["at_us"], asked["bucket"], asked["timezone"], asked["start_us"])
        key = (start_us, *(fact[name] for name in asked["group_by"]))
        row = sums.setdefault(key, [0] * len(AMOUNTS))
        for index, name in enumerate(AMOUNTS):
            row[index] += fact[name]
    return {key: tuple(row) for key, row in sums.items()}


def reported(rows: tuple[UsageRow, ...], group_by: tuple[str, ...]) -> dict[tuple[Any, ...], tuple[int, ...]]:
    found = {
        (row.start_us, *(getattr(row, name) for name in group_by)): tuple(getattr(row, name) for name in AMOUNTS)
        for row in rows
    }
    assert len(found) == len(rows)
    return found


def question(ledgers: Ledgers, first_us: int) -> dict[str, Any]:
    choose = ledgers.random
    now_us = ledgers.clock.now_us + 1
    ends = sorted(choose.randint(first_us, now_us) for _ in range(2))
    if choose.random() < 0.4:
        ends = [first_us // DAY_US * DAY_US, -(-now_us // HOUR_US) * HOUR_US]
    bucket = choose.choice((None, "1h", "1d", "1d"))
    group_by = tuple(choose.sample(GROUPS, choose.choice((0, 1, 1, 2, 3))))
    tenant_id = choose.choice((None, ledgers.keys[0][0].id, ledgers.keys[2][0].id))
    start_us, end_us = ends[0], ends[1] + 1
    if choose.random() < 0.15:
        # For all tenants together, minutes are rolled up too.
        tenant_id, bucket, group_by = None, "1m", tuple(choose.sample(("base", "endpoint", "status"), 2))
        start_us = max(start_us, end_us - 6 * DAY_US)
    adapter_ids = choose.choice((None, frozenset(choose.sample(list(ledgers.adapters.values()), choose.randint(1, 2)))))
    if adapter_ids is not None and bucket == "1m":
        # Minutes are not rolled up for single adapters, and reports on individual requests of all tenants cover at most
        # a day.
        start_us = max(start_us, end_us - DAY_US)
    if "end_user" in group_by:
        tenant_id = ledgers.keys[0][0].id
        start_us = max(start_us, end_us - 30 * DAY_US)
    return {
        "tenant_id": tenant_id,
        "start_us": start_us,
        "end_us": end_us,
        "bucket": bucket,
        "group_by": group_by,
        "timezone": choose.choice(ZONES),
        "adapter_ids": adapter_ids,
    }


@pytest.mark.parametrize("seed", [1])
def test_every_report_equals_the_sum_of_the_ledger(
    clocked: Database, clock: Any, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The range includes the night on which clocks change on both continents.
    clock.now_us = 1_793_500_000_000_000
    first_us = clock.now_us
    ledgers = Ledgers(clocked, clock, seed)
    for _ in range(5):
        for _ in range(ledgers.random.randint(1, 4)):
            ledgers.settle()
        fate = ledgers.random.choice(("fold one", "fold all", "killed", "nothing"))
        if fate == "killed":
            _fold_and_die(ledgers, monkeypatch)
        elif fate != "nothing":
            ledgers.rollups.fold(1 if fate == "fold one" else 1000)
        facts = ledgers.facts()
        for _ in range(5):
            asked = question(ledgers, first_us)
            rows = answer(clocked, UsageQuery(**asked))
            assert reported(rows, asked["group_by"]) == summed(facts, asked), asked
    ledgers.rollups.fold_all()
    everything: dict[str, Any] = {"tenant_id": None, "start_us": 0, "end_us": 2**61, "bucket": None, "timezone": "UTC"}
    for group_by in ((), ("status",), ("tenant", "key")):
        rows = answer(clocked, UsageQuery(**everything, group_by=group_by))
        assert reported(rows, group_by) == summed(facts, {**everything, "group_by": group_by})
    _check_rollups(clocked, facts)


def _fold_and_die(ledgers: Ledgers, monkeypatch: pytest.MonkeyPatch) -> None:
    """Start a fold that dies after some of its statements. None of its changes may remain."""
    left = ledgers.random.randint(0, 7)
    execute = Connection.execute

    def dying(self: Connection, *args: Any, **kwargs: Any) -> Any:
        nonlocal left
        if left == 0:
            raise Killed
        left -= 1
        return execute(self, *args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(Connection, "execute", dying)
        with suppress(Killed):
            ledgers.rollups.fold()


def _check_rollups(database: Database, facts: list[dict[str, Any]]) -> None:
    """Check that no batch is waiting, and that the totals of all grains and span lengths equal the ledger's."""
    rollups, total = schema.usage_rollups.c, tuple(sum(fact[name] for fact in facts) for name in AMOUNTS)
    sums = select(*(func.sum(rollups[name]) for name in AMOUNTS))
    with database.read() as connection:
        for grain in GRAINS:
            for span_us in grain.spans_us:
                row = connection.execute(sums.where(rollups.grain == grain.number, rollups.span_us == span_us)).one()
                assert tuple(map(int, row)) == total
    assert num_waiting(database) == 0
    folded = all_rollups(database)
    assert rebuild_rollups(database) == folded


def test_gateways_that_settle_and_fold_concurrently_lose_nothing(database: Database) -> None:
    tenant = Tenants(database).create("acme")
    key_id = ApiKeys(database).create(tenant.id, "test").key.id
    num_threads, num_requests = 3, 15
    stop = threading.Event()
    seen: list[int] = []
    troubles: list[BaseException] = []

    def settle() -> None:
        admission = Admission(database)
        for _ in range(num_requests):
            request = ReservationRequest(
                request_id=new_id("req"),
                tenant_id=tenant.id,
                api_key_id=key_id,
                model="base",
                adapter_version_id=None,
                endpoint="completions",
                prompt_tokens=7,
                reserved_tokens=20,
            )
            admission.reserve(request)
            admission.settle(request.request_id, Settlement(status="completed", prompt_tokens=7, completion_tokens=3))

    def fold() -> None:
        rollups = UsageRollups(database)
        while not stop.is_set():
            rollups.fold(2)
            stop.wait(0.002)

    def watch() -> None:
        while not stop.is_set():
            (row,) = Ledger(database).report(None, 0, 2**61)
            assert row.prompt_tokens == 7 * row.requests
            assert row.completion_tokens == 3 * row.requests
            seen.append(row.requests)
            stop.wait(0.002)

    def guarded(run: Any) -> None:
        try:
            run()
        except BaseException as error:
            troubles.append(error)

    others = [threading.Thread(target=guarded, args=(run,)) for run in (fold, fold, watch)]
    settling = [threading.Thread(target=guarded, args=(settle,)) for _ in range(num_threads)]
    for thread in (*others, *settling):
        thread.start()
    for thread in settling:
        thread.join()
    stop.set()
    for thread in others:
        thread.join()
    assert not troubles
    assert seen == sorted(seen), "a reported request never disappears"
    UsageRollups(database).fold_all()
    (row,) = Ledger(database).report(None, 0, 2**61, group_by=("tenant",))
    assert (row.requests, row.prompt_tokens) == (num_threads * num_requests, 7 * num_threads * num_requests)
    (row,) = Ledger(database).report(None, 0, 2**61)
    assert row.requests == num_threads * num_requests


@pytest.mark.parametrize(
    "spans_us",
    [
        (),
        (HOUR_US,),
        (DAY_US, HOUR_US),
        (WEEK_US, DAY_US, QUARTER_DAY_US, HOUR_US),
        (MINUTE_US, DAY_US),
        DOUBLED_US,
    ],
    ids=["events alone", "hours", "days", "weeks to hours", "days and minutes", "doubled days"],
)
@pytest.mark.parametrize(
    "length", [1, HOUR_US - 1, HOUR_US, 5 * HOUR_US + 7, DAY_US, 3 * DAY_US + HOUR_US // 3, 2 * WEEK_US + 3]
)
@pytest.mark.parametrize("start", [0, 1, HOUR_US, DAY_US, 2 * DAY_US - 1, DAY_US + HOUR_US - 5])
def test_split_range_has_no_gaps_or_overlaps(start: int, length: int, spans_us: tuple[int, ...]) -> None:
    parts = cut([(start, start + length)], spans_us)
    pieces = sorted([*(part for ranges in parts.spans.values() for part in ranges), *parts.events])
    assert all(low < high for low, high in pieces)
    assert (pieces[0][0], pieces[-1][1]) == (start, start + length)
    assert all(one[1] == other[0] for one, other in pairwise(pieces))
    assert all(edge % span_us == 0 for span_us, ranges in parts.spans.items() for part in ranges for edge in part)
    # Events are read only where no whole span fits.
    assert not any(-(-low // span) * span + span <= high for low, high in parts.events for span in spans_us)


def test_longest_daily_report_in_a_half_hour_zone_is_correct(clocked: Database, clock: Any) -> None:
    ledgers = Ledgers(clocked, clock, seed=2)
    for _ in range(3):
        ledgers.settle()
    asked = {
        "tenant_id": ledgers.keys[0][0].id,
        "start_us": clock.now_us - 799 * DAY_US,
        "end_us": clock.now_us + DAY_US,
        "bucket": "1d",
        "group_by": ("key",),
        "timezone": "Asia/Kolkata",
    }
    for _ in range(2):
        assert reported(Ledger(clocked).report(**asked), ("key",)) == summed(ledgers.facts(), asked)
        ledgers.rollups.fold_all()


def test_folding_an_idle_ledger_does_nothing(clocked: Database) -> None:
    assert UsageRollups(clocked).fold_all() == 0


def test_batch_announced_twice_is_folded_once(clocked: Database, clock: Any) -> None:
    ledgers = Ledgers(clocked, clock, 5)
    ledgers.settle()
    ledgers.rollups.fold_all()
    # A batch that is added again, for example by restoring a backup of one table, contains nothing new.
    with clocked.write() as connection:
        connection.execute(insert(schema.usage_batches).values(id=1, at_us=clock.now_us))
    facts = Counter({"requests": 0})
    ledgers.rollups.fold_all()
    for fact in ledgers.facts():
        facts["requests"] += fact["requests"]
    (row,) = Ledger(clocked).report(None, 0, 2**61)
    assert row.requests == facts["requests"]
