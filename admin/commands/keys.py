"""`loramux keys`: API keys of tenants and of administrators."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from loramux.admin.commands.options import AnyTenant, AsJson
from loramux.admin.commands.output import connected, fail, print_json, print_table, shown_time
from loramux.admin.exit_codes import WRONG_CALL

app = typer.Typer(no_args_is_help=True, help="Make, list, change, rotate and revoke API keys.")

Scopes = Annotated[
    list[str] | None,
    typer.Option(
        "--scope", help="May be repeated (default: adapters and base, or platform:admin).", show_default=False
    ),
]

Adapters = Annotated[
    list[str] | None,
    typer.Option(
        "--adapter", help="Limit the key to this adapter; may be repeated (default: no limit).", show_default=False
    ),
]
KeyId = Annotated[str, typer.Argument(help="The key's identifier, key_...", show_default=False)]


@app.command()
def create(
    tenant: AnyTenant = None,
    platform: Annotated[bool, typer.Option("--platform", help="An administrator's key instead of a tenant's.")] = False,
    name: Annotated[str, typer.Option(help="What the key is for.")] = "default",
    scopes: Scopes = None,
    expires_in_days: Annotated[
        int | None, typer.Option(min=1, help="Never expires without.", show_default=False)
    ] = None,
    adapters: Adapters = None,
    as_json: AsJson = False,
) -> None:
    """Make a key; its secret is shown once."""
    if (tenant is None) != platform:
        fail("say whose key it is: --tenant SLUG or --platform", WRONG_CALL)
    body: dict[str, Any] = {"tenant": tenant, "name": name}
    if scopes:
        body["scopes"] = scopes
    if adapters:
        body["adapters"] = adapters
    if expires_in_days is not None:
        body["expires_in_s"] = expires_in_days * 86_400
    with connected(as_json) as client:
        key = client.post("api_keys", body)
    if as_json:
        print_json(key)
        return
    print(key["secret"])
    typer.echo(f"made key {key['id']} with scopes {', '.join(key['scopes'])}; its secret is not shown again", err=True)


@app.command("list")
def list_keys(tenant: AnyTenant = None, as_json: AsJson = False) -> None:
    """List a tenant's keys, or without --tenant the administrators', revoked ones included."""
    with connected(as_json) as client:
        keys = list(client.items("api_keys", tenant=tenant))
    if as_json:
        print_json({"object": "list", "data": keys})
        return
    print_table(
        ("id", "tenant", "name", "scopes", "created", "expires", "revoked"),
        [
            (
                key["id"],
                key["tenant_id"],
                key["name"],
                " ".join(key["scopes"]),
                shown_time(key["created_at"]),
                shown_time(key["expires_at"]),
                shown_time(key["revoked_at"]),
            )
            for key in keys
        ],
    )


@app.command("set")
def set_key(
    key_id: KeyId,
    name: Annotated[str | None, typer.Option(help="What the key is for.", show_default=False)] = None,
    scopes: Scopes = None,
    adapters: Adapters = None,
    any_adapter: Annotated[bool, typer.Option("--any-adapter", help="Lift the limit to some adapters.")] = False,
    expires_in_days: Annotated[int | None, typer.Option(min=1, help="Days from now on.", show_default=False)] = None,
    as_json: AsJson = False,
) -> None:
    """Change a key's name, scopes, expiry or the adapters that it is limited to."""
    from loramux.admin.client.client import path_part

    body: dict[str, Any] = {"name": name, "scopes": scopes or None, "adapters": adapters or None}
    if any_adapter:
        body["adapters"] = []
    if expires_in_days is not None:
        body["expires_in_s"] = expires_in_days * 86_400
    body = {field: value for field, value in body.items() if value is not None}
    if not body:
        fail("say what to change: --name, --scope, --adapter, --any-adapter or --expires-in-days", WRONG_CALL)
    with connected(as_json) as client:
        key = client.patch(f"api_keys/{path_part(key_id)}", body)
    if as_json:
        print_json(key)
    else:
        limit = f", limited to {', '.join(key['adapters'])}" if key["adapters"] else ""
        print(f"key {key['id']} ({key['name']}) has scopes {', '.join(key['scopes'])}{limit}")


@app.command()
def rotate(
    key_id: KeyId,
    grace_hours: Annotated[int, typer.Option(min=0, max=90 * 24, help="How long the old secret still opens.")] = 24,
    as_json: AsJson = False,
) -> None:
    """Give a key a new secret, which is shown once; the old one opens until its grace ends."""
    from loramux.admin.client.client import path_part

    with connected(as_json) as client:
        key = client.post(f"api_keys/{path_part(key_id)}/rotate", {"grace_s": grace_hours * 3600})
    if as_json:
        print_json(key)
        return
    print(key["secret"])
    until = shown_time(key["previous_secret_expires_at"]) or "now"
    typer.echo(f"rotated key {key['id']}; its old secret opens until {until}", err=True)


@app.command()
def revoke(key_id: KeyId, as_json: AsJson = False) -> None:
    """Make a key useless for good; it takes effect within five seconds."""
    from loramux.admin.client.client import path_part

    with connected(as_json) as client:
        key = client.delete(f"api_keys/{path_part(key_id)}")
    if as_json:
        print_json(key)
    else:
        print(f"revoked key {key['id']}")
