from __future__ import annotations

import types
import typing
from typing import Any, Literal

from pydantic import ByteSize, SecretStr
from pydantic_core import PydanticUndefined

from loramux.admin.server.settings import FLAGS, PREFIX, SECRETS, Settings
from loramux.engine.loop.config import DEFAULT_BATCH_TOKENS, DEFAULT_SEQUENCES
from loramux.engine.pages.eviction import MOST_PINNED_SHARE

HEAD = """# Configuration

`make docs` generates this page from the settings, and a test checks that it is current.

A setting is read from its flag, then from its variable, then from the TOML file given by `--config` (or
`LORAMUX_CONFIG`), where its key is the setting's name. The server does not start with an unknown setting or variable,
or with a wrong value. It reports all errors together and suggests corrections. Sizes can be written as `8GiB` or
`500MB`. Secrets have no flag, because every process on a machine can read the command lines of the others.

```toml
# loramux serve --config loramux.toml
model = "/models/Llama-3.2-1B-Instruct"
data_dir = "/var/lib/loramux"
host = "127.0.0.1"
database_url = "postgresql://loramux@db.internal/loramux"
blob_url = "s3://example-adapters/production"
trusted_proxies = ["127.0.0.1"]
log_format = "json"
sandbox = "required"
max_resident_adapters = 1024
disk_tier_bytes = "200GiB"
```

In the file, a list is a TOML array or a comma-separated string. The file can also contain secrets. If it does, or if
`database_url` contains a password, give the file mode 600. [Production](production.md#settings-and-secrets) keeps
secrets in the environment.

| setting | variable and flag | kind | default | what it does |
|---|---|---|---|---|
"""

TAIL = """
The command line also reads `LORAMUX_ADMIN_URL`, `LORAMUX_ADMIN_KEY` and `LORAMUX_PROFILE`. It stores profiles in
`$XDG_CONFIG_HOME/loramux/config.toml` (by default `~/.config/loramux/config.toml`), readable by its owner only. S3 and
its credentials are configured as in other AWS programs: `AWS_ENDPOINT_URL`, `AWS_ACCESS_KEY_ID`,
`AWS_SECRET_ACCESS_KEY`, `AWS_DEFAULT_REGION`, a profile, or the machine's role.
"""

MEANINGS = {
    "config": "The TOML file with settings.",
    "data_dir": "Directory for the embedded database and blobs, scratch space, the disk tier, pulled models and "
    "compiled GPU programs; each server needs its own.",
    "database_url": "`postgresql://USER@HOST/NAME` or `sqlite:///FILE`; by default SQLite in the data directory.",
    "model": "Directory of the base model, as written by Hugging Face's `save_pretrained`, a [GGUF file](gguf.md), or "
    "the [name](pulling.md) of either on a hub or in a bucket.",
    "served_name": "The base model's name in the API; by default the last part of `model`.",
    "host": "Address on which the OpenAI API listens.",
    "port": "Port of the OpenAI API; 0 selects a free port.",
    "admin_host": "Address on which the admin API, the console and `/metrics` listen. Keep it off the internet.",
    "admin_port": "Port of the admin API, the console and `/metrics`; 0 selects a free port.",
    "admin_key": "A platform administrator's key of 32 characters or more, never stored. If it is not set, the first "
    "start creates a key and prints it once.",
    "metrics_token": "Bearer token for `/metrics`, 16 characters or more; required behind a proxy, or if the admin "
    "listener is not on loopback.",
    "oidc_issuer": "Issuer URL of the OpenID provider for signing in to the console: see "
    "[single sign-on](single-sign-on.md).",
    "oidc_client_id": "Client ID of this server at the provider.",
    "oidc_client_secret": "Client secret; without one, the server is a public client, protected by PKCE alone.",
    "oidc_scopes": "Scopes requested from the provider.",
    "oidc_roles_claim": "Claim of the ID token or of `userinfo` that holds a person's groups.",
    "oidc_roles": "Rules `GROUP=SCOPE` or `GROUP=SCOPE@TENANT`, separated by commas; the first matching rule decides.",
    "oidc_redirect_url": "URL to which the provider redirects browsers; by default derived from the address that the "
    "browser used.",
    "log_format": "`console` for text, `json` for machines: see [traces and logs](traces-and-logs.md).",
    "log_answers": "Whether to log a line for each answered request to the OpenAI API.",
    "traces": "Whether spans of requests go to a file, to a collector over OTLP/HTTP, or nowhere.",
    "traces_target": "File or URL for spans; by default `traces.jsonl` in the data directory, or the URL in "
    "`OTEL_EXPORTER_OTLP_*`.",
    "traces_share": "Share of requests that are traced, from 0 to 1.",
    "traces_of_clients": "Whether to ignore a client's `traceparent`, link to it, or continue it as the parent of the "
    "server's trace.",
    "dtype": "Dtype of weights and arithmetic; `auto` uses the dtype in the model's `config.json`. There, "
    "[float16](quantization.md#models-in-float16) means float32 on a CPU and bfloat16 on a GPU.",
    "device": "Device of the engines; `auto` uses the first NVIDIA GPUs, one for each engine, if they have compute "
    "capability 8.0 or later.",
    "blob_url": "Store for adapter files: `file://DIR`, `s3://BUCKET/PREFIX`, or the URL of "
    "[an extension](extending.md#blob-stores); by default in the data directory.",
    "adapter_sources": "Buckets, directories, and owners or repositories of a Hugging Face hub, from which an "
    "operator can register adapters, separated by commas: see "
    "[Adapters](adapters.md#adapters-that-the-server-reads-itself). "
    "[Extensions](extending.md#adapter-sources) add other sources.",
    "presigned_uploads": "Whether clients upload files to the S3 bucket directly.",
    "pool_bytes": "Memory of each engine's pool, shared by adapters and KV cache; by default the memory that the model "
    "leaves free on a GPU, or 1 GiB on a CPU.",
    "max_model_len": "Maximum number of tokens in a prompt and its answer; by default as many as the model and the "
    "pool allow.",
    "max_batch_tokens": "Maximum number of tokens in one step, at least `max_sequences`; by default "
    f"{DEFAULT_BATCH_TOKENS['cpu']:,} on a CPU and {DEFAULT_BATCH_TOKENS['cuda']:,} on a GPU.",
    "max_sequences": "Maximum number of sequences in one step; by default "
    f"{DEFAULT_SEQUENCES['cpu']} on a CPU and {DEFAULT_SEQUENCES['cuda']} on a GPU.",
    "max_waiting_tokens": "Maximum number of tokens of all waiting requests: their prompts and the tokens reserved for "
    "their answers. Beyond it, requests are refused with 503 `overloaded`.",
    "max_waiting_s": "Longest time that a request waits for its first step, in seconds. After that, it is refused with "
    "503 `overloaded`.",
    "max_resident_adapters": "Maximum number of adapters in the pool.",
    "max_pinned_share": f"Largest share of the pool that pinned adapters can take, from 0 to {MOST_PINNED_SHARE}.",
    "eviction_policy": "Order in which idle pages are evicted: `lru`, `greedy_dual`, or "
    "[an extension's](extending.md#eviction-policies).",
    "num_threads": "Number of engine threads on a CPU, of all engines together; by default one per core, or as many "
    "as the CPU limit of the container allows.",
    "disk_tier_bytes": "Largest size of the disk tier.",
    "host_tier_bytes": "Largest amount of main memory for packed adapters, in each engine. If it is less than 512 MiB, "
    "adapters that are being loaded can take up to 512 MiB.",
    "engine": "Socket of a running server's engine, or of each of its engines, separated by commas, as the server "
    "prints them; for `loramux gateway` only.",
    "reuse_port": "Share `port` with other gateways on this host; each of them needs this setting.",
    "spool_bytes": "Maximum disk space for settlements that wait while the database is unavailable.",
    "drain_s": "Time that running requests have to finish after the first Ctrl-C or SIGTERM, in seconds.",
    "engine_step_timeout_s": "Longest duration of a step, in seconds; an engine that exceeds it is considered hung and "
    "restarted.",
}


def configuration_page() -> str:
    rows = []
    for name, field in Settings.model_fields.items():
        flag = f"<br>`--{name.replace('_', '-')}`" if name in FLAGS and name not in SECRETS else ""
        meaning = MEANINGS.get(name) or " ".join((field.description or "").split())
        rows.append(
            f"| `{name}` | `{PREFIX}{name.upper()}`{flag} | {_kind(field.annotation)} | {_default(field)} | {meaning} |"
        )
    return HEAD + "\n".join(rows) + "\n" + TAIL


def _default(field: Any) -> str:
    if field.default is PydanticUndefined:
        return "required"
    if field.default is None:
        return ""
    if isinstance(field.default, ByteSize):
        return f"`{field.default.human_readable(separator='').replace('.0', '')}`"
    if field.default in ((), ""):
        return "none"
    return f"`{str(field.default).lower() if isinstance(field.default, bool) else field.default}`"


def _kind(annotation: Any) -> str:
    origin = typing.get_origin(annotation)
    if origin in (typing.Union, types.UnionType):
        return _kind(next(inner for inner in typing.get_args(annotation) if inner is not type(None)))
    if origin is typing.Annotated:
        return _kind(typing.get_args(annotation)[0])
    if origin is Literal:
        return ", ".join(f"`{value}`" for value in typing.get_args(annotation))
    if origin is tuple:
        return "list"
    names = {bool: "`true`, `false`", int: "integer", float: "number", ByteSize: "size", SecretStr: "secret"}
    return names.get(annotation, "text" if annotation is str else "path")
