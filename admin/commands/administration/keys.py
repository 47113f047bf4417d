"""`loramux keys`: API keys of tenants and of administrators."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Annotated, Any

import typer

from loramux.admin.commands.options import AnyTenant, AsJson
from loramux.admin.commands.output import Columns, connected, fail, print_list, print_text, shown_time, tell, time_in
from loramux.admin.exit_codes import WRONG_CALL

if TYPE_CHECKING:
    from loramux.admin.client.client import Document

app = typer.Typer(no_args_is_help=True, help="Create, list, change, rotate and revoke API keys.")

Scopes = Annotated[
    list[str] | None,
    typer.Option(
        "--scope",
        help="A scope of the key; repeatable: adapters, base, tenant:read, tenant:develop or tenant:admin (adapters "
        "and base by default) or, with --platform, platform:read or platform:admin (by default).",
    ),
]

Adapters = Annotated[
    list[str] | None,
    typer.Option(
        "--adapter", help="Restrict the key to this adapter; repeatable (a new key can call any adapter by default)."
    ),
]
MaxServiceTier = Annotated[
    str | None, typer.Option(help="Best service tier of its requests (by default, that of its tenant).")
]
DefaultServiceTier = Annotated[
    str | None, typer.Option(help="Service tier of its requests that name none (by default, that of its tenant).")
]
KeyId = Annotated[str, typer.Argument(help="The key's identifier, key_...")]


@app.command()
def create(
    tenant: AnyTenant = None,
    platform: Annotated[
        bool, typer.Option("--platform", help="Create an administrator's key, not a tenant's.")
    ] = False,
    name: Annotated[str, typer.Option(help="The key's purpose.")] = "default",
    scopes: Scopes = None,
    expires_in_days: Annotated[
        int | None, typer.Option(min=1, max=3660, help="Days until the key expires (default: never).")
    ] = None,
    adapters: Adapters = None,
    max_service_tier: MaxServiceTier = None,
    default_service_tier: DefaultServiceTier = None,
    as_json: AsJson = False,
) -> None:
    """Create a key. Its secret is shown only once."""
    if (tenant is None) != platform:
        fail("specify the key's owner: --tenant SLUG or --platform", WRONG_CALL)
    body: dict[str, Any] = {"tenant": tenant, "name": name}
    if scopes:
        body["scopes"] = scopes
    if adapters:
        body["adapters"] = adapters
    if expires_in_days is not None:
        body["expires_in_s"] = expires_in_days * 86_400
    tiers = {"max_service_tier": max_service_tier, "default_service_tier": default_service_tier}
    body |= {field: tier for field, tier in tiers.items() if tier is not None}
    with connected(as_json) as client:
        key = client.post("api_keys", body)
    said = f"created key {key['id']} with scopes {', '.join(key['scopes'])}; its secret is not shown again"
    _show_secret(key, said, as_json)


@app.command("list")
def list_keys(tenant: AnyTenant = None, as_json: AsJson = False) -> None:
    """List a tenant's keys or, without --tenant, the administrators' keys. Revoked keys are included."""
    with connected(as_json) as client:
        keys = client.whole_list("api_keys", tenant=tenant)
    columns: Columns = {
        "id": "id",
        "tenant": "tenant",
        "name": "name",
        "scopes": lambda key: " ".join(key["scopes"]),
        "adapters": lambda key: None if key["adapters"] is None else " ".join(key["adapter_names"]),
        "created": time_in("created_at"),
        "max tier": "max_service_tier",
        "default tier": "default_service_tier",
        "expires": time_in("expires_at"),
        "revoked": time_in("revoked_at"),
    }
    print_list(keys, columns, as_json)


@app.command("set")
def set_key(
    key_id: KeyId,
    name: Annotated[str | None, typer.Option(help="The key's purpose.")] = None,
    scopes: Scopes = None,
    adapters: Adapters = None,
    any_adapter: Annotated[bool, typer.Option("--any-adapter", help="Let the key call any adapter.")] = False,
    expires_in_days: Annotated[
        int | None, typer.Option(min=1, max=3660, help="Days from now until the key expires.")
    ] = None,
    max_service_tier: MaxServiceTier = None,
    default_service_tier: DefaultServiceTier = None,
    as_json: AsJson = False,
) -> None:
    """Change a key's name, scopes, expiry, allowed adapters or service tiers.

    The service tier inherit stands for that of the tenant.
    """
    body: dict[str, Any] = {"name": name, "scopes": scopes or None, "adapters": adapters or None}
    body |= {"max_service_tier": max_service_tier, "default_service_tier": default_service_tier}
    if any_adapter:
        body["adapters"] = []
    if expires_in_days is not None:
        body["expires_in_s"] = expires_in_days * 86_400
    body = {field: value for field, value in body.items() if value is not None}
    if not body:
        options = "--name, --scope, --adapter, --any-adapter, --expires-in-days, --max-service-tier"
        fail(f"specify what to change: {options} or --default-service-tier", WRONG_CALL)
    with connected(as_json) as client:
        key = client.patch(client.path("api_keys", key_id), body)
    limit = f", restricted to {', '.join(key['adapter_names'])}" if key["adapters"] else ""
    tell(key, f"key {key['id']} ({key['name']}) has scopes {', '.join(key['scopes'])}{limit}", as_json)


@app.command()
def rotate(
    key_id: KeyId,
    grace_hours: Annotated[
        int | None,
        typer.Option(min=0, max=90 * 24, help="Hours until the old secret expires (default: 24).", show_default=False),
    ] = None,
    keep_previous: Annotated[
        bool,
        typer.Option(
            "--keep-previous",
            help="If the last hour's rotation had no answer: replace the lost secret, and keep the one before.",
        ),
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Give a key a new secret, shown only once. The old secret stays valid for the grace period."""
    if keep_previous and grace_hours is not None:
        fail("--keep-previous keeps the old secret's grace period: leave out --grace-hours", WRONG_CALL)
    body: Document = {"keep_previous": True} if keep_previous else {}
    if grace_hours is not None:
        body["grace_s"] = grace_hours * 3600
    with connected(as_json) as client:
        key = client.post(client.path("api_keys", key_id, "rotate"), body)
    until = shown_time(key["previous_secret_expires_at"]) or "now"
    _show_secret(key, f"rotated key {key['id']}; its old secret is valid until {until}", as_json)


@app.command()
def revoke(key_id: KeyId, as_json: AsJson = False) -> None:
    """Revoke a key permanently. The revocation takes effect within five seconds."""
    with connected(as_json) as client:
        key = client.delete(client.path("api_keys", key_id))
    tell(key, f"revoked key {key['id']}", as_json)


def _show_secret(key: Document, sentence: str, as_json: bool) -> None:
    """Print only the secret to standard output, so that a script can capture it."""
    tell(key, key["secret"], as_json)
    if not as_json:
        print_text(sentence, file=sys.stderr)
