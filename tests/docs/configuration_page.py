"""`docs/configuration.md`, from the settings themselves."""

from __future__ import annotations

import types
import typing
from typing import Any, Literal

from pydantic import ByteSize, SecretStr
from pydantic_core import PydanticUndefined

from loramux.admin.server.settings import FLAGS, PREFIX, SECRETS, Settings

HEAD = """# Configuration

Written by `make docs` from the settings themselves; a test compares them.

A setting is read from its flag, then from its variable, then from the TOML file of `--config` (or `LORAMUX_CONFIG`),
where it stands under its own name. A setting or variable that is not known stops the start, and so does a wrong value:
all faults are told at once, with what was probably meant. Sizes may be written `8GiB` or `500MB`. Secrets have no flag,
since every process of a machine may read a command line.

```toml
# loramux serve --config loramux.toml
model = "/models/Llama-3.2-1B-Instruct"
data_dir = "/var/lib/loramux"
host = "0.0.0.0"
database_url = "postgresql://loramux@db.internal/loramux"
blob_url = "s3://adapters/production"
max_resident_adapters = 1024
disk_tier_bytes = "200GiB"
```

| setting | variable and flag | kind | default | what it does |
|---|---|---|---|---|
"""

TAIL = """
The command line reads `LORAMUX_ADMIN_URL`, `LORAMUX_ADMIN_KEY` and `LORAMUX_PROFILE` as well, and keeps profiles in
`$XDG_CONFIG_HOME/loramux/config.toml` (by default `~/.config/loramux/config.toml`), readable by its owner alone.
S3 and its credentials are found as every AWS program finds them: `AWS_ENDPOINT_URL`, `AWS_ACCESS_KEY_ID`,
`AWS_SECRET_ACCESS_KEY`, `AWS_DEFAULT_REGION`, a profile, or the machine's role.
"""

MEANINGS = {
    "config": "The TOML file itself.",
    "data_dir": "Everything of this server: the embedded database and blobs, scratch space, the disk tier, "
    "a GPU's compiled programs.",
    "database_url": "`postgresql://USER@HOST/NAME` or `sqlite:///FILE`; by default SQLite in the data directory.",
    "model": "Directory of the base model, as Hugging Face's `save_pretrained` writes it.",
    "served_name": "The base model's name in the API; by default the directory's.",
    "host": "Where the OpenAI API listens.",
    "port": "Its port; 0 takes a free one.",
    "admin_host": "Where admin, console and `/metrics` listen. Keep it off the internet.",
    "admin_port": "Its port; 0 takes a free one.",
    "admin_key": "A platform administrator's key of 32 characters or more, never stored. Without one the first start "
    "makes one and prints it once.",
    "metrics_token": "What `/metrics` asks for as a bearer token (16 characters or more); needed where the admin "
    "listener is not on loopback, or behind a proxy.",
    "oidc_issuer": "The OpenID provider that people sign in to the console through, by its issuer URL: see "
    "[single sign-on](single-sign-on.md).",
    "oidc_client_id": "The name that the provider knows this server by.",
    "oidc_client_secret": "Its secret; without one it is a public client, which PKCE alone protects.",
    "oidc_scopes": "What the provider is asked for.",
    "oidc_roles_claim": "The claim, of the ID token or of userinfo, that holds a person's groups.",
    "oidc_roles": "`GROUP=SCOPE` or `GROUP=SCOPE@TENANT`, separated by commas; the first that fits decides.",
    "oidc_redirect_url": "Where the provider sends browsers back to; by default where they came from.",
    "log_format": "`json` for machines: see [traces and logs](traces-and-logs.md).",
    "log_answers": "Whether each answer of the OpenAI API is a line of the log.",
    "traces": "Where spans of requests go: to a file, to a collector by OTLP/HTTP, or nowhere.",
    "traces_target": "The file or URL; by default `traces.jsonl` in the data directory, or what `OTEL_EXPORTER_OTLP_*` "
    "say.",
    "traces_share": "The part of the requests that is traced, from 0 to 1.",
    "traces_of_clients": "What a client's `traceparent` does: nothing, a link, or our trace goes on below it.",
    "dtype": "Of weights and arithmetic; `auto` is the one in the model's `config.json`.",
    "device": "`auto` takes an NVIDIA GPU of compute capability 8.0 or later where there is one.",
    "blob_url": "Where adapters' files are kept: `file://DIR` or `s3://BUCKET/PREFIX`; by default in the data "
    "directory.",
    "adapter_sources": "Buckets that an operator may register adapters from, separated by commas.",
    "presigned_uploads": "Whether clients put files into the S3 bucket themselves.",
    "pool_bytes": "Memory of the pool that adapters and KV cache share; by default what the model leaves on a GPU, a "
    "part of the memory on a CPU.",
    "max_model_len": "Longest prompt and answer together; by default what the model and the pool allow.",
    "max_batch_tokens": "Tokens of one step at most.",
    "max_sequences": "Sequences of one step at most.",
    "max_waiting_tokens": "Tokens of prompts that may wait; more are refused with 503 `overloaded`.",
    "max_waiting_s": "How long a request may wait for its turn.",
    "max_resident_adapters": "Adapters in the pool at most.",
    "max_pinned_share": "Part of the pool that pinned adapters may take.",
    "eviction_policy": "Which idle page goes first.",
    "num_threads": "Threads of the engine on a CPU; by default one a core.",
    "disk_tier_bytes": "Its size at most.",
    "host_tier_bytes": "Host memory for packed adapters at most.",
    "engine": "The socket of a running server's engine, which the server prints; for `loramux gateway` only.",
    "reuse_port": "Share `port` with other gateways of this host, each of which must say so.",
    "spool_bytes": "How much may wait on the disk to be settled while the database is away.",
    "drain_s": "How long running requests may take to end after the first Ctrl-C or SIGTERM.",
    "engine_step_timeout_s": "A step that takes longer is a hung engine, which is restarted.",
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
