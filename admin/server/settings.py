"""Settings of a server or gateway. In order of precedence: flags, `LORAMUX_*` variables, a TOML file, defaults."""

from __future__ import annotations

import os
import re
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar, cast

from pydantic import (
    BeforeValidator,
    ByteSize,
    Field,
    PrivateAttr,
    SecretStr,
    ValidationError,
    ValidationInfo,
    field_validator,
)
from pydantic_settings import (
    BaseSettings,
    InitSettingsSource,
    NoDecode,
    PydanticBaseSettingsSource,
    SettingsConfigDict,
    TomlConfigSettingsSource,
)

from loramux.adapter_store.blobs.blob_url import blob_url_forms, is_blob_url
from loramux.adapter_store.errors import PullRefused
from loramux.adapter_store.extensions import ExtensionRefused
from loramux.adapter_store.formats.version_files.answer_parsers import AUTO, problem_with_parser
from loramux.adapter_store.gguf.base_directory import is_gguf
from loramux.adapter_store.hub.hub_client import ENDPOINT as HUB_ENDPOINT
from loramux.adapter_store.pulling.model_name import ModelName, is_model_url
from loramux.adapter_store.pulling.pull_settings import MODELS, PullSettings
from loramux.adapter_store.sources.adapter_sources import added_forms, is_allowable
from loramux.admin.client.suggestions import did_you_mean
from loramux.admin.server.client_addresses import TrustedProxies
from loramux.admin.server.connection_limits import KEEP_ALIVE_S
from loramux.admin.server.data_directory import DATABASE_NAME
from loramux.admin.server.oidc_settings import OidcSettings, is_trusted_url, parse_rule
from loramux.engine.architectures.gguf_model import check_model_directory
from loramux.engine.pages.eviction import MOST_PINNED_SHARE, policy_names
from loramux.engine.protocol.errors import ModelNotSupported
from loramux.engine.tracing.spans import TraceConfig
from loramux.platform.accounts.key_authentication import KEY_AUTHENTICATION
from loramux.platform.routing.routers import HOMES, router_names
from loramux.platform.runtime_adapters.load_sources import LoadSources
from loramux.platform.service_tiers import parse_objectives

PREFIX = "LORAMUX_"
CLIENT_VARIABLES = frozenset({"LORAMUX_ADMIN_URL", "LORAMUX_CONFIG", "LORAMUX_PROFILE"})
"""Variables of the `loramux` command that are not settings of the server."""

LOCAL_CLUSTER = "local"
"""The cluster that `loramux cluster up` starts on this machine."""

Port = Annotated[int, Field(ge=0, le=65535)]
SECRETS = frozenset({"admin_key", "hf_token", "metrics_token", "oidc_client_secret", "response_key"})
FLAGS = frozenset(
    {
        "model",
        "config",
        "data_dir",
        "host",
        "port",
        "admin_host",
        "admin_port",
        "dtype",
        "quantization",
        "activations",
        "adapter_dtype",
        "speculate",
        "kv_dtype",
        "kv_host_bytes",
        "kv_disk_bytes",
        "device",
        "database_url",
        "blob_url",
        "served_name",
        "generation_config",
        "adapter_generation_config",
        "tool_call_parser",
        "reasoning_parser",
        "engine",
        "peer_address",
        "cluster",
        "data_parallel_size",
        "tensor_parallel_size",
        "devices",
        "routing",
        "reuse_port",
        "tier_objectives",
    }
)
"""Settings that are also flags of `loramux serve` or `gateway`. Secrets are not flags, because any process on a machine
can read the command lines of the others.
"""
SettingsT = TypeVar("SettingsT", bound="DataSettings")
UrlT = TypeVar("UrlT", str, str | None)

_ORIGIN = re.compile(r"[a-z][a-z0-9+.-]*://(\[[0-9a-f:.]+\]|[a-z0-9._-]+)(:[0-9]{1,5})?")
"""An origin as browsers write it (RFC 6454, section 6.2). Extensions of browsers have schemes of their own."""
_SIZE = re.compile(r"\s*(\+?[0-9]+(_[0-9]+)*|[0-9]*\.?[0-9]+\s*([A-DF-Za-df-z]|[A-Za-z]{2,})?)\s*")
"""A number of bytes, or a number with a unit other than a lone `e`, which can be the rest of an exponent."""


def _model_reference(given: Any) -> Any:
    if isinstance(given, str) and is_model_url(given):
        try:
            return ModelName.parse(given)
        except PullRefused as error:
            raise ValueError(error.message) from error
    if not isinstance(given, (str, Path, ModelName)):
        raise ValueError("it is neither a path nor the URL of a model")
    return Path(given) if isinstance(given, str) else given


def _size(given: Any) -> Any:
    # ByteSize would ignore the end of "2e+11" and read "2e" as 2 EB.
    is_number = isinstance(given, int) and not isinstance(given, bool)
    if not (is_number or (isinstance(given, str) and _SIZE.fullmatch(given))):
        raise ValueError(f"{given!r} is not a size: use a whole number of bytes, or a number with a unit such as 8GiB")
    return given


def _host_of(address: str) -> str:
    found = re.fullmatch(r"(\[[0-9A-Fa-f:.]+\]|[^\s:\[\]]{1,253}):([0-9]{1,5})", address)
    if found is None or int(found[2]) > 65535:
        raise ValueError(f"{address!r} is not HOST:PORT, with an IPv6 address in brackets")
    return found[1]


def _named_cluster(cluster: str) -> str:
    if cluster.startswith("ray://"):
        raise ValueError(
            "Ray's client, whose addresses begin with ray://, cannot stream: run the server on a machine of the "
            "cluster, and give HOST:PORT of its head"
        )
    if cluster != LOCAL_CLUSTER:
        _host_of(cluster)
    return cluster


def _plain(secret: SecretStr | None) -> SecretStr | None:
    # A variable set from a file often ends with a line break.
    text = "" if secret is None else secret.get_secret_value().strip()
    if not (text.isascii() and text.isprintable()):
        raise ValueError("it must contain only printable ASCII characters, because it is sent in a header")
    return None if secret is None else SecretStr(text)


def _trusted(url: UrlT) -> UrlT:
    if url is not None and not is_trusted_url(url):
        raise ValueError(f"{url!r} is neither an https URL nor a URL of this machine")
    return url


Size = Annotated[ByteSize, BeforeValidator(_size)]
ModelReference = Annotated[Path | ModelName, NoDecode, BeforeValidator(_model_reference)]


class SettingsError(Exception):
    """The settings cannot be used. The message has one line for each error."""


class DataSettings(BaseSettings):
    """Settings for data storage, the only settings that `loramux db` needs."""

    model_config = SettingsConfigDict(env_prefix=PREFIX, extra="ignore", frozen=True)

    config: Path | None = None
    data_dir: Path = Path("loramux-data")
    database_url: str | None = None

    @field_validator("database_url")
    @classmethod
    def _is_given(cls, database_url: str | None) -> str | None:
        # A Compose file's ${NAME:-} sets the variable even without a value.
        return database_url or None

    @property
    def is_database_embedded(self) -> bool:
        return self.database_url is None

    @property
    def resolved_database_url(self) -> str:
        return self.database_url or f"sqlite:///{self.data_dir.absolute() / DATABASE_NAME}"

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        config = cast(InitSettingsSource, init_settings).init_kwargs.get("config")
        if config is None:
            return init_settings, env_settings
        return init_settings, env_settings, TomlConfigSettingsSource(settings_cls, config)


class ModelSettings(DataSettings):
    """Settings with which models are pulled and found again."""

    model_config = SettingsConfigDict(protected_namespaces=(), use_attribute_docstrings=True)

    models_dir: Path | None = None
    """Directory of pulled base models; by default `models` in the data directory. Servers on one host can share it."""
    hf_endpoint: str = HUB_ENDPOINT
    """URL of the Hugging Face hub that `hf://` sources and models refer to. For models, `HF_ENDPOINT` is used, too."""
    hf_token: SecretStr | None = None
    """An access token for the hub, for private repositories. Read access to the allowed repositories is enough. For
    models, `HF_TOKEN` is used, too.
    """
    hf_offline: bool = False
    """Never ask the hub for models: serve only those that have been pulled. `HF_HUB_OFFLINE=1` has the same effect."""

    _is_a_plain_token = field_validator("hf_token")(_plain)
    _is_a_trusted_hub = field_validator("hf_endpoint")(_trusted)

    @property
    def pulls(self) -> PullSettings:
        """How models are pulled. Raises PullRefused if a variable of Hugging Face's tools cannot be used."""
        token = self.hf_token
        return PullSettings.choose(
            os.environ,
            data_dir=self.data_dir,
            models_dir=self.models_dir or self.data_dir / MODELS,
            endpoint=self.hf_endpoint if "hf_endpoint" in self.model_fields_set else None,
            token=None if token is None else token.get_secret_value(),
            is_offline=self.hf_offline,
        )


class ClusterSettings(DataSettings):
    """Settings that name a cluster."""

    cluster: str = LOCAL_CLUSTER
    _is_a_cluster = field_validator("cluster")(_named_cluster)


class Settings(ModelSettings):
    """All settings of `loramux serve`."""

    # docs/configuration.md describes a setting with its docstring unless tests/docs/configuration_page.py has a text
    # for it.
    model_config = SettingsConfigDict(
        env_prefix=PREFIX, extra="forbid", frozen=True, protected_namespaces=(), use_attribute_docstrings=True
    )

    model: ModelReference
    served_name: str | None = None
    generation_config: Literal["auto", "off"] = "auto"
    """`auto`: fields that a request leaves out take their defaults from the model's `generation_config.json`."""
    adapter_generation_config: Literal["auto", "off"] = "auto"
    """`auto`: the `generation_config.json` uploaded with an adapter's version takes precedence over the model's."""
    pooling: Literal["auto", "last", "mean", "cls"] = "auto"
    """How the hidden states of a prompt become its embedding: the last token's, the mean of all, or the first token's.
    `auto`: the model's `modules.json` decides, or the last token's is taken if there is none.
    """
    tool_call_parser: str = AUTO
    """How tool calls are found in answers to prompts rendered with the model's own chat template. `auto`: the template
    decides. `off`: calls are part of the text. Other values: `functiongemma`, `gemma4`, `glm45`, `harmony`,
    `hermes`, `llama3_json`, `minimax_m2`, `mistral`, `phi`, `pythonic`, `qwen3_coder`, `seed_oss` and [the parsers of
    extensions](extending.md#tool-parsers).
    """
    reasoning_parser: str = AUTO
    """How reasoning is separated from the rest of an answer to a prompt rendered with the model's own chat template.
    `auto`: the template decides. `off`: reasoning is part of the text. Other values: `gemma4`, `harmony`, `mistral`,
    `seed_oss` and `think`.
    """
    host: str = "127.0.0.1"
    port: Port = 8000
    force_include_usage: bool = False
    """Report the usage so far in each chunk of a stream, and all of it at the end, even if a request does not ask."""
    return_tokens_as_token_ids: bool = False
    """Name tokens by their ids in log-probabilities (`token_id:5`), unless a request says otherwise."""
    root_path: str = ""
    """A path prefix, such as `/llm`, with which the OpenAI listener also answers, for proxies that do not strip it."""
    admin_host: str = "127.0.0.1"
    admin_port: Port = 8001
    admin_root_path: str = ""
    """The path prefix under which a proxy publishes the admin listener, such as `/loramux`."""
    trusted_proxies: Annotated[tuple[str, ...], NoDecode] = ()
    """Comma-separated addresses and networks of proxies whose `X-Forwarded-For` and `X-Forwarded-Proto` are trusted."""
    keep_alive_s: Annotated[int, Field(ge=1, le=3600)] = KEEP_ALIVE_S
    """How long a connection stays open between requests, in seconds. Proxies must give up their idle connections
    earlier, because a request on a connection that the server is closing fails. nginx and AWS load balancers keep idle
    connections for 60 s, and Google's for 600 s.
    """
    cors_origins: Annotated[tuple[str, ...], NoDecode] = ()
    """Comma-separated origins, such as `https://app.example.com`, whose web pages can call the OpenAI API from a
    browser, or `*` for every origin. By default there are none.
    """
    max_connections: Annotated[int, Field(ge=16, le=1_000_000)] = 4096
    """Maximum connections to the OpenAI listener. The admin listener accepts up to 512 more."""
    max_connections_per_address: Annotated[int, Field(ge=1)] = 1024
    """Maximum connections per client address on each listener. For clients behind a trusted proxy, this limits
    concurrent requests instead.
    """
    admin_key: SecretStr | None = None
    key_authentication: str | None = None
    """Name of the [extension](extending.md#key-authentication) that resolves bearer tokens other than API keys of
    loramux.
    """
    metrics_token: SecretStr | None = None
    response_key: SecretStr | None = None
    """Secret of at least 32 characters that encrypts stored answers. All servers on a database need the same. Without
    it, no answers are stored.
    """
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    quantization: Literal["int8", "int4", "fp8", "int8+head", "int4+head", "fp8+head"] | None = None
    """Quantise the float weights of the model's linear layers at startup. With `+head`, also quantise the head, to
    int8. The result is kept in the data directory.
    """
    activations: Literal["int8", "fp8", "16bit"] | None = None
    """[Round the inputs](quantization.md#activations-in-8-bits) of quantised linear layers to 8 bits, which is faster
    and loses some accuracy. `int8`: on a CPU with VNNI or AVX2. `fp8`: in large steps on a GPU, for FP8 weights; this
    is the default if the checkpoint says so. `16bit`: do not.
    """
    adapter_dtype: Literal["fp8"] | None = None
    """`fp8`: store the adapters in the page pool [as FP8 codes](quantization.md#adapters-in-fp8), in half of the memory
    of bfloat16. By default, they have the dtype of the weights.
    """
    speculate: Literal["off", "text", "head", "auto"] | None = None
    """[Draft tokens](speculation.md), and verify several in one step; by default `text` on a CPU and `off` on a GPU.
    The answers are the same. `text`: from the text of each request. `head`: with the base's own head for drafts.
    `auto`: with the head if the base has one that can be used, otherwise from the text.
    """
    kv_dtype: Literal["auto", "int8"] = "auto"
    """`int8`: store the KV cache [in 8 bits](quantization.md#kv-cache-in-8-bits), so that almost twice as many tokens
    fit into the page pool as in bfloat16. `auto`: in the dtype of the weights.
    """
    device: Literal["auto", "cpu", "cuda"] = "auto"
    data_parallel_size: Annotated[int, Field(ge=1, le=64)] | None = None
    """Number of engines that this server runs, each with all of the model's weights; by default one, or as many as the
    GPUs in `devices` suffice for. On a CPU, they divide the threads. [Scaling](scaling.md#several-engines) says when to
    use several.
    """
    tensor_parallel_size: Annotated[int, Field(ge=1, le=64)] | None = None
    """Number of processes that [divide the model's linear layers](tensor-parallel.md), the page pool and the threads of
    an engine among themselves; by default one. On GPUs, each process has its own. In a Ray cluster, the number of
    processes of each engine.
    """
    devices: Annotated[tuple[int, ...], NoDecode] = ()
    """Comma-separated numbers of the GPUs that run the engines, such as `0,1`: one for each engine or, with
    `tensor_parallel_size`, for each of its processes. By default, the first GPUs are used. If CUDA_VISIBLE_DEVICES is
    set, they are positions in its list.
    """
    blob_url: str | None = None
    adapter_sources: Annotated[tuple[str, ...], NoDecode] = ()
    load_sources: Annotated[tuple[str, ...], NoDecode] = ()
    """Directories, buckets and hubs from which tenants' programs can [load adapters](runtime-adapters.md) while the
    server runs, such as `file:///srv/loras/{tenant}`, separated by commas. By default there are none.
    """
    presigned_uploads: bool = True
    sandbox: Literal["preferred", "required"] = "preferred"
    """`required`: refuse to start unless uploads, grammars and chat templates can be processed under landlock, seccomp
    and no_new_privs. Applies to the process that has the setting, and to its engines.
    """
    pool_bytes: Annotated[Size, Field(ge=1 << 20)] | None = None
    max_model_len: Annotated[int, Field(ge=1)] | None = None
    max_batch_tokens: Annotated[int, Field(ge=1)] | None = None
    max_sequences: Annotated[int, Field(ge=1)] | None = None
    run_batches: bool = True
    """Whether this process runs [batches](batches.md#a-process-for-batches). A gateway runs them only with a
    `blob_url`. Batches wait until a process runs them. The server always deletes expired files.
    """
    max_waiting_tokens: Annotated[int, Field(ge=1)] = 1 << 22
    max_waiting_s: Annotated[float, Field(gt=0, le=86400, allow_inf_nan=False)] = 300.0
    tier_objectives: str = ""
    """Longest time until the first token, by [service tier](service-tiers.md), such as
    `priority=1s,default=5s,flex=none`. A request whose first token would come later is refused with 429 or 503. By
    default, no tier has one. Servers that share requests cannot have this setting.
    """
    max_resident_adapters: Annotated[int, Field(ge=1)] = 256
    max_pinned_share: Annotated[float, Field(ge=0, le=MOST_PINNED_SHARE)] = 0.5
    eviction_policy: str = "lru"
    num_threads: Annotated[int, Field(ge=1)] | None = None
    pdl: bool = True
    """Overlap the launches of kernels (programmatic dependent launch), on GPUs of compute capability 9.0 or later."""
    fused_lora: bool = False
    """Multiply a linear layer and its adapters in one kernel in steps of up to 128 tokens, on a GPU. For bases with
    float weights. Not measured yet. The kernel multiplies each row with every adapter of the step, by 0 for the
    adapters of other rows. A weight that is not finite would reach those rows, so isolation rests on the validation,
    which refuses such weights.
    """
    disk_tier_dir: Path | None = None
    """Directory of the disk tier; by default in the data directory. Servers on one host can share a disk tier, but not
    a data directory.
    """
    disk_tier_bytes: Annotated[Size, Field(ge=0)] = ByteSize(16 << 30)
    host_tier_bytes: Annotated[Size, Field(ge=0)] = ByteSize(1 << 30)
    kv_host_bytes: Annotated[Size, Field(ge=0)] = ByteSize(0)
    """Main memory for the [cached prefixes that the pool evicts](concepts.md#evicted-prefixes-in-main-memory), in each
    engine. 0 turns it off. Not with `tensor_parallel_size`.
    """
    kv_disk_bytes: Annotated[Size, Field(ge=0)] = ByteSize(0)
    """Space in `disk_tier_dir` for the [prefixes that this memory evicts](concepts.md#evicted-prefixes-on-disk), in
    each engine. It is reserved at startup. 0 turns it off. Needs `kv_host_bytes`.
    """
    oidc_issuer: str | None = None
    oidc_client_id: str | None = None
    oidc_client_secret: SecretStr | None = None
    oidc_scopes: str = "openid profile email"
    oidc_roles_claim: str = "groups"
    oidc_roles: Annotated[tuple[str, ...], NoDecode] = ()
    oidc_redirect_url: str | None = None
    engine: Annotated[tuple[Path, ...], NoDecode] = ()
    peer_address: str | None = None
    """`HOST:PORT` at which other servers on the database reach this server's engine, over mutual TLS. Servers with this
    setting share requests. The host must be an address or name of this machine that the other servers can reach.
    """
    cluster: str | None = None
    """The Ray cluster that runs the engines: `local` for the one that `loramux cluster up` has started with this data
    directory, or `HOST:PORT` of the head of a cluster that this machine belongs to. The server then has no engine of
    its own. [Scaling](scaling.md#ray) describes such clusters.
    """
    cluster_replicas: Annotated[int, Field(ge=1, le=1000)] = 1
    """Number of engines that `loramux cluster up` starts; the smallest number, if `cluster_max_replicas` is set."""
    cluster_max_replicas: Annotated[int, Field(ge=1, le=1000)] | None = None
    """If set, the number of engines follows the number of running and waiting requests, up to this number."""
    cluster_downscale_delay_s: Annotated[float, Field(ge=1.0, le=86_400.0)] = 300.0
    """Seconds for which fewer engines must be enough before their number shrinks, if `cluster_max_replicas` is set."""
    routing: Literal["auto", "off"] = "auto"
    """`off`: run the requests that this server receives on its own engine, even if it has a `peer_address`, because
    [a router in front of the servers](scaling.md#behind-a-picker) chooses among them. Only requests of other bases
    still go to servers of these bases.
    """
    router: str = HOMES
    """How servers with several engines, `peer_address` or `cluster` choose the engine that runs a request. `homes`
    sends each adapter's requests to a few engines that hold it. Other values:
    [the routers of extensions](extending.md#routers).
    """
    reuse_port: bool = False
    """Share the OpenAI port with other gateways on this host that also set this. The kernel distributes connections."""
    spool_bytes: Annotated[Size, Field(ge=1 << 16)] = ByteSize(64 << 20)
    """Disk space for settlements that wait while the database is unavailable."""
    max_file_bytes: Annotated[Size, Field(ge=1 << 10)] = ByteSize(200 << 20)
    """Largest file that a tenant can upload for a batch."""
    event_days: Annotated[int, Field(ge=1, le=90)] = 7
    """How long [events](events.md) are kept, in days."""
    budget_event_percent: Annotated[int, Field(ge=1, le=100)] = 80
    """Share of a budget, in percent, whose use is reported as an [event](events.md), once per day or month."""
    webhook_private_targets: bool = False
    """Let [webhooks](events.md#webhooks) use http, and call private addresses and this machine. Tenants choose the
    targets, so this is safe only if they may call all that the server can reach.
    """
    log_format: Literal["console", "json"] = "console"
    log_answers: bool = False
    traces: Literal["off", "file", "otlp"] = "off"
    traces_target: str | None = None
    """For `file`, a path (default: `traces.jsonl` in the data directory). For `otlp`, an OTLP/HTTP URL (default: the
    OTEL_EXPORTER_OTLP_* variables)."""
    traces_share: Annotated[float, Field(ge=0, le=1)] = 1.0
    """Share of requests that are traced. A request that continues a client's trace follows the client's sampling
    decision.
    """
    traces_of_clients: Literal["ignore", "link", "parent"] = "link"
    """How a client's `traceparent` is used. With `parent`, clients decide which requests are traced, so they must be
    trusted.
    """
    drain_s: Annotated[float, Field(ge=0, le=3600)] = 30.0
    engine_step_timeout_s: Annotated[float, Field(ge=1, le=3600)] = 60.0
    _model_source: str | None = PrivateAttr(default=None)

    @field_validator("model")
    @classmethod
    def _is_a_model_directory(cls, model: Path | ModelName) -> Path | ModelName:
        if isinstance(model, ModelName):
            return model
        if is_gguf(model):
            if not model.is_file():
                raise ValueError(f"there is no file {model}")
            return Path(os.path.abspath(model))
        try:
            check_model_directory(model)
        except ModelNotSupported as error:
            raise ValueError(str(error)) from None
        # Do not resolve the path. A symbolic link's own name makes a better served name than its
        # target's.
        return Path(os.path.abspath(model))

    @field_validator("served_name")
    @classmethod
    def _is_a_model_name(cls, served_name: str | None) -> str | None:
        if served_name is not None and not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._/-]{0,199}", served_name):
            raise ValueError(f"{served_name!r} is not a model name: use letters, digits, '.', '_', '-' and '/'")
        return served_name

    @field_validator("tool_call_parser", "reasoning_parser")
    @classmethod
    def _is_a_parser(cls, name: str, info: ValidationInfo) -> str:
        problem = problem_with_parser(str(info.field_name), name)
        if problem is not None:
            raise ValueError(problem)
        return name

    @field_validator("root_path", "admin_root_path")
    @classmethod
    def _is_a_path(cls, root_path: str) -> str:
        root_path = root_path.rstrip("/")
        if root_path and not re.fullmatch(r"(/[A-Za-z0-9._~-]+)+", root_path):
            raise ValueError(f"{root_path!r} is not a valid path: use one such as /loramux")
        return root_path

    _is_plain = field_validator("admin_key", "metrics_token", "response_key")(_plain)

    @field_validator("admin_key", "metrics_token", "response_key")
    @classmethod
    def _is_long_enough(cls, secret: SecretStr | None, info: ValidationInfo) -> SecretStr | None:
        what, least = ("token", 16) if info.field_name == "metrics_token" else ("key", 32)
        if secret is not None and len(secret.get_secret_value()) < least:
            raise ValueError(f"a {what} must have at least {least} characters")
        return secret

    @field_validator("database_url")
    @classmethod
    def _is_a_database_url(cls, given: str | None) -> str | None:
        if given is not None:
            # A server with the embedded database starts its engine before it imports SQLAlchemy.
            from loramux.migrations.database import DatabaseError, check_url

            try:
                check_url(given)
            except DatabaseError as error:
                raise ValueError(str(error)) from None
        return given

    @field_validator("blob_url")
    @classmethod
    def _is_a_blob_url(cls, blob_url: str | None) -> str | None:
        # As with `database_url`, an empty value is none.
        if blob_url and not is_blob_url(blob_url):
            raise ValueError(f"{blob_url!r} is not a blob store's URL: use {blob_url_forms()}")
        return blob_url or None

    @field_validator("eviction_policy")
    @classmethod
    def _is_a_policy(cls, name: str) -> str:
        return _chosen(name, policy_names())

    @field_validator("tier_objectives")
    @classmethod
    def _are_objectives(cls, objectives: str) -> str:
        parse_objectives(objectives)
        return objectives

    @field_validator("key_authentication")
    @classmethod
    def _is_a_key_authentication(cls, name: str | None) -> str | None:
        return None if name is None else _chosen(name, KEY_AUTHENTICATION.names)

    @field_validator("router")
    @classmethod
    def _is_a_router(cls, name: str) -> str:
        return _chosen(name, router_names())

    @field_validator("devices", mode="before")
    @classmethod
    def _split_numbers(cls, devices: Any) -> Any:
        parts = devices.split(",") if isinstance(devices, str) else devices
        numbers = [str(part).strip() for part in parts] if isinstance(parts, list | tuple) else [str(parts)]
        if not all(re.fullmatch(r"[0-9]{1,4}", number) for number in numbers):
            raise ValueError("it should be numbers of GPUs with commas between them, such as 0,1")
        return [int(number) for number in numbers]

    @field_validator("devices")
    @classmethod
    def _are_different(cls, devices: tuple[int, ...], info: ValidationInfo) -> tuple[int, ...]:
        twice = [device for device in devices if devices.count(device) > 1]
        if twice:
            raise ValueError(f"a GPU cannot be used twice, but {twice[0]} is named twice")
        size, num_workers = info.data.get("data_parallel_size"), info.data.get("tensor_parallel_size") or 1
        num_engines = size or max(1, len(devices) // num_workers)
        if devices and num_engines * num_workers != len(devices):
            engines = f"{num_engines} engine{'s' * (num_engines > 1)}"
            workers = f" of {num_workers} workers" if num_workers > 1 else ""
            needed = f"need{'s' * (num_engines == 1)} {num_engines * num_workers}"
            raise ValueError(
                f"it names {len(devices)} GPU{'s' * (len(devices) > 1)}, but {engines}{workers} {needed}: name as many"
            )
        if devices and info.data.get("device") == "cpu":
            raise ValueError("it names GPUs, but device is cpu: remove one of them")
        return devices

    @field_validator("engine")
    @classmethod
    def _are_sockets(cls, sockets: tuple[Path, ...]) -> tuple[Path, ...]:
        if len(set(sockets)) < len(sockets):
            raise ValueError("it names a socket twice")
        return sockets

    @field_validator("cluster")
    @classmethod
    def _is_a_cluster(cls, cluster: str | None, info: ValidationInfo) -> str | None:
        if cluster is None:
            return None
        if info.data.get("peer_address") is not None:
            raise ValueError("a server whose engines run in a cluster has no engine to share: remove peer_address")
        for name in ("data_parallel_size", "devices"):
            if info.data.get(name):
                raise ValueError(f"a server whose engines run in a cluster starts no engine itself: remove {name}")
        if cluster != LOCAL_CLUSTER and info.data.get("blob_url") is None:
            raise ValueError("the engines of a cluster need a blob store that they can reach: set --blob-url, too")
        return _named_cluster(cluster)

    @field_validator("routing")
    @classmethod
    def _has_an_engine(cls, routing: str, info: ValidationInfo) -> str:
        if routing == "off" and info.data.get("cluster") is not None:
            raise ValueError("a server whose engines run in a cluster has no engine of its own: remove routing")
        return routing

    @field_validator("cluster_max_replicas")
    @classmethod
    def _is_enough(cls, most: int | None, info: ValidationInfo) -> int | None:
        least = info.data.get("cluster_replicas", 1)
        if most is not None and most < least:
            raise ValueError(f"it is less than cluster_replicas ({least})")
        return most

    @field_validator("peer_address")
    @classmethod
    def _is_reachable(cls, address: str | None, info: ValidationInfo) -> str | None:
        if address is None:
            return None
        if _host_of(address) in ("0.0.0.0", "[::]"):  # noqa: S104 - compared, not bound
            raise ValueError("other servers need an address at which they can reach this one")
        if info.data.get("tier_objectives"):
            raise ValueError("the load of servers that share requests is not forecast: remove tier_objectives")
        return address

    @field_validator("oidc_roles")
    @classmethod
    def _are_roles(cls, rules: tuple[str, ...]) -> tuple[str, ...]:
        for rule in rules:
            parse_rule(rule)
        return rules

    _is_trusted = field_validator("oidc_issuer", "oidc_redirect_url")(_trusted)

    @field_validator("oidc_client_id")
    @classmethod
    def _has_a_provider(cls, client_id: str | None, info: ValidationInfo) -> str | None:
        if client_id is not None and info.data.get("oidc_issuer") is None:
            raise ValueError("single sign-on also requires oidc_issuer")
        return client_id

    @field_validator(
        *("adapter_sources", "cors_origins", "engine", "load_sources", "oidc_roles", "trusted_proxies"),
        mode="before",
    )
    @classmethod
    def _split(cls, sources: Any) -> Any:
        """Split a comma-separated string or path. A TOML array is already a list."""
        if not isinstance(sources, str | Path):
            return sources
        return [source.strip() for source in str(sources).split(",") if source.strip()]

    @field_validator("trusted_proxies")
    @classmethod
    def _are_networks(cls, proxies: tuple[str, ...]) -> tuple[str, ...]:
        try:
            TrustedProxies(proxies)
        except ValueError as error:
            raise ValueError(f"{error}; use addresses and networks such as 127.0.0.1 and 10.0.0.0/8") from None
        return proxies

    @field_validator("cors_origins")
    @classmethod
    def _are_origins(cls, origins: tuple[str, ...]) -> tuple[str, ...]:
        for origin in origins:
            if origin != "*" and not _ORIGIN.fullmatch(origin):
                raise ValueError(f"{origin!r} is not an origin: use SCHEME://HOST or SCHEME://HOST:PORT, in lower case")
        return origins

    @field_validator("adapter_sources")
    @classmethod
    def _are_sources(cls, sources: tuple[str, ...]) -> tuple[str, ...]:
        for source in sources:
            if not is_allowable(source):
                forms = (
                    "s3://BUCKET, s3://BUCKET/PREFIX, file:///DIRECTORY, hf://OWNER",
                    *added_forms(),
                    "hf://OWNER/NAME",
                )
                raise ValueError(f"{source!r} is not a source of adapters: use {', '.join(forms[:-1])} or {forms[-1]}")
        return sources

    @field_validator("load_sources")
    @classmethod
    def _are_load_sources(cls, prefixes: tuple[str, ...]) -> tuple[str, ...]:
        LoadSources(prefixes)
        return prefixes

    @property
    def model_dir(self) -> Path:
        """The model's directory or GGUF file. Only for settings in which a path has taken the place of a URL."""
        assert isinstance(self.model, Path)
        return self.model

    @property
    def model_source(self) -> str | None:
        """The name with the commit under which the model was pulled, or None if it has been given by a path."""
        return self._model_source

    def with_pulled_model(self, path: Path, source: str) -> Settings:
        """Return settings in which the path has the place of the URL. The served name stays."""
        local = self.model_copy(update={"model": path, "served_name": self.resolved_served_name})
        local._model_source = source
        return local

    @property
    def resolved_served_name(self) -> str:
        return self.served_name or self.model.name

    @property
    def oidc(self) -> OidcSettings | None:
        if self.oidc_issuer is None or self.oidc_client_id is None:
            return None
        secret = self.oidc_client_secret
        return OidcSettings(
            issuer=self.oidc_issuer,
            client_id=self.oidc_client_id,
            client_secret=None if secret is None else secret.get_secret_value(),
            scopes=self.oidc_scopes,
            roles_claim=self.oidc_roles_claim,
            rules=tuple(parse_rule(rule) for rule in self.oidc_roles),
            redirect_url=self.oidc_redirect_url,
        )

    @property
    def trace_config(self) -> TraceConfig | None:
        if self.traces == "off":
            return None
        default = str(self.data_dir.absolute() / "traces.jsonl") if self.traces == "file" else None
        return TraceConfig(exporter=self.traces, target=self.traces_target or default)

    @property
    def resolved_blob_url(self) -> str:
        return self.blob_url or f"file://{self.data_dir.absolute() / 'blobs'}"


def load_settings(kind: type[SettingsT], overrides: Mapping[str, Any]) -> SettingsT:
    """Read the settings from all sources. Raises SettingsError, which lists all errors. Overrides that are None are
    ignored.
    """
    given = {name: value for name, value in overrides.items() if value is not None}
    if "config" not in given and os.environ.get("LORAMUX_CONFIG"):
        given["config"] = Path(os.environ["LORAMUX_CONFIG"])
    _check_config_file(given.get("config"))
    faults = list(_unknown_variables(os.environ)) if kind is Settings else []
    try:
        settings = kind(**given)
    except ExtensionRefused as error:
        raise SettingsError(str(error)) from error
    except ValidationError as error:
        faults += [_sentence(fault) for fault in error.errors(include_url=False)]
    if faults:
        raise SettingsError("\n".join(faults))
    return settings


def _chosen(name: str, names: Sequence[str]) -> str:
    if not names:
        raise ValueError(f"there is no {name!r}, because no extension of this kind is installed")
    if name not in names:
        raise ValueError(f"{name!r} is not one of {', '.join(names)}")
    return name


def _check_config_file(config: Path | None) -> None:
    if config is None:
        return
    try:
        tomllib.loads(config.read_text(encoding="utf-8"))
    except OSError as error:
        raise SettingsError(f"the configuration file {config} cannot be read: {error.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise SettingsError(f"the configuration file {config} is not TOML: {error}") from None


def _unknown_variables(variables: Iterable[str]) -> Iterable[str]:
    known = {f"{PREFIX}{name.upper()}" for name in Settings.model_fields} | CLIENT_VARIABLES
    for variable in sorted(variables):
        if variable.startswith(PREFIX) and variable not in known:
            yield f"the variable {variable} is not a setting{did_you_mean(variable, known)}"


def _expected(fault: Any) -> str:
    if fault["type"].startswith("byte_size"):
        return "a size, such as 8GiB or 500MB"
    # Pydantic goes on with what its parser could not do.
    return str(fault["msg"].removeprefix("Input should be ").partition(", unable to ")[0])


def _sentence(fault: Any) -> str:
    name = ".".join(str(part) for part in fault["loc"])
    flag = f"--{name.replace('_', '-')}, " if name in FLAGS else ""
    places = f"{flag}{PREFIX}{name.upper()} or {name} in the configuration file"
    if fault["type"] == "missing":
        return f"the setting {name} is missing: specify {places}"
    if fault["type"] == "extra_forbidden":
        return f"the configuration file has an unknown setting {name}{did_you_mean(name, Settings.model_fields)}"
    if fault["type"] == "value_error":
        reason = fault["msg"].removeprefix("Value error, ")
    else:
        shown = "" if name in SECRETS else f", not {fault['input']!r}"
        reason = f"it should be {_expected(fault)}{shown}"
    return f"the setting {name} is invalid: {reason}; change {places}"
