"""Webhooks: signatures, retries, targets that fail or hang, and targets that the server must not call."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import functools
import hmac
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from prometheus_client import CollectorRegistry

from loramux.migrations.database import Database
from loramux.migrations.events import note_event
from loramux.migrations.schema import audit_log
from loramux.platform.accounts.tenants import Tenant, Tenants
from loramux.platform.errors import ApiError
from loramux.platform.events import webhook_sender
from loramux.platform.events.documents import EventDocument
from loramux.platform.events.event_feed import EventFeed
from loramux.platform.events.event_log import EventLog
from loramux.platform.events.webhook_runner import (
    EVENTS_AT_ONCE,
    LEASE_US,
    MAX_DELIVERIES_EACH,
    PAUSES_S,
    WebhookRunner,
)
from loramux.platform.events.webhook_sender import MAX_LOOKUPS_EACH, WebhookSender, signature_headers
from loramux.platform.events.webhooks import MAX_WEBHOOKS, Webhook, WebhookQueue, Webhooks
from loramux.platform.telemetry.package_metrics import EventMetrics, NewMetrics
from loramux.platform.threads import call_on
from tests.adapter_store.hub.test_hub_transport import certificate
from tests.platform.clocked_databases import FakeClock
from tests.platform.events.target import Target, listening_target

pytestmark = pytest.mark.anyio
DOCUMENT: EventDocument = {
    "id": "evt_1",
    "object": "event",
    "type": "webhook.test",
    "sequence": 1,
    "created_at": 1,
    "tenant_id": "ten_1",
    "tenant": "acme",
    "adapter_id": None,
    "model": None,
    "data": {},
}


@pytest.fixture
def executor() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(4) as executor:
        yield executor


@pytest.fixture
def target() -> Iterator[Target]:
    with listening_target() as target:
        yield target


class Deliveries:
    """The webhooks of one tenant, and a server that delivers to them."""

    def __init__(self, database: Database, tenant: Tenant, executor: ThreadPoolExecutor, clock: FakeClock) -> None:
        self.database, self.tenant, self.clock = database, tenant, clock
        self.webhooks = Webhooks(database, allows_http=True)
        self.registry = CollectorRegistry()
        call: Any = functools.partial(call_on, executor)
        log = EventLog(database)
        self._feed = EventFeed(lambda: call(log.advance), functools.partial(call, log.changed))
        self.sender = WebhookSender(executor, allows_private=True)
        self.runner = WebhookRunner(database, call, self._feed, self.sender, EventMetrics(NewMetrics(self.registry)))

    def happen(self, number: int, tenant: Tenant | None = None, kind: str = "alias.moved") -> None:
        with self.database.write() as connection:
            now_us = self.database.now_us(connection)
            owner = (tenant or self.tenant).id
            note_event(connection, now_us, kind, {"n": number}, tenant_id=owner)  # type: ignore[arg-type]

    async def deliver(self) -> None:
        await self._feed.head()
        await self.runner.begin_due()
        await self.runner.settled()

    def state(self, webhook: Webhook) -> Webhook:
        found = self.webhooks.get(webhook.id)
        assert found is not None
        return found

    def count(self, outcome: str) -> float:
        return self.registry.get_sample_value("loramux_webhook_deliveries_total", {"outcome": outcome}) or 0.0


@pytest.fixture
def deliveries(clocked: Database, acme: Tenant, executor: ThreadPoolExecutor, clock: FakeClock) -> Deliveries:
    return Deliveries(clocked, acme, executor, clock)


def numbers(target: Target) -> list[int]:
    return [one["data"]["n"] for one in target.documents]


def test_signature_is_the_standards() -> None:
    """The example of https://github.com/standard-webhooks/standard-webhooks, computed by its reference library."""
    secret, body = "whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw", b'{"test": 2432232314}'
    headers = signature_headers(secret, "msg_p5jXN8AQM9LWM0D4loKWxJek", 1614265330, body)
    assert headers == {
        "webhook-id": "msg_p5jXN8AQM9LWM0D4loKWxJek",
        "webhook-timestamp": "1614265330",
        "webhook-signature": "v1,g0hM9SsE+OTPJTGt/tmIKtSyZlE3uFJELVlNIOLJ1OE=",
    }


async def test_deliveries_are_signed_and_in_order(deliveries: Deliveries, target: Target) -> None:
    deliveries.happen(0)
    await deliveries.deliver()
    webhook, secret = deliveries.webhooks.create(deliveries.tenant.id, target.url, None)
    for number in range(1, 4):
        deliveries.happen(number)
    deliveries.happen(9, Tenants(deliveries.database).create("globex"))
    await deliveries.deliver()
    assert numbers(target) == [1, 2, 3]
    key = base64.b64decode(secret.removeprefix("whsec_"))
    assert len(key) == 32
    for headers, body in target.received:
        signed = f"{headers['webhook-id']}.{headers['webhook-timestamp']}.".encode() + body
        expected = base64.b64encode(hmac.digest(key, signed, "sha256")).decode()
        assert headers["webhook-signature"] == f"v1,{expected}"
    assert [one["id"] for one in target.documents] == [headers["webhook-id"] for headers, _ in target.received]
    assert [one["sequence"] for one in target.documents] == [2, 3, 4]
    state = deliveries.state(webhook)
    assert (state.sequence, state.num_failures, state.delivered_us) == (4, 0, deliveries.clock.now_us)
    await deliveries.deliver()
    assert len(target.received) == 3
    assert (deliveries.count("delivered"), deliveries.count("failed")) == (3, 0)


async def test_only_wanted_types_are_delivered(deliveries: Deliveries, target: Target) -> None:
    webhook, _ = deliveries.webhooks.create(deliveries.tenant.id, target.url, ["version.ready"])
    deliveries.happen(1)
    deliveries.happen(2, kind="version.ready")
    deliveries.happen(3)
    await deliveries.deliver()
    assert numbers(target) == [2]
    assert deliveries.state(webhook).sequence == 3


async def test_failing_target_is_tried_again_after_growing_pauses(deliveries: Deliveries, target: Target) -> None:
    webhook, _ = deliveries.webhooks.create(deliveries.tenant.id, target.url, None)
    target.status = 500
    deliveries.happen(1)
    deliveries.happen(2)
    for num_failures, pause_s in enumerate(PAUSES_S, 1):
        await deliveries.deliver()
        state = deliveries.state(webhook)
        assert (state.num_failures, state.last_error) == (num_failures, "the target answered with 500")
        assert 0.89 * pause_s < (state.due_us - deliveries.clock.now_us) / 1e6 < 1.11 * pause_s
        await deliveries.deliver()
        assert len(target.received) == num_failures
        deliveries.clock.advance(1.2 * pause_s)
    assert set(numbers(target)) == {1}
    assert len({headers["webhook-id"] for headers, _ in target.received}) == 1
    # The target recovers within the day, and gets everything in order.
    target.status, target.received = 200, []
    await deliveries.deliver()
    assert numbers(target) == [1, 2]
    assert (deliveries.state(webhook).num_failures, deliveries.state(webhook).last_error) == (0, None)
    assert deliveries.count("failed") == len(PAUSES_S)


async def test_events_older_than_a_day_are_skipped(deliveries: Deliveries, target: Target) -> None:
    webhook, _ = deliveries.webhooks.create(deliveries.tenant.id, target.url, None)
    target.status = 503
    deliveries.happen(1)
    await deliveries.deliver()
    deliveries.clock.advance(86_401)
    target.status, target.received = 200, []
    deliveries.happen(2)
    await deliveries.deliver()
    assert numbers(target) == [2]
    assert deliveries.state(webhook).sequence == 2


@pytest.mark.parametrize("status", [302, 400])
async def test_redirects_and_refusals_count_as_failures(deliveries: Deliveries, target: Target, status: int) -> None:
    webhook, _ = deliveries.webhooks.create(deliveries.tenant.id, target.url, None)
    target.status = status
    deliveries.happen(1)
    await deliveries.deliver()
    assert len(target.received) == 1
    assert deliveries.state(webhook).last_error == f"the target answered with {status}"


async def test_target_that_is_gone_is_disabled(deliveries: Deliveries, target: Target) -> None:
    webhook, _ = deliveries.webhooks.create(deliveries.tenant.id, target.url, None)
    target.status = 410
    deliveries.happen(1)
    await deliveries.deliver()
    deliveries.clock.advance(86_400)
    deliveries.happen(2)
    await deliveries.deliver()
    assert len(target.received) == 1
    assert deliveries.state(webhook).state == "disabled"
    with deliveries.database.read() as connection:
        actions = [row.action for row in connection.execute(audit_log.select().order_by(audit_log.c.id))]
    assert "webhook.disable" in actions


async def test_hanging_targets_disturb_nobody(deliveries: Deliveries, target: Target) -> None:
    globex = Tenants(deliveries.database).create("globex")
    with listening_target() as hanging:
        hanging.hangs = True
        for _ in range(MAX_DELIVERIES_EACH + 2):
            deliveries.webhooks.create(deliveries.tenant.id, hanging.url, None)
        deliveries.happen(1)
        await deliveries._feed.head()
        await deliveries.runner.begin_due()
        # All slots of the first tenant hang. Those of others are free.
        deliveries.webhooks.create(globex.id, target.url, None)
        deliveries.happen(2, globex)
        await deliveries._feed.head()
        await deliveries.runner.begin_due()
        assert await asyncio.to_thread(target.has_received.wait, 30)
        assert numbers(target) == [2]
        assert len(hanging.received) <= MAX_DELIVERIES_EACH
        hanging.is_over.set()
        await deliveries.runner.settled()


async def test_attempt_has_a_deadline(
    executor: ThreadPoolExecutor, target: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    deadlines, delays_s = list[asyncio.Timeout](), set[float]()

    def noted(delay_s: float) -> asyncio.Timeout:
        delays_s.add(delay_s)
        deadlines.append(asyncio.timeout(delay_s))
        return deadlines[-1]

    monkeypatch.setattr(webhook_sender, "asyncio", SimpleNamespace(**{**vars(asyncio), "timeout": noted}))
    target.hangs = True
    sender = WebhookSender(executor, True)
    sending = asyncio.create_task(sender.send(target.url, "whsec_AAAA", DOCUMENT, deadline_s=60.0))
    assert await asyncio.to_thread(target.has_received.wait, 30)
    # With a short deadline, a busy machine would not even connect in time.
    deadlines[-1].reschedule(asyncio.get_running_loop().time())
    attempt = await sending
    assert (attempt.status, attempt.error) == (None, "the target did not answer within 60 s")
    assert delays_s == {60.0}


async def test_two_servers_deliver_an_event_once(
    deliveries: Deliveries, executor: ThreadPoolExecutor, target: Target
) -> None:
    other = Deliveries(deliveries.database, deliveries.tenant, executor, deliveries.clock)
    deliveries.webhooks.create(deliveries.tenant.id, target.url, None)
    for number in range(4):
        deliveries.happen(number)
    await asyncio.gather(deliveries.deliver(), other.deliver())
    assert numbers(target) == [0, 1, 2, 3]


async def test_backlogged_webhooks_of_a_tenant_take_turns(deliveries: Deliveries, target: Target) -> None:
    """Two slow targets with a long backlog leave the third webhook its turn."""
    for name in ("a", "b", "c"):
        deliveries.webhooks.create(deliveries.tenant.id, f"{target.url}/{name}", ["alias.moved"])
    for number in range(EVENTS_AT_ONCE + 1):
        deliveries.happen(number)
    for _ in range(2):
        deliveries.clock.advance(1)
        await deliveries.deliver()
    assert set(target.paths) == {"/hook/a", "/hook/b", "/hook/c"}


async def test_drain_ends_deliveries_after_the_current_event(deliveries: Deliveries, target: Target) -> None:
    webhook, _ = deliveries.webhooks.create(deliveries.tenant.id, target.url, None)
    for number in range(3):
        deliveries.happen(number)
    draining = asyncio.Event()
    with target.is_held:
        running = asyncio.create_task(deliveries.runner.run(draining))
        assert await asyncio.to_thread(target.has_received.wait, 30)
        draining.set()
    await running
    assert numbers(target) == [0]
    assert deliveries.state(webhook).sequence == 1
    # The webhook was given back, so another server goes on at once.
    assert [one.id for one in WebhookQueue(deliveries.database, LEASE_US).claim_due(1)] == [webhook.id]


def test_postponed_webhook_is_not_claimed(deliveries: Deliveries, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two servers find the same webhook, and the first one has postponed it before the second one claims it."""
    deliveries.webhooks.create(deliveries.tenant.id, "https://hooks.example.com", None)
    deliveries.happen(1)
    EventLog(deliveries.database).advance()
    first, second = (WebhookQueue(deliveries.database, LEASE_US) for _ in range(2))

    @contextlib.contextmanager
    def write() -> Iterator[Any]:
        monkeypatch.undo()
        (webhook,) = first.claim_due(1)
        first.postpone(webhook, 1, 60.0, "the target answered with 500")
        with deliveries.database.write() as connection:
            yield connection

    monkeypatch.setattr(deliveries.database, "write", write)
    assert second.claim_due(1) == []


@pytest.mark.parametrize("is_postponed", [False, True], ids=["released", "postponed"])
def test_webhook_is_due_after_the_clock_was_set_back(deliveries: Deliveries, is_postponed: bool) -> None:
    deliveries.webhooks.create(deliveries.tenant.id, "https://hooks.example.com", None)
    deliveries.happen(1)
    EventLog(deliveries.database).advance()
    queue = WebhookQueue(deliveries.database, LEASE_US)
    (webhook,) = queue.claim_due(1)
    if is_postponed:
        queue.postpone(webhook, 1, PAUSES_S[-1], "the target answered with 500")
        assert queue.claim_due(1) == []
    else:
        queue.release(webhook.id)
    deliveries.clock.advance(-86_400)
    assert [one.id for one in queue.claim_due(1)] == [webhook.id]


def test_numbers_of_a_webhook_do_not_go_back(deliveries: Deliveries) -> None:
    webhook, _ = deliveries.webhooks.create(deliveries.tenant.id, "https://hooks.example.com", None)
    for number in range(3):
        deliveries.happen(number)
    EventLog(deliveries.database).advance()
    queue = WebhookQueue(deliveries.database, LEASE_US)
    assert len(queue.claim_due(1)) == 1
    for sequence in (3, 1):
        assert queue.pass_on(webhook.id, sequence, is_delivered=True)
    assert deliveries.state(webhook).sequence == 3


async def test_lookups_that_hang_keep_only_two_threads_of_a_tenant() -> None:
    started, may_answer = threading.Semaphore(0), threading.Event()

    def resolve(host: str, port: int) -> list[str]:
        if host.startswith("slow"):
            started.release()
            may_answer.wait()
        return ["10.0.0.1"]

    with ThreadPoolExecutor(MAX_LOOKUPS_EACH + 1) as executor:
        sender = WebhookSender(executor, False, resolve)
        slow = functools.partial(sender.send, "https://slow.example.com", "whsec_AAAA", DOCUMENT)
        fast = functools.partial(sender.send, "https://fast.example.com", "whsec_AAAA")
        try:
            attempts = [asyncio.create_task(slow()) for _ in range(MAX_LOOKUPS_EACH)]
            for _ in attempts:
                assert await asyncio.to_thread(started.acquire, timeout=30)
            # The attempts end, but not their lookups.
            for attempt in attempts:
                attempt.cancel()
            await asyncio.wait(attempts)
            refused = await slow(deadline_s=0.05)
            assert refused.error == "the lookups of the tenant's hosts take too long"
            # Another tenant has a thread.
            other: EventDocument = {**DOCUMENT, "tenant_id": "ten_2"}
            assert (await fast(other)).error == "the host has no public address"
        finally:
            may_answer.set()
        assert (await fast(DOCUMENT)).error == "the host has no public address"
    assert not started.acquire(blocking=False)


async def test_each_address_is_tried(executor: ThreadPoolExecutor, target: Target) -> None:
    sender = WebhookSender(executor, True, lambda host, port: ["127.0.0.9", "127.0.0.1"])
    url = target.url.replace("127.0.0.1", "hooks.test")
    attempt = await sender.send(url, "whsec_AAAA", DOCUMENT)
    assert (attempt.status, attempt.error) == (204, None)
    assert target.received[0][0]["host"] == url.split("/")[2]


@pytest.mark.parametrize("name", ["hooks.test", "xn--strae-oqa.test"])
async def test_certificate_must_name_the_host_as_it_was_looked_up(
    executor: ThreadPoolExecutor, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """The system would look up `straße` as `strasse`, another host."""
    asked = []

    def resolve(host: str, port: int) -> list[str]:
        asked.append(host)
        return ["127.0.0.1"]

    context = certificate(name, tmp_path)
    monkeypatch.setenv("SSL_CERT_FILE", str(tmp_path / "cert.pem"))
    with listening_target(context) as target:
        url = target.url.replace("127.0.0.1", name)
        attempt = await WebhookSender(executor, True, resolve).send(url, "whsec_AAAA", DOCUMENT)
        assert (attempt.status, attempt.error) == (204, None)
        assert asked == [name]
        assert target.received[0][0]["host"] == url.split("/")[2]


async def test_scheme_in_capitals_is_https(executor: ThreadPoolExecutor) -> None:
    sender = WebhookSender(executor, False, lambda host, port: ["10.0.0.1"])
    attempt = await sender.send("HTTPS://hooks.example.com", "whsec_AAAA", DOCUMENT)
    assert attempt.error == "the host has no public address"


PUBLIC = "93.184.216.34"
PRIVATE = ["127.0.0.1", "10.0.0.1", "169.254.169.254", "::1", "fd00:ec2::254", "::ffff:10.0.0.1", "0.0.0.0"]


@pytest.mark.parametrize("addresses", [*([one] for one in PRIVATE), [PUBLIC, "10.0.0.1"]], ids=str)
async def test_private_targets_are_not_called(executor: ThreadPoolExecutor, addresses: list[str]) -> None:
    sender = WebhookSender(executor, allows_private=False, resolve=lambda host, port: addresses)
    attempt = await sender.send("https://hooks.example.com/x", "whsec_AAAA", DOCUMENT)
    assert (attempt.status, attempt.error) == (None, "the host has no public address")


async def test_private_addresses_in_urls_and_plain_http_are_refused(
    executor: ThreadPoolExecutor, target: Target
) -> None:
    sender = WebhookSender(executor, allows_private=False)
    plain = await sender.send(target.url, "whsec_AAAA", DOCUMENT)
    assert plain.error == "the URL does not use https"
    for host in ("127.0.0.1", "2130706433", "0x7f.1", "localhost", "[::1]"):
        spelled = await sender.send(f"https://{host}:{target.url.split(':')[2]}", "whsec_AAAA", DOCUMENT)
        assert spelled.error == "the host has no public address", host
    assert target.received == []


async def test_host_without_an_address_is_a_failure(executor: ThreadPoolExecutor) -> None:
    def resolve(host: str, port: int) -> list[str]:
        raise OSError("no such name")

    attempt = await WebhookSender(executor, True, resolve).send("https://hooks.example.com", "whsec_AAAA", DOCUMENT)
    assert attempt.error == "the target cannot be reached (ConnectError)"
    # The error does not tell which names the server's network knows.
    attempt = await WebhookSender(executor, False, resolve).send("https://hooks.example.com", "whsec_AAAA", DOCUMENT)
    assert attempt.error == "the host has no public address"


@pytest.mark.parametrize(
    "url",
    [
        *("", "hooks.example.com", "ftp://hooks.example.com", "https://", "https://u:p@hooks.example.com"),
        *("https://hooks.example.com/#x", "https://hooks.example.com/a b", "https://hooks.example.com/\n"),
        *("https://hooks.example.com/" + "a" * 2000, "https://hooks.exämple.com", "file:///etc/passwd"),
        *("https://hooks.example.com:0/", "https://hooks.example.com:99999999/", "https://xn--a/"),
        *("http://hooks.example.com/", "HTTP://hooks.example.com/"),
    ],
    ids=str,
)
def test_unusable_urls_are_refused(accounts: Database, url: str) -> None:
    tenant = Tenants(accounts).create("acme")
    with pytest.raises(ApiError) as refused:
        Webhooks(accounts).create(tenant.id, url, None)
    assert refused.value.code == "invalid_url"


def test_secrets_differ_and_neither_they_nor_paths_are_logged(accounts: Database) -> None:
    tenant = Tenants(accounts).create("acme")
    webhooks = Webhooks(accounts)
    made = [webhooks.create(tenant.id, "https://hooks.example.com/T0KEN", None) for _ in range(MAX_WEBHOOKS)]
    assert len({secret for _, secret in made}) == MAX_WEBHOOKS
    assert all(webhooks.secret(webhook) == secret for webhook, secret in made)
    with pytest.raises(ApiError) as refused:
        webhooks.create(tenant.id, "https://hooks.example.com", None)
    assert refused.value.code == "webhook_limit"
    assert webhooks.delete(made[0][0].id)
    assert not webhooks.delete(made[0][0].id)
    with accounts.read() as connection:
        logged = [(row.action, str(row.changes)) for row in connection.execute(audit_log.select())]
    assert [action for action, _ in logged].count("webhook.create") == MAX_WEBHOOKS
    assert [action for action, _ in logged].count("webhook.delete") == 1
    assert all("T0KEN" not in changes and "whsec" not in changes for _, changes in logged)


def test_deleted_tenant_takes_its_webhooks(accounts: Database) -> None:
    tenant = Tenants(accounts).create("acme")
    webhook, _ = Webhooks(accounts).create(tenant.id, "https://hooks.example.com", None)
    assert Tenants(accounts).delete(tenant.id)
    assert Webhooks(accounts).get(webhook.id) is None
    assert Webhooks(accounts).secret(webhook) is None
