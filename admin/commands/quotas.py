"""`loramux quotas`: what a tenant may use."""

from __future__ import annotations

from typing import Annotated

import typer

from loramux.admin.commands.options import AnyTenant, AsJson, Tenant
from loramux.admin.commands.output import connected, print_json, print_table, shown_time

app = typer.Typer(no_args_is_help=True, help="Set and list quotas.")


@app.command("set")
def set_quota(
    tenant: Tenant,
    metric: Annotated[
        str,
        typer.Option(help="requests_per_minute, tokens_per_minute or concurrent_requests.", show_default=False),
    ],
    limit: Annotated[int, typer.Option(help="The most that is allowed.", show_default=False)],
    burst: Annotated[
        int | None, typer.Option(help="The most at once (default: the limit).", show_default=False)
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Set or change one limit; it holds from the next request on."""
    body = {"tenant": tenant, "metric": metric, "limit": limit}
    if burst is not None:
        body["burst"] = burst
    with connected(as_json) as client:
        quota = client.post("quotas", body)
    if as_json:
        print_json(quota)
    else:
        print(f"{tenant}: {quota['metric']} is limited to {quota['limit']} (burst {quota['burst']})")


@app.command("list")
def list_quotas(tenant: AnyTenant = None, as_json: AsJson = False) -> None:
    """List the limits."""
    with connected(as_json) as client:
        quotas = list(client.items("quotas", tenant=tenant))
    if as_json:
        print_json({"object": "list", "data": quotas})
        return
    print_table(
        ("tenant", "metric", "limit", "burst", "id", "changed"),
        [(q["tenant_id"], q["metric"], q["limit"], q["burst"], q["id"], shown_time(q["updated_at"])) for q in quotas],
    )


@app.command()
def delete(
    quota_id: Annotated[str, typer.Argument(help="The limit's identifier, qta_...")], as_json: AsJson = False
) -> None:
    """Take a limit away."""
    from loramux.admin.client import path_part

    with connected(as_json) as client:
        quota = client.delete(f"quotas/{path_part(quota_id)}")
    if as_json:
        print_json(quota)
    else:
        print(f"deleted quota {quota['id']}")
