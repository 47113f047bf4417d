from __future__ import annotations

import tempfile
from collections import defaultdict
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from loramux.admin.serving.app import ADMIN_DOCUMENT, create_admin_app
from loramux.platform.listener.app import OPENAI_DOCUMENT
from loramux.platform.requests.openapi import operations
from tests.admin.admin_side import TARGET, open_admin_side
from tests.admin.openai_side import open_services, whole_app
from tests.demo_base import DEMO_BASE

MAX_SHOWN = 2
"""Maximum number of forms of a body whose fields are listed. Others are named by the calls that take them."""

_TABLE = ("| call | what | takes | refuses with |", "|---|---|---|---|")

HEAD = """# Endpoints

`make docs` generates this page from the OpenAPI documents of both listeners, and a test checks that it is current.
`GET /openapi.json` on each listener returns the full document, with every schema, example and error, for any key that
the listener accepts.

## The OpenAI API

The OpenAI API is on the listener of `--port`. Calls need `Authorization: Bearer KEY` with a tenant's key.
[Writing a client](clients.md) describes how to use the API.
"""

ADMIN_HEAD = """## The admin API

The admin API is on the listener of `--admin-port`. Calls need `Authorization: Bearer KEY`. A tenant's key sees the same
paths filtered to its tenant; objects of other tenants get the same 404 as objects that do not exist.

- Lists return `{object: "list", data, first_id, last_id, has_more}`, newest first, and accept `limit`, `after` and
  `before`.
- A POST with an `Idempotency-Key` takes effect once and gets the same answer for 24 hours. A secret is never returned
  twice, and an answer with presigned requests is kept only while they are valid.
- A PATCH must have an `If-Match` with the `ETag` from the last read, or `*` to overwrite any state. A missing
  `If-Match` gets 428, and an outdated one gets 412. Calls that set, roll back or delete an alias honour it, too.
- Times are seconds since 1970. Errors are `{"error": {"message", "type", "param", "code"}}`, with an `x-request-id`.

### Bad input

A refused call changes nothing. Two simultaneous pushes of the same files both get 202, with the same version.

| call | status | code |
|---|---|---|
| a name that is a path, such as `../../etc` | 400 | `invalid_slug` |
| a name with a look-alike letter, such as a Cyrillic `а` | 400 | `invalid_name` |
| text with bidirectional or other control characters | 400 | `invalid_value` |
| an unknown field | 400 | `unknown_parameter` |
| a field of the wrong type | 400 | `invalid_type` |
| a duplicate field, or a body that is not JSON | 400 | `invalid_json` |
| a body larger than 64 KiB | 413 | `payload_too_large` |
| a body that does not arrive completely | 400 | `body_timeout` |
| a PATCH without `If-Match` | 428 | `precondition_required` |
| a change with an outdated `If-Match` | 412 | `precondition_failed` |
| an `Idempotency-Key` reused with another body | 422 | `idempotency_key_reused` |
| revoking the platform's last administrator key | 409 | `last_admin_key` |
| removing the administrator's scope from that key | 409 | `last_admin_key` |
| deleting a tenant that has adapters, unrevoked keys, prices or usage | 409 | `tenant_in_use` |
| deleting an adapter that has versions | 409 | `adapter_in_use` |
| archiving a version that an alias names | 409 | `version_in_use` |
| forgetting a base that a server serves | 409 | `base_in_use` |
| dividing requests between bases with different tokenizers | 409 | `bases_differ` |
"""


HEALTH = """`GET /health/live` and `GET /health/ready` on both listeners are for load balancers and need no key.
`GET /health` and `GET /ping` are other names of `GET /health/ready`. On the admin listener, the answer of a server with
[several engines](scaling.md#several-engines) says which of them are ready (`engines`). One is enough.
"""


def endpoints_page() -> str:
    """Build a server's services in a temporary directory to get the routes and schemas."""
    with (
        tempfile.TemporaryDirectory() as directory,
        open_admin_side(Path(directory), TARGET) as side,
        open_services(side.services.database, DEMO_BASE) as services,
    ):
        admin = ADMIN_DOCUMENT.of(create_admin_app(side.services))
        openai = OPENAI_DOCUMENT.of(whole_app(services, side))
    sections: dict[str, list[str]] = defaultdict(list)
    homes = _homes(openai)
    for path, operation, method in _guarded(admin, ADMIN_DOCUMENT.public):
        tag = (operation.get("tags") or [path.removeprefix("/admin/v1/").partition("/")[0]])[0]
        sections[tag.replace("_", " ")].append(_row(path, method, operation, admin["components"]["schemas"]))
    parts = [HEAD, *_TABLE]
    for path, operation, method in _guarded(openai, OPENAI_DOCUMENT.public):
        parts.append(_row(path, method, operation, openai["components"]["schemas"], homes))
    parts += ["", HEALTH, ADMIN_HEAD]
    for tag in sorted(sections):
        parts += [f"### {tag}\n", *_TABLE, *sections[tag], ""]
    return "\n".join(parts)


def _guarded(document: dict[str, Any], public: frozenset[str]) -> Iterator[tuple[str, dict[str, Any], str]]:
    return (found for found in operations(document) if found[0] not in public)


def _homes(document: dict[str, Any]) -> dict[str, str]:
    """Return the first call that takes each body, by the reference to its schema."""
    homes: dict[str, str] = {}
    for path, operation, method in operations(document):
        forms = _forms(operation)
        for form in forms if len(forms) <= MAX_SHOWN else ():
            homes.setdefault(form.get("$ref", ""), f"`{method.upper()} {path}`")
    return homes


def _forms(operation: dict[str, Any]) -> list[dict[str, Any]]:
    schema = operation.get("requestBody", {}).get("content", {}).get("application/json", {}).get("schema", {})
    forms: list[dict[str, Any]] = schema.get("anyOf", [schema])
    return forms


def _row(
    path: str, method: str, operation: dict[str, Any], schemas: dict[str, Any], homes: Mapping[str, str] | None = None
) -> str:
    taken = [_shown(one) for one in operation.get("parameters", []) if one["in"] == "query"]
    taken += [f"`{one['name']}` header" for one in operation.get("parameters", []) if one["name"] == "If-Match"]
    body = operation.get("requestBody", {}).get("content", {})
    if homes is not None and len(forms := _forms(operation)) > MAX_SHOWN:
        calls = list(dict.fromkeys(homes[form["$ref"]] for form in forms))
        taken.append(f"the JSON of {', '.join(calls[:-1])} or {calls[-1]}")
    elif "application/json" in body:
        taken.append(_body(body["application/json"]["schema"], schemas))
    elif "multipart/form-data" in body:
        taken.append("a `multipart/form-data` form")
    elif body:
        taken.append("the raw bytes")
    refused = " ".join(sorted(status for status in operation["responses"] if status.isdigit() and int(status) >= 400))
    summary = operation["summary"].replace("|", "\\|")
    return f"| `{method.upper()} {path}` | {summary} | {', '.join(taken)} | {refused} |"


def _shown(parameter: dict[str, Any]) -> str:
    return f"**`{parameter['name']}`**" if parameter.get("required") else f"`{parameter['name']}`"


def _body(schema: dict[str, Any], schemas: dict[str, Any]) -> str:
    if "anyOf" in schema:
        return ", or ".join(_body(form, schemas) for form in schema["anyOf"])
    if "$ref" in schema:
        schema = schemas[schema["$ref"].rpartition("/")[2]]
    required = schema.get("required", ())
    fields = [f"**`{name}`**" if name in required else f"`{name}`" for name in schema.get("properties", {})]
    return "JSON {" + ", ".join(fields) + "}"
