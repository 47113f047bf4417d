"""`loramux tenants`: the accounts that own adapters and keys."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from loramux.admin.commands.administration.purge import purge_tenant
from loramux.admin.commands.options import AsJson
from loramux.admin.commands.output import (
    Columns,
    connected,
    fail,
    print_json,
    print_list,
    print_table,
    shown_time,
    tell,
    time_in,
)
from loramux.admin.exit_codes import WRONG_CALL

if TYPE_CHECKING:
    from loramux.admin.client.client import Document

app = typer.Typer(no_args_is_help=True, help="Create, list, change and suspend tenants.")

Slug = Annotated[str, typer.Argument(help="The tenant's slug or identifier.")]
DisplayName = Annotated[str | None, typer.Option(help="A human-readable name.")]
Timezone = Annotated[
    str | None, typer.Option(help="Time zone of the tenant's daily and monthly limits, such as Europe/Berlin.")
]


@app.command()
def create(
    slug: Annotated[str, typer.Argument(help="The short name used in model names, such as acme.")],
    display_name: DisplayName = None,
    timezone: Timezone = None,
    as_json: AsJson = False,
) -> None:
    """Create a tenant."""
    with connected(as_json) as client:
        tenant = client.post("tenants", _given(slug=slug, display_name=display_name, timezone=timezone))
    tell(tenant, f"created tenant {tenant['slug']} ({tenant['id']})", as_json)


@app.command("list")
def list_tenants(as_json: AsJson = False) -> None:
    """List all tenants."""
    with connected(as_json) as client:
        tenants = client.whole_list("tenants")
    columns: Columns = {
        "slug": "slug",
        "id": "id",
        "name": "display_name",
        "state": "state",
        "created": time_in("created_at"),
    }
    print_list(tenants, columns, as_json)


@app.command()
def show(tenant: Slug, as_json: AsJson = False) -> None:
    """Show one tenant."""
    with connected(as_json) as client:
        found = client.get(client.path("tenants", tenant))
    if as_json:
        print_json(found)
    else:
        names = (
            *("slug", "id", "display_name", "state", "weight", "timezone", "response_days"),
            *("max_service_tier", "default_service_tier", "host_floor_bytes"),
        )
        print_table(
            ("fact", "value"), [*((name, found[name]) for name in names), ("created", shown_time(found["created_at"]))]
        )


@app.command("set")
def set_tenant(
    tenant: Slug,
    display_name: DisplayName = None,
    weight: Annotated[
        int | None, typer.Option(min=1, help="Relative share of the engine when tenants compete for it.")
    ] = None,
    timezone: Timezone = None,
    response_days: Annotated[
        int | None, typer.Option(min=0, help="Number of days for which answers are stored. 0: not at all.")
    ] = None,
    max_service_tier: Annotated[
        str | None, typer.Option(help="Best service tier of its requests: priority, default or flex.")
    ] = None,
    default_service_tier: Annotated[
        str | None, typer.Option(help="Service tier of its requests that name none.")
    ] = None,
    host_floor_bytes: Annotated[
        int | None, typer.Option(min=0, help="Bytes of its adapters that each engine keeps in the host tier.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Change a tenant's name, weight, time zone, storage of answers, service tiers or memory for its adapters.

    A new time zone starts new daily and monthly windows immediately.
    """
    changes = _given(display_name=display_name, weight=weight, timezone=timezone, response_days=response_days)
    changes |= _given(max_service_tier=max_service_tier, default_service_tier=default_service_tier)
    changes |= _given(host_floor_bytes=host_floor_bytes)
    if not changes:
        options = "--display-name, --weight, --timezone, --response-days, --max-service-tier, --default-service-tier"
        fail(f"specify what to change: {options} or --host-floor-bytes", WRONG_CALL)
    changed = _change(tenant, changes, as_json)
    shown = f"{changed['display_name']}, weight {changed['weight']}, {changed['timezone']}"
    shown += f", answers stored for {changed['response_days']} days" if changed["response_days"] else ""
    floor = changed["host_floor_bytes"]
    shown += f", {floor} bytes of adapters kept in the host tier" if floor else ""
    tiers = changed["default_service_tier"], changed["max_service_tier"]
    shown += "" if tiers == ("default", "default") else f", service tier {tiers[0]} by default, {tiers[1]} at best"
    tell(changed, f"{changed['slug']}: {shown}", as_json)


@app.command()
def suspend(tenant: Slug, as_json: AsJson = False) -> None:
    """Suspend a tenant: its keys are refused within five seconds. Running requests finish, and no data is deleted."""
    changed = _change(tenant, {"state": "suspended"}, as_json)
    undo = f"'loramux tenants resume {changed['slug']}' undoes this"
    tell(changed, f"{changed['slug']} is {changed['state']}; {undo}", as_json)


@app.command()
def resume(tenant: Slug, as_json: AsJson = False) -> None:
    """Resume a suspended tenant: its keys are accepted again."""
    changed = _change(tenant, {"state": "active"}, as_json)
    tell(changed, f"{changed['slug']} is {changed['state']}", as_json)


@app.command()
def delete(tenant: Slug, as_json: AsJson = False) -> None:
    """Delete a tenant created by mistake.

    A tenant with adapters, unrevoked keys, prices or usage can only be suspended, and then purged.
    """
    with connected(as_json) as client:
        client.delete(client.path("tenants", tenant))
    tell({"object": "tenant", "slug": tenant, "deleted": True}, f"deleted tenant {tenant}", as_json)


app.command("purge")(purge_tenant)


def _change(tenant: str, changes: Document, as_json: bool) -> Document:
    with connected(as_json) as client:
        return client.patch(client.path("tenants", tenant), changes)


def _given(**values: object) -> Document:
    return {name: value for name, value in values.items() if value is not None}
