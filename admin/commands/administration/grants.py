"""`loramux grants`: other tenants that may call an adapter and pay for their own calls."""

from __future__ import annotations

from typing import Annotated

import typer

from loramux.admin.commands.options import AsJson, Model
from loramux.admin.commands.output import connected_to, print_list, tell, time_in

app = typer.Typer(no_args_is_help=True, help="Share an adapter with other tenants, or stop sharing it.")

Granted = Annotated[str, typer.Option("--tenant", help="The grantee's slug or identifier.")]


@app.command("list")
def list_grants(model: Model, as_json: AsJson = False) -> None:
    """List the tenants that were granted access to an adapter."""
    with connected_to(model, as_json) as (client, named):
        grants = client.get(f"{named.path}/grants")
    print_list(grants, {"tenant": "tenant", "id": "tenant_id", "since": time_in("created_at")}, as_json)


@app.command()
def add(model: Model, tenant: Granted, as_json: AsJson = False) -> None:
    """Let a tenant call the adapter by its full name. That tenant pays for its calls."""
    with connected_to(model, as_json) as (client, named):
        grant = client.put(f"{named.path}/{client.path('grants', tenant)}", {})
    tell(grant, f"{grant['tenant']} may call {named.document['model']} and pays for its calls", as_json)


@app.command()
def remove(model: Model, tenant: Granted, as_json: AsJson = False) -> None:
    """Revoke a grant. The tenant's next request is answered as if the adapter did not exist."""
    with connected_to(model, as_json) as (client, named):
        client.delete(f"{named.path}/{client.path('grants', tenant)}")
    document = {"object": "grant", "adapter_id": named.document["id"], "tenant": tenant, "deleted": True}
    tell(document, f"{tenant} may no longer call {named.document['model']}", as_json)
