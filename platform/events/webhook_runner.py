"""Delivers events to webhooks, in order, again after growing pauses while a target fails."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from typing import ParamSpec, Protocol, TypeVar

import structlog
from sqlalchemy.exc import SQLAlchemyError

from loramux.migrations.database import Database
from loramux.platform.events.documents import describe_event
from loramux.platform.events.event_feed import EventFeed
from loramux.platform.events.event_log import EventFilter, EventLog
from loramux.platform.events.webhook_sender import DEADLINE_S, WebhookSender
from loramux.platform.events.webhooks import Webhook, WebhookQueue, Webhooks
from loramux.platform.telemetry.package_metrics import EventMetrics

PAUSES_S: Sequence[float] = (5, 30, 120, 600, 1800, 3600, 7200)
"""Pauses after the first, second, ... failure in a row, in seconds. The last one repeats."""
MAX_AGE_S = 86_400
"""An event that could not be delivered for this long is skipped."""
LOOK_INTERVAL_S = 1.0
MAX_DELIVERIES = 16
"""Largest number of webhooks that a server delivers to at once."""
MAX_DELIVERIES_EACH = 2
"""Largest number of webhooks of one tenant that a server delivers to at once."""
EVENTS_AT_ONCE = 20
"""After this many events, other webhooks get their turn."""
LEASE_US = round((DEADLINE_S + 20) * 1_000_000)
GONE = 410

P = ParamSpec("P")
R = TypeVar("R")
log = structlog.get_logger(__name__)


class Call(Protocol):
    """Runs a blocking function on a thread."""

    def __call__(self, function: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> Awaitable[R]: ...


class WebhookRunner:
    """Runs in every server. A webhook's claim keeps two servers from delivering the same event at the same time.

    An event can still arrive twice, if a server dies between a delivery and its record. Receivers can tell by its
    `webhook-id`.
    """

    def __init__(
        self, database: Database, call: Call, feed: EventFeed, sender: WebhookSender, metrics: EventMetrics
    ) -> None:
        self._database = database
        self._call = call
        self._feed = feed
        self._sender = sender
        self._metrics = metrics
        self._log = EventLog(database)
        self._webhooks = Webhooks(database)
        self._queue = WebhookQueue(database, LEASE_US)
        self._running: dict[asyncio.Task[None], str] = {}
        self._draining = asyncio.Event()

    async def run(self, draining: asyncio.Event) -> None:
        """Deliver until cancelled, or until the server drains. Deliveries then end after their current event."""
        self._draining = draining
        try:
            while not draining.is_set():
                try:
                    await self._feed.head()
                    await self.begin_due()
                except SQLAlchemyError as error:
                    log.warning("webhooks are not delivered; trying again", error=str(error))
                except Exception:
                    log.exception("webhooks are not delivered; trying again")
                await asyncio.sleep(LOOK_INTERVAL_S)
            await self.settled()
        finally:
            for task in self._running:
                task.cancel()

    async def begin_due(self) -> None:
        """Begin to deliver to the webhooks that are due, as far as the limits allow."""
        num_of = Counter(self._running.values())
        busy = [tenant_id for tenant_id, number in num_of.items() if number >= MAX_DELIVERIES_EACH]
        free = MAX_DELIVERIES - len(self._running)
        # One at a time, because each changes which tenants are busy.
        while free > 0:
            claimed = await self._call(self._queue.claim_due, 1, busy)
            if not claimed:
                return
            (webhook,) = claimed
            num_of[webhook.tenant_id] += 1
            if num_of[webhook.tenant_id] >= MAX_DELIVERIES_EACH:
                busy.append(webhook.tenant_id)
            task = asyncio.create_task(self._deliver(webhook))
            self._running[task] = webhook.tenant_id
            task.add_done_callback(self._running.pop)
            free -= 1

    async def settled(self) -> None:
        """Wait for the deliveries that are running."""
        await asyncio.gather(*self._running, return_exceptions=True)

    async def _deliver(self, webhook: Webhook) -> None:
        try:
            secret = await self._call(self._webhooks.secret, webhook)
            if secret is not None and await self._deliver_some(webhook, secret):
                await self._call(self._queue.release, webhook.id)
        except SQLAlchemyError as error:
            # The claim expires, and the webhook is due again.
            log.warning("a webhook's delivery is not recorded", webhook_id=webhook.id, error=str(error))

    async def _deliver_some(self, webhook: Webhook, secret: str) -> bool:
        """Deliver the next events in order. Return True if the webhook can be given back as it is."""
        oldest_us = self._database.now_us() - MAX_AGE_S * 1_000_000
        head = await self._call(self._log.head, webhook.tenant_id)
        wanted = EventFilter(tenant_id=webhook.tenant_id, types=webhook.types)
        events = await self._call(self._log.read, webhook.sequence, wanted, oldest_us, EVENTS_AT_ONCE)
        num_failures, reached = webhook.num_failures, head
        for event in events:
            attempt = await self._sender.send(webhook.url, secret, describe_event(event, is_of_tenant=True))
            self._metrics.count_delivery(attempt.error is None, attempt.seconds)
            if attempt.status == GONE:
                await self._call(self._queue.disable, webhook, "the target answered with 410: it is gone")
                return False
            if attempt.error is not None:
                pause_s = PAUSES_S[min(num_failures, len(PAUSES_S) - 1)] * random.uniform(0.9, 1.1)
                await self._call(self._queue.postpone, webhook, num_failures + 1, pause_s, attempt.error)
                return False
            num_failures, reached = 0, max(reached, event.sequence)
            if not await self._call(self._queue.pass_on, webhook.id, event.sequence, is_delivered=True):
                return False
            if self._draining.is_set():
                return True
        if len(events) < EVENTS_AT_ONCE:
            # The events up to here are of other types, or too old.
            await self._call(self._queue.pass_on, webhook.id, reached, is_delivered=False)
        return True
