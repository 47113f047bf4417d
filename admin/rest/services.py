"""What the admin side works with; put together once, in assembly.py."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Executor
from dataclasses import dataclass, field
from typing import ParamSpec, TypeVar

from starlette.types import ASGIApp

from loramux.adapter_store.ingest.export import VersionExport
from loramux.adapter_store.ingest.ingest import Ingest
from loramux.adapter_store.ingest.jobs import IngestJobs
from loramux.adapter_store.registry.aliases import AdapterAliases
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
from loramux.platform.engine_link.engine_client import EngineClient
from loramux.platform.generation.adapter_loads import AdapterLoads
from loramux.platform.generation.requests_in_flight import RequestsInFlight
from loramux.platform.generation.running_requests import LiveRequests, NoLiveRequests
from loramux.platform.ledger.events import Ledger
from loramux.platform.ledger.price_list import PriceList
from loramux.platform.quotas.overview import QuotaOverview
from loramux.platform.quotas.policies import QuotaPolicies
from loramux.platform.telemetry.metrics import GatewayMetrics
from loramux.platform.threads import call_on

P = ParamSpec("P")
R = TypeVar("R")

NUM_ADMIN_THREADS = 4
"""For the SQL of admin routes: few, since each that computes takes turns with the event loop of inference."""
NUM_REPORT_THREADS = 2
MAX_REPORTS_EACH = 1
"""Reports of one tenant, or of one key of the platform, that are added up at once."""
REPORTS_REST = 19.0
"""How many times as long as a report took its tenant rests: it takes a core from inference while it runs."""
MAX_CALLS = 64
MAX_CALLS_EACH = 4
"""Calls of one tenant's keys and sessions that are answered at once; the platform's own are not counted."""
CALLS_REST = 19.0
PAGES_REST = 3.0
"""Of a page of the console, most of whose time its calls take."""
MAX_EXPORTS = 16
"""Exports and long reports that are sent at once; each keeps up to 20 MB for as long as its client reads."""
MAX_EXPORTS_EACH = 4
MAX_UPLOADS = 32
"""How many files are taken at once; each holds a thread for as long as its client sends."""
MAX_UPLOADS_EACH = 16
"""Of one tenant's adapters."""
MAX_DOWNLOADS = 8
"""How many files are given out at once; each holds a copy on the disk for as long as its client reads."""
MAX_DOWNLOADS_EACH = 4
"""Of one tenant's adapters."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AdminServices:
    """The services behind the admin routes. Blocking ones go through `call`."""

    database: Database
    tenants: Tenants
    api_keys: ApiKeys
    registry: AdapterRegistry
    aliases: AdapterAliases
    grants: AdapterGrants
    version_states: VersionStates
    ingest: Ingest
    export: VersionExport
    jobs: IngestJobs
    pins: AdapterPins
    idempotency_keys: IdempotencyKeys
    requests: RequestsInFlight
    quotas: QuotaPolicies
    quota_overview: QuotaOverview
    prices: PriceList
    audit_log: AuditLog
    ledger: Ledger
    engine: EngineClient
    loads: AdapterLoads
    metrics: GatewayMetrics
    self_check: SelfCheck
    metrics_token: str | None
    """What `/metrics` asks for; None asks for nothing, and then only this machine may scrape."""
    is_loopback: bool
    """Whether only this machine reaches the admin listener, and no trusted proxy calls it for others."""
    executor: Executor
    """The admin side's own threads, so that none of its calls keeps one from inference."""
    report_executor: Executor
    oidc: OidcSettings | None = None
    """How people sign in to the console through a provider; None where they have keys only."""
    gateway: ASGIApp | None = None
    """The OpenAI API of this process, for the console's playground; None where there is none."""
    api_url: str = "http://127.0.0.1:8000/v1"
    """Where callers find the OpenAI API, as examples write it."""
    live: LiveRequests = field(default_factory=NoLiveRequests)
    """The requests that this process runs itself."""
    trouble: Callable[[], str | None] = lambda: None
    """What the gateway of this process knows to be wrong with its database, for `/health/ready`."""
    upload_slots: TransferSlots = field(default_factory=lambda: TransferSlots("uploads", MAX_UPLOADS, MAX_UPLOADS_EACH))
    """The threads of uploads: their own, so that slow clients keep nothing else waiting."""
    download_slots: TransferSlots = field(
        default_factory=lambda: TransferSlots("downloads", MAX_DOWNLOADS, MAX_DOWNLOADS_EACH)
    )
    call_slots: TransferSlots = field(
        default_factory=lambda: TransferSlots("calls", MAX_CALLS, MAX_CALLS_EACH, CALLS_REST)
    )
    page_slots: TransferSlots = field(
        default_factory=lambda: TransferSlots("pages", MAX_CALLS, MAX_CALLS_EACH, PAGES_REST)
    )
    """The same for pages of the console, whose calls take slots of their own."""
    report_slots: TransferSlots = field(
        default_factory=lambda: TransferSlots("reports", NUM_REPORT_THREADS, MAX_REPORTS_EACH, REPORTS_REST)
    )
    export_slots: TransferSlots = field(default_factory=lambda: TransferSlots("exports", MAX_EXPORTS, MAX_EXPORTS_EACH))

    async def call(self, function: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
        """Run a blocking function on a thread."""
        return await call_on(self.executor, function, *args, **kwargs)

    async def report(self, caller: Principal, function: Callable[[], R], *, is_patient: bool = False) -> R:
        """Run what reads many rows, on a thread for that, as soon as the caller has a slot for it.

        Whom the operator trusts with every tenant's figures need not rest: reports on all of them take longer.
        """
        rests = caller.tenant_id is not None
        async with self.report_slots.held_slot(caller.holder, is_patient=is_patient, rests=rests):
            return await call_on(self.report_executor, function)
