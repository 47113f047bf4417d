"""`loramux tenants`: the accounts that own adapters and keys."""

from __future__ import annotations

from typing import Annotated

import typer

from loramux.admin.commands.options import AsJson
from loramux.admin.commands.output import connected, print_json, print_table, shown_time

app = typer.Typer(no_args_is_help=True, help="Make and list tenants.")


@app.command()
def create(
    slug: Annotated[str, typer.Argument(help="The short name that model names use, such as acme.")],
    display_name: Annotated[str | None, typer.Option(help="The name for people.", show_default=False)] = None,
    as_json: AsJson = False,
) -> None:
    """Make a tenant."""
    body = {"slug": slug} if display_name is None else {"slug": slug, "display_name": display_name}
    with connected(as_json) as client:
        tenant = client.post("tenants", body)
    if as_json:
        print_json(tenant)
    else:
        print(f"made tenant {tenant['slug']} ({tenant['id']})")


@app.command("list")
def list_tenants(as_json: AsJson = False) -> None:
    """List all tenants."""
    with connected(as_json) as client:
        tenants = list(client.items("tenants"))
    if as_json:
        print_json({"object": "list", "data": tenants})
        return
    print_table(
        ("slug", "id", "name", "state", "created"),
        [(t["slug"], t["id"], t["display_name"], t["state"], shown_time(t["created_at"])) for t in tenants],
    )
