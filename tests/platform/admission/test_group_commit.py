from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
from sqlalchemy import func, select, update
from sqlalchemy.exc import IntegrityError, OperationalError
from structlog.testing import capture_logs

from loramux.migrations import schema
from loramux.migrations.database import Database
from loramux.migrations.identifiers import new_id
from loramux.platform import periods
from loramux.platform.accounts.tenants import Tenant
from loramux.platform.admission.admission import Admission
from loramux.platform.admission.group_commit import MAX_OPERATIONS, CommitterClosed, GroupCommit
from loramux.platform.admission.records import Closing, Operation, Outcome, Reservation, ReservationRequest
from loramux.platform.events.budget_events import BudgetEvents
from loramux.platform.ledger.settlement import Settlement
from loramux.platform.quotas.counters import UNITS
from loramux.platform.quotas.decisions import QuotaExceeded
from loramux.platform.quotas.policies import PLATFORM, QuotaPolicies

MakeRequest = Callable[..., ReservationRequest]
pytestmark = pytest.mark.anyio


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


class CountedAdmission(Admission):
    """Records the number of operations in each transaction. `hold` blocks the next transaction."""

    def __init__(self, database: Database) -> None:
        super().__init__(database)
        self.sizes: list[int] = []
        self.trouble: Exception | None = None
        self.mistaken: set[str] = set()
        """IDs of requests that make a transaction fail by a mistake of ours."""
        self._may_go_on = threading.Event()
        self._may_go_on.set()

    @contextmanager
    def hold(self) -> Iterator[None]:
        self._may_go_on.clear()
        try:
            yield
        finally:
            self._may_go_on.set()

    def commit(self, operations: Sequence[Operation]) -> list[Outcome]:
        self._may_go_on.wait(60)
        self.sizes.append(len(operations))
        if self.trouble is not None:
            raise self.trouble
        if any(getattr(operation, "request_id", None) in self.mistaken for operation in operations):
            raise KeyError("a mistake of ours")
        return super().commit(operations)


@pytest.fixture
def admission(clocked: Database) -> CountedAdmission:
    return CountedAdmission(clocked)


@pytest.fixture
def committer(admission: CountedAdmission) -> Iterator[GroupCommit]:
    committer = GroupCommit(admission)
    yield committer
    committer.close()


@pytest.fixture
def make_request(acme: Tenant, acme_key: str) -> MakeRequest:
    def make(most: int = 30) -> ReservationRequest:
        return ReservationRequest(
            request_id=new_id("req"),
            tenant_id=acme.id,
            api_key_id=acme_key,
            model="base",
            adapter_version_id=None,
            endpoint="completions",
            prompt_tokens=10,
            reserved_tokens=most,
        )

    return make


def closing(reservation: Reservation, completion: int = 5) -> Closing:
    settlement = Settlement(status="completed", prompt_tokens=10, completion_tokens=completion)
    return Closing(request_id=reservation.request_id, settlement=settlement)


async def gathered(committer: GroupCommit, admission: CountedAdmission, operations: Sequence[Operation]) -> list[Any]:
    with admission.hold():
        answers = [committer.submit(operation) for operation in operations]
        # While the transaction is blocked, the committer's thread has taken at most the first operation.
        await asyncio.sleep(0.05)
    return await asyncio.gather(*answers, return_exceptions=True)


async def test_queued_operations_share_a_transaction(
    committer: GroupCommit, admission: CountedAdmission, clocked: Database, acme: Tenant, make_request: MakeRequest
) -> None:
    QuotaPolicies(clocked).set(acme.id, "tokens_per_minute", 10_000)
    reserved = await gathered(committer, admission, [make_request() for _ in range(20)])
    assert all(isinstance(outcome, Reservation) for outcome in reserved)
    # Each request was checked after the requests before it.
    assert [outcome.limits[0].remaining for outcome in reserved] == [10_000 - 30 * (i + 1) for i in range(20)]
    assert sum(admission.sizes) == 20
    assert len(admission.sizes) <= 2
    settled = await gathered(committer, admission, [closing(outcome) for outcome in reserved])
    assert settled == [True] * 20
    with clocked.read() as connection:
        counter = connection.execute(select(schema.quota_counters)).one()
        assert (counter.level, counter.reserved) == ((10_000 - 20 * 15) * UNITS, 0)
        assert connection.execute(select(func.count()).select_from(schema.usage_events)).scalar() == 20


async def test_refusal_affects_only_its_own_request(
    committer: GroupCommit, admission: CountedAdmission, clocked: Database, acme: Tenant, make_request: MakeRequest
) -> None:
    QuotaPolicies(clocked).set(acme.id, "tokens_per_minute", 100)
    first = await committer.submit(make_request(40))
    unknown = Closing(request_id=new_id("req"), settlement=closing(first).settlement)
    outcomes = await gathered(
        committer,
        admission,
        [make_request(50), make_request(61), unknown, closing(first), make_request(30), closing(first)],
    )
    assert isinstance(outcomes[0], Reservation)
    assert isinstance(outcomes[1], QuotaExceeded)
    assert isinstance(outcomes[2], LookupError)
    assert outcomes[3] is True
    # The settlement before this request released 25 of the 40 reserved tokens.
    assert isinstance(outcomes[4], Reservation)
    assert outcomes[4].limits[0].remaining == 100 - 15 - 50 - 30
    assert outcomes[5] is False, "settled in the same transaction"


async def test_rejected_statement_affects_only_its_own_operation(
    committer: GroupCommit, admission: CountedAdmission, clocked: Database, make_request: MakeRequest
) -> None:
    stranger = replace(make_request(), tenant_id=new_id("ten"))
    again = make_request()
    await committer.submit(again)
    outcomes = await gathered(committer, admission, [make_request(), stranger, again, make_request()])
    assert [type(outcome) for outcome in outcomes] == [Reservation, IntegrityError, IntegrityError, Reservation]
    with clocked.read() as connection:
        assert connection.execute(select(func.count()).select_from(schema.reservations)).scalar() == 3


async def test_mistake_of_ours_affects_only_its_own_operation(
    committer: GroupCommit, admission: CountedAdmission, make_request: MakeRequest
) -> None:
    requests = [make_request() for _ in range(4)]
    admission.mistaken = {requests[2].request_id}
    outcomes = await gathered(committer, admission, requests)
    assert [type(outcome) for outcome in outcomes] == [Reservation, Reservation, KeyError, Reservation]


async def test_deleted_tenant_is_refused_while_a_daily_limit_applies(
    committer: GroupCommit, admission: CountedAdmission, clocked: Database, make_request: MakeRequest
) -> None:
    """The timezone of its days is gone with its row."""
    QuotaPolicies(clocked).set(PLATFORM, "tokens_per_day", 1000)
    stranger = replace(make_request(), tenant_id=new_id("ten"))
    outcomes = await gathered(committer, admission, [make_request(), stranger, make_request()])
    assert [type(outcome) for outcome in outcomes] == [Reservation, IntegrityError, Reservation]


async def test_timezone_that_this_host_does_not_know_refuses_nobody(
    committer: GroupCommit, clocked: Database, acme: Tenant, make_request: MakeRequest
) -> None:
    QuotaPolicies(clocked).set(PLATFORM, "tokens_per_day", 1000)
    with clocked.write() as connection:
        connection.execute(update(schema.tenants).where(schema.tenants.c.id == acme.id).values(timezone="Mars/Olympus"))
    periods._zone.cache_clear()
    with capture_logs() as logs:
        assert isinstance(await committer.submit(make_request()), Reservation)
    assert [log["timezone"] for log in logs] == ["Mars/Olympus"]
    BudgetEvents(clocked, 80).check()


async def test_database_outage_fails_only_waiting_operations(
    committer: GroupCommit, admission: CountedAdmission, make_request: MakeRequest
) -> None:
    admission.trouble = OperationalError("COMMIT", {}, Exception("the server is gone"))
    outcomes = await gathered(committer, admission, [make_request() for _ in range(5)])
    assert {type(outcome) for outcome in outcomes} == {OperationalError}
    assert len(admission.sizes) <= 2, "a dead database is not asked again for each operation"
    admission.trouble = None
    assert isinstance(await committer.submit(make_request()), Reservation)
    admission.trouble = ZeroDivisionError("a mistake of ours")
    with pytest.raises(ZeroDivisionError):
        await committer.submit(make_request())
    admission.trouble = None
    assert isinstance(await committer.submit(make_request()), Reservation)


async def test_a_transaction_has_a_bounded_number_of_operations(
    committer: GroupCommit, admission: CountedAdmission, make_request: MakeRequest
) -> None:
    outcomes = await gathered(committer, admission, [make_request() for _ in range(MAX_OPERATIONS + 40)])
    assert all(isinstance(outcome, Reservation) for outcome in outcomes)
    assert max(admission.sizes) <= MAX_OPERATIONS


async def test_close_commits_waiting_operations(
    admission: CountedAdmission, clocked: Database, make_request: MakeRequest
) -> None:
    committer = GroupCommit(admission)
    with admission.hold():
        answers = [committer.submit(make_request()) for _ in range(3)]
        answers[1].cancel()
        closer = threading.Thread(target=committer.close)
        closer.start()
    await asyncio.to_thread(closer.join, 10)
    assert isinstance(await answers[0], Reservation)
    with clocked.read() as connection:
        assert connection.execute(select(func.count()).select_from(schema.reservations)).scalar() == 3
    with pytest.raises(CommitterClosed):
        await committer.submit(make_request())


async def test_two_racing_gateways_never_overspend(clocked: Database, acme: Tenant, make_request: MakeRequest) -> None:
    QuotaPolicies(clocked).set(acme.id, "tokens_per_minute", 1000)
    QuotaPolicies(clocked).set(acme.id, "concurrent_requests", 1000)
    committers = [GroupCommit(Admission(clocked)) for _ in range(2)]

    async def attempt(number: int) -> int:
        committer = committers[number % 2]
        try:
            reservation = await committer.submit(make_request(30))
        except QuotaExceeded:
            return 0
        assert await committer.submit(closing(reservation, completion=20)) is True
        return 1

    num_admitted = sum(await asyncio.gather(*(attempt(number) for number in range(120))))
    for committer in committers:
        committer.close()
    assert num_admitted == 33
    with clocked.read() as connection:
        rows = connection.execute(select(schema.quota_counters.c.level, schema.quota_counters.c.reserved)).all()
    assert {row.reserved for row in rows} == {0}
    assert min(row.level for row in rows) == 10 * UNITS


async def test_two_committer_threads_never_overspend(
    admission: CountedAdmission, clocked: Database, acme: Tenant, make_request: MakeRequest
) -> None:
    QuotaPolicies(clocked).set(acme.id, "tokens_per_minute", 1000)
    committer = GroupCommit(admission, num_threads=2)
    try:
        outcomes = await asyncio.gather(
            *(committer.submit(make_request(40)) for _ in range(150)), return_exceptions=True
        )
        reserved = [outcome for outcome in outcomes if isinstance(outcome, Reservation)]
        assert len(reserved) == 25
        assert sum(isinstance(outcome, QuotaExceeded) for outcome in outcomes) == 125
        assert all(await asyncio.gather(*(committer.submit(closing(one)) for one in reserved)))
    finally:
        committer.close()
    with clocked.read() as connection:
        counter = connection.execute(select(schema.quota_counters)).one()
    assert (counter.level, counter.reserved) == ((1000 - 25 * 15) * UNITS, 0)
