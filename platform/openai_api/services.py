"""What the gateway works with; composed once, at the start."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import Executor, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import ParamSpec, TypeVar

from loramux.adapter_store.registry.registry import AdapterRegistry
from loramux.migrations.database import Database
from loramux.platform.accounts.api_keys import ApiKeys
from loramux.platform.accounts.cache_invalidation import CacheInvalidation
from loramux.platform.accounts.model_names import ModelResolver
from loramux.platform.accounts.tenants import Tenants
from loramux.platform.admission.admission import Admission
from loramux.platform.admission.database_health import DatabaseHealth, DatabaseTrouble
from loramux.platform.admission.group_commit import GroupCommit
from loramux.platform.engine_link.engine_client import EngineClient
from loramux.platform.generation.adapter_loads import AdapterLoads
from loramux.platform.generation.cold_loads import ColdLoads
from loramux.platform.generation.maintenance import Maintenance
from loramux.platform.generation.running_requests import RunningRequests
from loramux.platform.generation.settlement_spool import SettlementSpool
from loramux.platform.generation.settler import Settler
from loramux.platform.telemetry.metrics import GatewayMetrics
from loramux.platform.telemetry.tracing import Tracing
from loramux.platform.threads import call_on
from loramux.platform.tokenizer.model_tokenizer import ModelTokenizer

CALL_WAIT_S = 5.0
"""How long a request waits for an answer of the database."""

CLOSE_WAIT_S = 5.0
"""How long the last commits may take."""

NUM_COMPUTE_THREADS = 2
"""For parsing and tokenising: what they wait for is a core, so that more threads would only take turns."""

P = ParamSpec("P")
R = TypeVar("R")


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """The base model as clients see it."""

    served_name: str
    max_model_len: int
    vocab_size: int
    created_s: int


@dataclass(frozen=True, slots=True, kw_only=True)
class GatewaySettings:
    """Caps on one request, each checked before work is done for it."""

    max_body_bytes: int = 2 * 1024 * 1024
    max_choices: int = 128
    """Prompts times n."""
    logs_answers: bool = False
    """Whether each answer is a line of the log."""
    max_request_tokens: int = 1024 * 1024
    """What the engine may have to hold: of every prompt, n times itself and max_tokens."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GatewayServices:
    """The services behind the OpenAI routes. Blocking ones go through `call`; `maintenance.run` must run beside.

    What only computes goes through `compute`, on threads of its own: SQL, health and settlements never wait behind it.
    """

    database: Database
    tenants: Tenants
    api_keys: ApiKeys
    resolver: ModelResolver
    running: RunningRequests
    maintenance: Maintenance
    loads: AdapterLoads
    settler: Settler
    commit: GroupCommit
    cache_invalidation: CacheInvalidation
    database_health: DatabaseHealth
    spool: SettlementSpool | None
    engine: EngineClient
    tokenizer: ModelTokenizer
    model: ModelInfo
    metrics: GatewayMetrics
    settings: GatewaySettings
    executor: Executor
    compute_executor: Executor
    tracing: Tracing | None = None

    @staticmethod
    def compose(
        *,
        database: Database,
        tenants: Tenants,
        api_keys: ApiKeys,
        registry: AdapterRegistry,
        engine: EngineClient,
        tokenizer: ModelTokenizer,
        model: ModelInfo,
        executor: Executor,
        settings: GatewaySettings | None = None,
        metrics: GatewayMetrics | None = None,
        spool: SettlementSpool | None = None,
        tracing: Tracing | None = None,
    ) -> GatewayServices:
        """Put a gateway together. `executor` runs what blocks; the threads that compute end with `close`.

        Without a `spool`, what cannot be settled waits in memory alone.
        """
        metrics = metrics if metrics is not None else GatewayMetrics()
        admission = Admission(database, metrics.overdrawn.inc)
        health = DatabaseHealth()
        commit = GroupCommit(admission, metrics.note_commit, health, admission.num_writers)
        metrics.database_connections.set_function(lambda: database.num_connections)
        settler = Settler(commit, metrics, health, spool)
        cold_loads = ColdLoads(engine)
        running = RunningRequests(commit, engine, tokenizer, metrics, database.now_us, health, settler, cold_loads)
        metrics.held_settlements.set_function(lambda: settler.num_held)
        if spool is not None:
            metrics.spooled_bytes.set_function(lambda: spool.num_bytes)
        metrics.database_trouble.set_function(lambda: health.trouble is not None)
        return GatewayServices(
            database=database,
            tenants=tenants,
            api_keys=api_keys,
            resolver=ModelResolver(registry, model.served_name),
            running=running,
            maintenance=Maintenance(
                running, admission, settler, cold_loads, health, metrics, partial(call_on, executor)
            ),
            loads=AdapterLoads(engine, cold_loads, commit, health),
            settler=settler,
            commit=commit,
            cache_invalidation=CacheInvalidation(
                database, (api_keys.forget_recent, tenants.forget_recent), health.note_heard
            ),
            database_health=health,
            spool=spool,
            engine=engine,
            tokenizer=tokenizer,
            model=model,
            metrics=metrics,
            settings=settings if settings is not None else GatewaySettings(),
            executor=executor,
            compute_executor=ThreadPoolExecutor(NUM_COMPUTE_THREADS, thread_name_prefix="compute"),
            tracing=tracing,
        )

    def close(self) -> None:
        """End the threads: what waits to be committed is; what computes is finished, what waits for it is not begun."""
        self.cache_invalidation.close()
        self.commit.close(CLOSE_WAIT_S)
        self.settler.close()
        self.compute_executor.shutdown(cancel_futures=True)
        if self.tracing is not None:
            self.tracing.close()

    async def call(self, function: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
        """Ask the database something on a thread; raises DatabaseTrouble where it does not answer."""
        self.database_health.check()
        try:
            return await asyncio.wait_for(call_on(self.executor, function, *args, **kwargs), CALL_WAIT_S)
        except TimeoutError:
            raise DatabaseTrouble("the database does not answer") from None

    async def compute(self, function: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
        """Run a function that needs only a core, and that for long, on a thread."""
        return await call_on(self.compute_executor, function, *args, **kwargs)

    def trouble(self) -> str | None:
        """Why a request sent now would be refused although the engine is ready; for operators."""
        troubles = [one for one in (self.database_health.trouble, self.settler.trouble) if one is not None]
        return "; ".join(troubles) or None

    @property
    def max_model_len(self) -> int:
        """The longest sequence that the running engine takes; its pool may hold less than the model could."""
        info = self.engine.info
        return self.model.max_model_len if info is None else min(self.model.max_model_len, info.max_model_len)
