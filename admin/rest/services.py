"""The services behind the admin API, assembled once in `assembly.py`."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Collection, Mapping
from concurrent.futures import Executor
from dataclasses import dataclass, field
from pathlib import Path
from typing import ParamSpec, TypeVar

from starlette.types import ASGIApp

from loramux.adapter_store.formats.version_files.tokenizer_files import BaseVocabulary
from loramux.adapter_store.ingest.export import VersionExport
from loramux.adapter_store.ingest.ingest import Ingest
from loramux.adapter_store.ingest.jobs import IngestJobs
from loramux.adapter_store.registry.aliases import AdapterAliases
from loramux.adapter_store.registry.bases import Bases
from loramux.adapter_store.registry.evals import Evals
from loramux.adapter_store.registry.pins import AdapterPins
from loramux.adapter_store.registry.registry import AdapterRegistry
from loramux.adapter_store.registry.sharing import AdapterGrants
from loramux.adapter_store.registry.version_states import VersionStates
from loramux.admin.doctor.self_check import SelfCheck
from loramux.admin.server.idempotency_keys import IdempotencyKeys
from loramux.admin.server.oidc_settings import OidcSettings
from loramux.admin.server.transfer_slots import TransferSlots
from loramux.migrations.database import Database
from loramux.platform.accounts.api_keys import ApiKeys
from loramux.platform.accounts.audit_log import AuditLog
from loramux.platform.accounts.principals import Principal
from loramux.platform.accounts.tenants import Tenants
from loramux.platform.batches.every_batch import EveryBatch
from loramux.platform.engine_link.engine_client import EngineClient
from loramux.platform.events.event_feed import EventFeed
from loramux.platform.events.event_log import EventLog
from loramux.platform.events.webhook_sender import WebhookSender
from loramux.platform.events.webhooks import Webhooks
from loramux.platform.generation.adapter_loads import AdapterLoads
from loramux.platform.generation.requests_in_flight import RequestsInFlight
from loramux.platform.generation.running_requests import LiveRequests, NoLiveRequests
from loramux.platform.ledger.erasure import UsageErasure
from loramux.platform.ledger.events import Ledger
from loramux.platform.ledger.price_list import PriceList
from loramux.platform.quotas.overview import QuotaOverview
from loramux.platform.quotas.policies import QuotaPolicies
from loramux.platform.replicas.reports import Fleet
from loramux.platform.telemetry.metrics import GatewayMetrics
from loramux.platform.threads import call_on

P = ParamSpec("P")
R = TypeVar("R")

NUM_ADMIN_THREADS = 4
"""Number of threads for the SQL of admin routes. The number is small, because busy threads slow down the event loop
that serves inference requests.
"""
NUM_REPORT_THREADS = 2
MAX_REPORTS_EACH = 1
"""Maximum concurrent reports per tenant, or per platform key."""
REPORTS_REST = 19.0
"""A tenant's cooldown after a report, as a multiple of the report's duration. Reports slow down inference."""
MAX_CALLS = 64
MAX_CALLS_EACH = 4
"""Maximum concurrent calls per tenant, across all its keys and sessions. Platform calls are not limited."""
CALLS_REST = 19.0
PAGES_REST = 3.0
"""A tenant's cooldown after a console page, as a multiple of the page's duration. The factor is lower than CALLS_REST,
because a page spends most of its time waiting for its calls.
"""
MAX_EXPORTS = 16
"""Maximum concurrent exports and long reports. Each uses up to 20 MB of memory while its client reads."""
MAX_EXPORTS_EACH = 4
MAX_UPLOADS = 32
"""Maximum concurrent file uploads. Each occupies a thread while its client sends."""
MAX_UPLOADS_EACH = 16
"""Maximum concurrent file uploads per tenant."""
MAX_PUSHES_EACH = 4
"""Maximum concurrent pushes per tenant. Each occupies a thread or waits for its validation."""
PUSHES_AT_ONCE = 2
"""Maximum number of pushes of at most LARGE_PUSH_BYTES that are validated at a time."""
MAX_DOWNLOADS = 8
"""Maximum concurrent file downloads. Each keeps a copy on disk while its client reads."""
MAX_EVENT_STREAMS = 200
"""Maximum number of open streams of events. An idle stream costs only its connection."""
MAX_EVENT_STREAMS_EACH = 10
"""Maximum number of open streams of events per tenant."""
MAX_DOWNLOADS_EACH = 4
"""Maximum concurrent file downloads per tenant."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AccountServices:
    tenants: Tenants
    api_keys: ApiKeys
    audit_log: AuditLog


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterServices:
    registry: AdapterRegistry
    ingest: Ingest
    export: VersionExport
    bases: Bases
    aliases: AdapterAliases
    grants: AdapterGrants
    version_states: VersionStates
    jobs: IngestJobs
    pins: AdapterPins
    evals: Evals
    vocabulary: BaseVocabulary

    @classmethod
    def over(
        cls,
        database: Database,
        registry: AdapterRegistry,
        ingest: Ingest,
        export: VersionExport,
        vocabulary: BaseVocabulary,
    ) -> AdapterServices:
        return cls(
            registry=registry,
            ingest=ingest,
            export=export,
            bases=Bases(database),
            aliases=AdapterAliases(database),
            grants=AdapterGrants(database),
            version_states=VersionStates(database, registry),
            jobs=IngestJobs(database),
            pins=AdapterPins(database, registry),
            evals=Evals(database),
            vocabulary=vocabulary,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class UsageServices:
    quotas: QuotaPolicies
    quota_overview: QuotaOverview
    prices: PriceList
    ledger: Ledger
    erasure: UsageErasure
    batches: EveryBatch

    @classmethod
    def over(cls, database: Database) -> UsageServices:
        return cls(
            quotas=QuotaPolicies(database),
            quota_overview=QuotaOverview(database),
            prices=PriceList(database),
            ledger=Ledger(database),
            erasure=UsageErasure(database),
            batches=EveryBatch(database),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class EventServices:
    log: EventLog
    feed: EventFeed
    webhooks: Webhooks
    sender: WebhookSender

    @classmethod
    def over(cls, database: Database, executor: Executor, sender: WebhookSender) -> EventServices:
        log = EventLog(database)
        feed = EventFeed(
            lambda: call_on(executor, log.advance), lambda position: call_on(executor, log.changed, position)
        )
        return cls(log=log, feed=feed, webhooks=Webhooks(database, sender.allows_private), sender=sender)


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineServices:
    client: EngineClient
    loads: AdapterLoads
    requests: RequestsInFlight
    self_check: SelfCheck
    fleet: Fleet | None = None
    """The servers that share requests with this one, or this server's engines. None if it has one engine and does not
    share requests.
    """
    disk_tier: Path | None = None
    """The directory of the engine's disk tier, from which purged weights are deleted."""
    live: LiveRequests = field(default_factory=NoLiveRequests)
    """The requests running in this process."""
    load_elsewhere: Callable[[str, Collection[str], float], Awaitable[None]] | None = None
    """`RoutedEngine.load_elsewhere`. None if this server has one engine and does not share requests."""

    @property
    def engines(self) -> Mapping[str, EngineClient]:
        """This server's engines by name, if it has several. Otherwise empty."""
        return {} if self.fleet is None else self.fleet.engines

    @property
    def measured(self) -> Mapping[str, EngineClient]:
        """`Fleet.measured`, or empty if this server exports the metrics of `client`."""
        return {} if self.fleet is None else self.fleet.measured


@dataclass(frozen=True, slots=True)
class AdminSlots:
    """Limits on concurrent calls of each kind."""

    uploads: TransferSlots = field(default_factory=lambda: TransferSlots("uploads", MAX_UPLOADS, MAX_UPLOADS_EACH))
    """Uploads have separate slots and threads, so that slow clients do not delay other calls."""
    pushes: TransferSlots = field(default_factory=lambda: TransferSlots("pushes", MAX_UPLOADS, MAX_PUSHES_EACH))
    push_turns: TransferSlots = field(default_factory=lambda: TransferSlots("pushes", PUSHES_AT_ONCE, 1))
    """Validations of pushes, one at a time per tenant. The tenant whose push has waited longest is next."""
    large_push_turns: TransferSlots = field(default_factory=lambda: TransferSlots("pushes", 1, 1))
    downloads: TransferSlots = field(
        default_factory=lambda: TransferSlots("downloads", MAX_DOWNLOADS, MAX_DOWNLOADS_EACH)
    )
    calls: TransferSlots = field(default_factory=lambda: TransferSlots("calls", MAX_CALLS, MAX_CALLS_EACH, CALLS_REST))
    pages: TransferSlots = field(default_factory=lambda: TransferSlots("pages", MAX_CALLS, MAX_CALLS_EACH, PAGES_REST))
    """Slots for console pages. The calls within a page take their own slots."""
    reports: TransferSlots = field(
        default_factory=lambda: TransferSlots("reports", NUM_REPORT_THREADS, MAX_REPORTS_EACH, REPORTS_REST)
    )
    event_streams: TransferSlots = field(
        default_factory=lambda: TransferSlots("event_streams", MAX_EVENT_STREAMS, MAX_EVENT_STREAMS_EACH)
    )
    exports: TransferSlots = field(default_factory=lambda: TransferSlots("exports", MAX_EXPORTS, MAX_EXPORTS_EACH))


@dataclass(frozen=True, slots=True, kw_only=True)
class AdminServices:
    """The services behind the admin routes, in one record per folder of routes.

    Routes call blocking services through `call`.
    """

    database: Database
    accounts: AccountServices
    adapters: AdapterServices
    usage: UsageServices
    engine: EngineServices
    events: EventServices
    idempotency_keys: IdempotencyKeys
    metrics: GatewayMetrics
    metrics_token: str | None
    """The token that `/metrics` requires. If None, only this machine may scrape."""
    is_loopback: bool
    """True if the admin listener can be reached only from this machine, and no trusted proxy forwards calls to it."""
    executor: Executor
    """A thread pool for the admin side only. Its calls never take threads from inference."""
    report_executor: Executor
    slots: AdminSlots = field(default_factory=AdminSlots)
    oidc: OidcSettings | None = None
    """Single sign-on settings for the console. If None, people sign in only with keys."""
    gateway: ASGIApp | None = None
    """This process's OpenAI API, for the console's playground, or None if the process serves none."""
    api_url: str = "http://127.0.0.1:8000/v1"
    """The OpenAI API's base URL as shown in examples."""
    trouble: Callable[[], str | None] = lambda: None
    """Returns the gateway's current database problem for `/health/ready`, or None."""

    async def call(self, function: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
        return await call_on(self.executor, function, *args, **kwargs)

    async def report(self, caller: Principal, function: Callable[[], R], *, is_patient: bool = False) -> R:
        """Wait for one of the caller's report slots. Then run `function`, which reads many rows, on a report thread.

        Platform callers have no cooldown, because their reports cover all tenants and take longer.
        """
        rests = caller.tenant_id is not None
        async with self.slots.reports.held_slot(caller.holder, is_patient=is_patient, rests=rests):
            return await call_on(self.report_executor, function)
