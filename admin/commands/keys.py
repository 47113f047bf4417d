"""`loramux keys`: API keys of tenants and of administrators."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from loramux.admin.commands.options import AnyTenant, AsJson
from loramux.admin.commands.output import WRONG_CALL, connected, fail, print_json, print_table, shown_time

app = typer.Typer(no_args_is_help=True, help="Make, list and revoke API keys.")

Scopes = Annotated[
    list[str] | None,
    typer.Option(
        "--scope", help="May be repeated (default: adapters and base, or platform:admin).", show_default=False
    ),
]


@app.command()
def create(
    tenant: AnyTenant = None,
    platform: Annotated[bool, typer.Option("--platform", help="An administrator's key instead of a tenant's.")] = False,
    name: Annotated[str, typer.Option(help="What the key is for.")] = "default",
    scopes: Scopes = None,
    expires_in_days: Annotated[
        int | None, typer.Option(min=1, help="Never expires without.", show_default=False)
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Make a key; its secret is shown once."""
    if (tenant is None) != platform:
        fail("say whose key it is: --tenant SLUG or --platform", WRONG_CALL)
    body: dict[str, Any] = {"tenant": tenant, "name": name}
    if scopes:
        body["scopes"] = scopes
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


@app.command()
def revoke(
    key_id: Annotated[str, typer.Argument(help="The key's identifier, key_...")], as_json: AsJson = False
) -> None:
    """Make a key useless for good; it takes effect within five seconds."""
    from loramux.admin.client import path_part

    with connected(as_json) as client:
        key = client.delete(f"api_keys/{path_part(key_id)}")
    if as_json:
        print_json(key)
    else:
        print(f"revoked key {key['id']}")
