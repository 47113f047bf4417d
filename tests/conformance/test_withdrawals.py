"""Tenants, keys and adapters go out of service while streams run: streams finish, and later calls are refused."""

from __future__ import annotations

import asyncio
import random
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

from loramux.platform.accounts.api_keys import ApiKeys
from loramux.platform.quotas.policies import QuotaPolicies
from tests.conformance.drawn_requests import LAB_ADAPTERS
from tests.conformance.fleet_lab import FleetLab
from tests.conformance.fleet_streams import Stream, is_billed_as_received, numbered_stream, send_stream
from tests.conformance.gateway_lab import make_lab_base, until
from tests.platform.ready_adapters import add_ready_adapter, digest_of
from tests.postgres import create_database

NUM_STREAMS = 12
NUM_RACES = 10
REFUSED_WITHIN_S = 6.0
"""Longest time until every server refuses calls, in seconds."""

pytestmark = [pytest.mark.campaign, pytest.mark.fleet]


@pytest.fixture(scope="module")
def lab(postgres_server: str, demo_base: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[FleetLab]:
    model = make_lab_base(tmp_path_factory.mktemp("base"), demo_base)
    url = create_database(postgres_server, "withdrawals")
    with (
        tempfile.TemporaryDirectory(prefix="loramux-lab-") as directory,
        closing(FleetLab(Path(directory), url, model, 2)) as lab,
    ):
        yield lab


@dataclass(frozen=True, slots=True, kw_only=True)
class Account:
    tenant_id: str
    slug: str
    secret: str
    key_id: str
    adapter_id: str


@pytest.fixture(scope="module")
def admin(lab: FleetLab) -> Iterator[httpx.Client]:
    """The first server's administration."""
    secret = ApiKeys(lab.database).create(None, "admin", ["platform:admin"]).secret
    with httpx.Client(
        base_url=f"http://127.0.0.1:{lab.gateways[0].settings['admin_port']}/admin/v1",
        headers={"authorization": f"Bearer {secret}"},
        trust_env=False,
        timeout=60,
    ) as client:
        yield client


def account(lab: FleetLab, slug: str) -> Account:
    """A tenant with the adapter `two`, whose default is the second of two versions."""
    tenant, _ = lab.account(slug)
    QuotaPolicies(lab.database).set(tenant.id, "tokens_per_minute", 10**9)
    digests = [digest_of(name) for name in list(LAB_ADAPTERS)[:2]]
    adapter_id = add_ready_adapter(lab.database, tenant.id, "two", digests, base_id=lab.base_id)
    key = ApiKeys(lab.database).create(tenant.id, "another")
    return Account(tenant_id=tenant.id, slug=slug, secret=key.secret, key_id=key.key.id, adapter_id=adapter_id)


Act = Callable[[httpx.Client, Account], httpx.Response]


def suspend(admin: httpx.Client, one: Account) -> httpx.Response:
    tag = admin.get(f"tenants/{one.slug}").headers["etag"]
    return admin.patch(f"tenants/{one.slug}", json={"state": "suspended"}, headers={"if-match": tag})


def archive_both(admin: httpx.Client, one: Account) -> httpx.Response:
    base = f"adapters/{one.adapter_id}"
    assert admin.post(f"{base}/versions/2/archive").status_code == 409, "an alias points at it"
    assert admin.put(f"{base}/aliases/default", json={"version": 1}).status_code == 200
    return admin.post(f"{base}/versions/2/archive")


def delete_in_use(admin: httpx.Client, one: Account) -> httpx.Response:
    assert admin.delete(f"tenants/{one.slug}").status_code == 409
    assert admin.delete(f"adapters/{one.adapter_id}").status_code == 409
    for key in admin.get("api_keys", params={"tenant": one.slug}).json()["data"]:
        assert admin.delete(f"api_keys/{key['id']}").status_code == 200
    refused = admin.delete(f"tenants/{one.slug}")
    assert refused.status_code == 409
    return httpx.Response(200)


ACTS: dict[str, tuple[Act, set[int]]] = {
    "suspend the tenant": (
        suspend,
        {401, 403},
    ),
    "revoke the key": (lambda admin, one: admin.delete(f"api_keys/{one.key_id}"), {401}),
    "delete a tenant in use": (delete_in_use, {401}),
    "disable the adapter": (lambda admin, one: admin.post(f"adapters/{one.adapter_id}/disable"), {404}),
    "quarantine the version": (
        lambda admin, one: admin.post(f"adapters/{one.adapter_id}/versions/2/quarantine"),
        {404},
    ),
    "archive the version": (archive_both, {404}),
}
"""What is done while streams of `two@2` run, and the statuses of later calls."""


@pytest.mark.parametrize("name", ACTS)
def test_running_streams_finish_and_later_calls_are_refused(lab: FleetLab, admin: httpx.Client, name: str) -> None:
    act, refusals = ACTS[name]
    one = account(lab, name.replace(" ", "-"))
    dice = random.Random(1)

    async def call(number: int, **fields: Any) -> Stream:
        request = numbered_stream(dice, "two@2")
        request.body.update(fields)
        return await send_stream(lab.gateways[number % 2], one.secret, request)

    async def run() -> tuple[list[Stream], list[Stream]]:
        ended = asyncio.Event()
        beside: list[Stream] = []

        async def keep_calling(number: int) -> None:
            while not ended.is_set():
                beside.append(await call(number, max_tokens=3))

        sizes = [lab.outputs_of(gateway).stat().st_size for gateway in lab.gateways]
        running = [asyncio.create_task(call(number, max_tokens=200)) for number in range(NUM_STREAMS)]

        def have_all_arrived() -> bool:
            return sum(map(len, map(lab.arrivals, lab.gateways, sizes))) >= NUM_STREAMS

        await asyncio.to_thread(until, have_all_arrived)
        callers = [asyncio.create_task(keep_calling(number)) for number in range(4)]
        await asyncio.sleep(0.3)
        done = await asyncio.to_thread(act, admin, one)
        assert done.status_code == 200, done.text
        streams = await asyncio.gather(*running)
        await asyncio.sleep(REFUSED_WITHIN_S)
        ended.set()
        await asyncio.gather(*callers)
        return streams, beside

    streams, beside = asyncio.run(run())
    later = [asyncio.run(call(number)) for number in range(4)]
    lab.wait_settled()
    events = lab.events_of(one.tenant_id)
    lab.check_bills(one.tenant_id, [(found.status, found.answer) for found in (*streams, *beside)])
    print(f"\n{name}: {len(streams)} streams, {Counter(found.status for found in beside)} beside them")
    assert all(found.is_complete for found in streams)
    assert {found.status for found in beside} <= {200} | refusals
    assert {found.status for found in later} <= refusals, [found.answer[-300:] for found in later]
    assert [found for found in (*streams, *beside) if found.status == 200 and not found.is_complete] == []
    assert [
        found for found in (*streams, *beside) if found.status == 200 and not is_billed_as_received(found, events)
    ] == []


def test_alias_moved_while_streams_run_cuts_none(lab: FleetLab, admin: httpx.Client) -> None:
    one = account(lab, "moved")
    dice = random.Random(2)

    async def run() -> list[Stream]:
        async def call(number: int) -> Stream:
            return await send_stream(lab.gateways[number % 2], one.secret, numbered_stream(dice, "two"))

        running = [asyncio.create_task(call(number)) for number in range(4 * NUM_STREAMS)]
        for number in range(8):
            moved = await asyncio.to_thread(
                admin.put, f"adapters/{one.adapter_id}/aliases/default", json={"version": number % 2 + 1}
            )
            assert moved.status_code == 200, moved.text
        return await asyncio.gather(*running)

    streams = asyncio.run(run())
    lab.wait_settled()
    lab.check_bills(one.tenant_id, [(found.status, found.answer) for found in streams])
    events = lab.events_of(one.tenant_id)
    assert all(found.is_complete and is_billed_as_received(found, events) for found in streams)


def test_tenant_deleted_while_another_server_still_knows_its_key(lab: FleetLab, admin: httpx.Client) -> None:
    """The other server accepts the key for up to five seconds, in which the tenant disappears."""
    statuses: Counter[int] = Counter()
    deletions: Counter[int] = Counter()
    for number in range(NUM_RACES):
        made = admin.post("tenants", json={"slug": f"gone-{number}"})
        assert made.status_code == 201, made.text
        key = admin.post("api_keys", json={"tenant": f"gone-{number}", "name": "key"}).json()
        adapter = admin.post("adapters", json={"tenant": f"gone-{number}", "name": "empty"}).json()

        async def run(number: int, key: dict[str, Any], adapter: dict[str, Any]) -> None:
            ended = time.monotonic() + 2.0

            async def keep_calling(position: int) -> None:
                while time.monotonic() < ended:
                    # Only some requests reach a reservation. A request without quota leaves no event.
                    request = numbered_stream(random.Random(position), "base" if position % 2 else "empty")
                    request.body["max_tokens"] = 100_000 if position % 4 == 1 else 2
                    found = await send_stream(lab.gateways[1], key["secret"], request)
                    statuses[found.status] += 1

            # The second server learns the key from a call that reserves nothing.
            callers = [asyncio.create_task(keep_calling(position)) for position in (0, 2, 1)]
            await asyncio.sleep(0.2 if number % 2 else 0.0)
            await asyncio.to_thread(admin.delete, f"adapters/{adapter['id']}")
            await asyncio.to_thread(admin.delete, f"api_keys/{key['id']}")
            late = [asyncio.create_task(keep_calling(position)) for position in (3, 5, 7)]
            deleted = await asyncio.to_thread(admin.delete, f"tenants/gone-{number}")
            deletions[deleted.status_code] += 1
            await asyncio.gather(*callers, *late)

        asyncio.run(run(number, key, adapter))
    lab.wait_settled()
    lab.check_nothing_held()
    print(f"\ndeletions {dict(deletions)}, calls {dict(statuses)}")
    assert set(deletions) <= {204, 409}
    assert deletions[204], "no tenant was deleted"
    assert set(statuses) <= {200, 400, 401, 404}
