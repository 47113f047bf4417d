"""The gateway's services, assembled once at startup."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Executor, ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from typing import ParamSpec, TypeVar

from loramux.adapter_store.formats.version_files.answer_parsers import NO_CHOICE, AnswerParsers
from loramux.adapter_store.formats.version_files.generation_config import NO_DEFAULTS, SamplingDefaults
from loramux.adapter_store.formats.version_files.pooling_files import DEFAULT_POOLING, Pooling
from loramux.adapter_store.registry.registry import AdapterRegistry
from loramux.adapter_store.registry.version_states import VersionStates
from loramux.engine.text.text_tokenizer import MAX_TOKENISED_AT_ONCE
from loramux.migrations.database import Database
from loramux.platform.accounts.alias_overflows import AliasOverflows
from loramux.platform.accounts.api_keys import ApiKeys
from loramux.platform.accounts.cache_invalidation import CacheInvalidation
from loramux.platform.accounts.model_archive import ModelArchive
from loramux.platform.accounts.model_names import ModelResolver
from loramux.platform.accounts.tenants import Tenants
from loramux.platform.accounts.version_settings import VersionSettingsCache
from loramux.platform.admission.admission import Admission
from loramux.platform.admission.database_health import DatabaseHealth, DatabaseTrouble
from loramux.platform.admission.group_commit import GroupCommit
from loramux.platform.base_draw import BaseDraw
from loramux.platform.engine_link.engine_client import EngineClient
from loramux.platform.generation.adapter_loads import AdapterLoads
from loramux.platform.generation.cold_loads import ColdLoads, HeldElsewhere, held_nowhere_else
from loramux.platform.generation.first_token_gate import FirstTokenGate
from loramux.platform.generation.maintenance import Maintenance
from loramux.platform.generation.running_requests import RunningRequests
from loramux.platform.generation.settlement_spool import SettlementSpool
from loramux.platform.generation.settler import Settler
from loramux.platform.grammars.checker import GrammarChecker
from loramux.platform.requests.chat_prompt import ChatPrompts
from loramux.platform.stored_responses.stored_objects import StoredObjects
from loramux.platform.telemetry.metrics import GatewayMetrics
from loramux.platform.telemetry.tracing import Tracing
from loramux.platform.threads import call_on
from loramux.platform.tokenizer.model_tokenizer import ModelTokenizer
from loramux.platform.tokenizer.tenant_templates import TenantTemplates
from loramux.platform.tokenizer.version_tokenizers import VersionTokenizers

CALL_WAIT_S = 5.0
"""Timeout for a request's call to the database, in seconds."""

CLOSE_WAIT_S = 5.0
"""Timeout for the last commits at shutdown, in seconds."""

NUM_COMPUTE_THREADS = 2
"""Number of threads for parsing and tokenising. Both are CPU-bound, so more threads would not be faster."""

P = ParamSpec("P")
R = TypeVar("R")


@dataclass(frozen=True, slots=True)
class ModelInfo:
    served_name: str
    max_model_len: int
    vocab_size: int
    created_s: int
    eos_token_ids: tuple[int, ...] = ()
    hidden_size: int = 0
    """Number of elements of a hidden state, and so of an embedding."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GatewaySettings:
    """Limits on a request, the defaults of its fields, and how its answers are parsed and logged."""

    max_body_bytes: int = 2 * 1024 * 1024
    max_choices: int = 128
    """Maximum product of the number of prompts and n (or best_of, if it is greater)."""
    pooling: Pooling = DEFAULT_POOLING
    """How the base's embeddings are made."""
    logs_answers: bool = False
    """Whether to log each response."""
    base_defaults: SamplingDefaults = NO_DEFAULTS
    """The sampling defaults from the base model's directory."""
    applies_adapter_defaults: bool = True
    """Whether to apply the sampling defaults uploaded with adapters."""
    base_parsers: AnswerParsers = NO_CHOICE
    """The answer parsers for prompts rendered with the base's template."""
    response_key: bytes | None = field(default=None, repr=False)
    """The secret that encrypts what is stored for tenants. None if nothing is stored."""
    cors_origins: tuple[str, ...] = ()
    """Origins whose web pages can call the API. `*` means every origin."""
    forces_usage: bool = False
    """Whether each chunk of a stream reports the usage so far, even if the request does not ask for it."""
    names_tokens_by_id: bool = False
    """Whether log-probabilities name tokens by their ids, unless the request says otherwise."""
    root_path: str = ""
    """A prefix with which all paths are served, too. It begins with a slash and does not end with one."""
    tier_objectives: Mapping[str, float] = field(default_factory=dict)
    """Longest time until the first token, in seconds, by service tier. Requests that would miss it are refused."""
    max_request_tokens: int = 1024 * 1024
    """Maximum total tokens of a request's sequences: the sum over all prompts of n (or best_of) times (prompt tokens +
    max_tokens).
    """


@dataclass(frozen=True, slots=True, kw_only=True)
class CallerServices:
    """Find a request's caller, and the model that it names."""

    tenants: Tenants
    api_keys: ApiKeys
    resolver: ModelResolver
    archive: ModelArchive
    version_settings: VersionSettingsCache
    overflows: AliasOverflows
    cache_invalidation: CacheInvalidation


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptServices:
    """Turn a request's body into token ids and a grammar."""

    tokenizer: ModelTokenizer
    """The base's tokenizer. A request uses the tokenizer of its `Target`."""
    version_tokenizers: VersionTokenizers
    chat_prompts: ChatPrompts
    grammars: GrammarChecker


@dataclass(frozen=True, slots=True, kw_only=True)
class RunServices:
    """Reserve, run and settle requests."""

    requests: RunningRequests
    maintenance: Maintenance
    gate: FirstTokenGate
    loads: AdapterLoads
    settler: Settler
    commit: GroupCommit
    database_health: DatabaseHealth
    spool: SettlementSpool | None

    @staticmethod
    def over(
        database: Database,
        engine: EngineClient,
        metrics: GatewayMetrics,
        executor: Executor,
        spool: SettlementSpool | None,
        is_held_elsewhere: HeldElsewhere,
        tier_objectives: Mapping[str, float],
        clock: Callable[[], float],
        is_alone: bool,
    ) -> RunServices:
        admission = Admission(database, metrics.admission.overdrawn.inc)
        health = DatabaseHealth()
        commit = GroupCommit(admission, metrics.admission.note_commit, health, admission.num_writers)
        generation = metrics.generation
        settler = Settler(commit, generation, health, spool)
        cold_loads = ColdLoads(engine, is_held_elsewhere=is_held_elsewhere)
        gate = FirstTokenGate(engine, tier_objectives, generation, clock)
        requests = RunningRequests(commit, engine, generation, database.now_us, health, settler, cold_loads, gate)
        call = partial(call_on, executor)
        metrics.admission.database_connections.set_function(lambda: database.num_connections)
        metrics.admission.database_trouble.set_function(lambda: health.trouble is not None)
        generation.held_settlements.set_function(lambda: settler.num_held)
        if spool is not None:
            generation.spooled_bytes.set_function(lambda: spool.num_bytes)
        return RunServices(
            requests=requests,
            maintenance=Maintenance(
                requests, admission, settler, cold_loads, gate, health, generation, call, clock, is_alone
            ),
            gate=gate,
            loads=AdapterLoads(engine, cold_loads, commit, health),
            settler=settler,
            commit=commit,
            database_health=health,
            spool=spool,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class GatewayServices:
    """The services behind the OpenAI routes. `run.maintenance.run` must run as long as they are used.

    Blocking calls go through `call`. CPU-bound work goes through `compute`, on separate threads, so that SQL, health
    checks and settlements never wait behind it.
    """

    database: Database
    callers: CallerServices
    prompts: PromptServices
    run: RunServices
    stored: StoredObjects
    engine: EngineClient
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
        api_keys: ApiKeys,
        registry: AdapterRegistry,
        engine: EngineClient,
        tokenizer: ModelTokenizer,
        templates: TenantTemplates,
        grammars: GrammarChecker,
        model: ModelInfo,
        executor: Executor,
        settings: GatewaySettings | None = None,
        metrics: GatewayMetrics | None = None,
        spool: SettlementSpool | None = None,
        tracing: Tracing | None = None,
        is_held_elsewhere: HeldElsewhere = held_nowhere_else,
        draw: BaseDraw | None = None,
        clock: Callable[[], float] = time.monotonic,
        is_alone: bool = False,
    ) -> GatewayServices:
        """Assemble a gateway. `executor` runs blocking calls, and `close` ends the compute threads.

        `is_held_elsewhere` says whether another server can run requests for an adapter without loading it. `draw`
        divides requests between bases. `clock` returns seconds, for forecasts of first tokens and for recovery.
        If `is_alone`, no other server can use the database.

        Without a `spool`, settlements that the database rejects wait only in memory.
        """
        settings = settings if settings is not None else GatewaySettings()
        metrics = metrics if metrics is not None else GatewayMetrics()
        run = RunServices.over(
            database, engine, metrics, executor, spool, is_held_elsewhere, settings.tier_objectives, clock, is_alone
        )
        tenants = Tenants(database)
        # Each process has only one cache of tenants and one of keys, so that a change clears what requests use.
        forget = (api_keys.forget_recent, tenants.forget_recent)
        confirm = (api_keys.confirm_recent, tenants.confirm_recent)
        return GatewayServices(
            database=database,
            callers=CallerServices(
                tenants=tenants,
                api_keys=api_keys,
                resolver=ModelResolver(registry, model.served_name, draw),
                archive=ModelArchive(registry, VersionStates(database, registry), model.served_name),
                version_settings=VersionSettingsCache(
                    database,
                    settings.base_defaults,
                    settings.applies_adapter_defaults,
                    settings.base_parsers,
                    templates.is_copy,
                    settings.pooling,
                ),
                overflows=AliasOverflows(database, clock),
                cache_invalidation=CacheInvalidation(database, forget, run.database_health.note_heard, confirm),
            ),
            prompts=PromptServices(
                tokenizer=tokenizer,
                version_tokenizers=VersionTokenizers(tokenizer),
                chat_prompts=ChatPrompts(tokenizer.chat_template, templates),
                grammars=grammars,
            ),
            run=run,
            stored=StoredObjects.over(database, settings.response_key),
            engine=engine,
            model=model,
            metrics=metrics,
            settings=settings,
            executor=executor,
            compute_executor=ThreadPoolExecutor(NUM_COMPUTE_THREADS, thread_name_prefix="compute"),
            tracing=tracing,
        )

    def close(self) -> None:
        """Stop all services. Pending commits get up to CLOSE_WAIT_S. Running computations finish, and queued ones are
        dropped.
        """
        self.callers.cache_invalidation.close()
        self.run.commit.close(CLOSE_WAIT_S)
        self.run.settler.close()
        self.prompts.grammars.close()
        self.prompts.chat_prompts.close()
        self.compute_executor.shutdown(cancel_futures=True)
        if self.tracing is not None:
            self.tracing.close()

    async def call(self, function: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
        """Run a blocking database call on a thread. Raises DatabaseTrouble if the database does not answer."""
        self.run.database_health.check()
        try:
            async with asyncio.timeout(CALL_WAIT_S):
                return await call_on(self.executor, function, *args, **kwargs)
        except TimeoutError:
            raise DatabaseTrouble("the database does not answer") from None

    async def compute(self, function: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
        return await call_on(self.compute_executor, function, *args, **kwargs)

    async def compute_if_long(self, size: int, function: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
        """Call a function that parses or tokenises `size` characters.

        The call runs on the event loop if `size` is so small that it takes under a millisecond, otherwise on a thread.
        """
        if size <= MAX_TOKENISED_AT_ONCE:
            return function(*args, **kwargs)
        return await self.compute(function, *args, **kwargs)

    def trouble(self) -> str | None:
        """Why requests are refused although the engine is ready, for operators. None if there is no such reason."""
        troubles = [one for one in (self.run.database_health.trouble, self.run.settler.trouble) if one is not None]
        return "; ".join(troubles) or None

    @property
    def max_model_len(self) -> int:
        """Longest sequence that the running engine accepts, in tokens.

        The engine's pool may hold fewer tokens than the model supports.
        """
        info = self.engine.info
        return self.model.max_model_len if info is None else min(self.model.max_model_len, info.max_model_len)

    @property
    def quantization(self) -> str | None:
        """The format of the base's weights. None if they are floating-point or no engine is running."""
        info = self.engine.info
        return None if info is None else info.quantization
