"""`loramux grants`: other tenants that may call an adapter, and pay for their calls."""

from __future__ import annotations

from typing import Annotated

import typer

from loramux.admin.commands.options import AsJson, Model
from loramux.admin.commands.output import connected, print_json, print_table, shown_time

app = typer.Typer(no_args_is_help=True, help="Let other tenants call an adapter, and take that back.")

Granted = Annotated[
    str, typer.Option("--tenant", help="The tenant that may call it, by slug or identifier.", show_default=False)
]


@app.command("list")
def list_grants(model: Model, as_json: AsJson = False) -> None:
    """List the tenants that may call an adapter besides its owner."""
    from loramux.admin.client.named_adapter import find_named

    with connected(as_json) as client:
        grants = client.get(f"{find_named(client, model).path}/grants")
    if as_json:
        print_json(grants)
        return
    print_table(
        ("tenant", "id", "since"),
        [(grant["tenant"], grant["tenant_id"], shown_time(grant["created_at"])) for grant in grants["data"]],
    )


@app.command()
def add(model: Model, tenant: Granted, as_json: AsJson = False) -> None:
    """Let a tenant call the adapter by its full name; the tenant pays for its calls."""
    from loramux.admin.client.client import path_part
    from loramux.admin.client.named_adapter import find_named

    with connected(as_json) as client:
        named = find_named(client, model)
        grant = client.put(f"{named.path}/grants/{path_part(tenant)}", {})
    if as_json:
        print_json(grant)
    else:
        print(f"{grant['tenant']} may call {named.document['model']} and pays for it")


@app.command()
def remove(model: Model, tenant: Granted, as_json: AsJson = False) -> None:
    """Take a grant back; the tenant's next request is answered as if there were no such adapter."""
    from loramux.admin.client.client import path_part
    from loramux.admin.client.named_adapter import find_named

    with connected(as_json) as client:
        named = find_named(client, model)
        client.delete(f"{named.path}/grants/{path_part(tenant)}")
    if as_json:
        print_json({"object": "grant", "adapter_id": named.document["id"], "tenant": tenant, "deleted": True})
    else:
        print(f"{tenant} may not call {named.document['model']} any more")
