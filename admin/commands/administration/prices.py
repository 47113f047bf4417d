"""`loramux prices`: token prices, their effective times and the tenants that they apply to."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated, Any

import typer

from loramux.admin.commands.options import AnyTenant, AsJson, given_amount
from loramux.admin.commands.output import Columns, connected, print_list, shown_time, tell, time_in

if TYPE_CHECKING:
    from loramux.admin.client.client import Document

app = typer.Typer(no_args_is_help=True, help="Add, list and withdraw prices.")


@app.command()
def add(
    prompt: Annotated[str, typer.Option(help="Price per million prompt tokens, such as 0.15.")],
    completion: Annotated[str, typer.Option(help="Price per million completion tokens.")],
    cached: Annotated[
        str | None, typer.Option(help="Price per million cached prompt tokens (default: --prompt).")
    ] = None,
    batch_percent: Annotated[
        int, typer.Option(help="What requests of batches pay, in percent of the price.", min=0, max=100)
    ] = 100,
    flex_percent: Annotated[
        int, typer.Option(help="What requests of the service tier flex pay, in percent.", min=0, max=1000)
    ] = 100,
    priority_percent: Annotated[
        int, typer.Option(help="What requests of the service tier priority pay, in percent.", min=0, max=1000)
    ] = 100,
    tenant: AnyTenant = None,
    scope: Annotated[str, typer.Option(help="all, base, adapters or an adapter's identifier.")] = "all",
    currency: Annotated[str, typer.Option(help="Three-letter currency code, the same for all prices.")] = "USD",
    effective_at: Annotated[
        int | None, typer.Option(help="Unix time in seconds (default: once all gateways have read the price).")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Add a list price, or a price for one tenant."""
    from loramux.platform.amounts import NANOS_UNIT

    body: dict[str, Any] = {
        "tenant": tenant,
        "scope": scope,
        "prompt": given_amount(prompt, NANOS_UNIT, "--prompt"),
        "cached": None if cached is None else given_amount(cached, NANOS_UNIT, "--cached"),
        "completion": given_amount(completion, NANOS_UNIT, "--completion"),
        "batch_percent": batch_percent,
        "flex_percent": flex_percent,
        "priority_percent": priority_percent,
        "currency": currency,
        "effective_at": effective_at,
    }
    with connected(as_json) as client:
        price = client.post("prices", {name: value for name, value in body.items() if value is not None})
    tell(
        price,
        f"{price['id']} applies to {price['adapter'] or price['scope']} from {shown_time(price['effective_at'])}",
        as_json,
    )


@app.command("list")
def list_prices(tenant: AnyTenant = None, as_json: AsJson = False) -> None:
    """Show all prices or, with --tenant, only that tenant's own prices and the list prices."""
    with connected(as_json) as client:
        prices = client.whole_list("prices", tenant=tenant)
    columns: Columns = {
        "from": time_in("effective_at"),
        "tenant": "tenant",
        "scope": lambda price: price["adapter"] or price["scope"],
        "prompt": _amount_in("prompt"),
        "cached": _amount_in("cached"),
        "completion": _amount_in("completion"),
        "batches": lambda price: f"{price['batch_percent']}%",
        "flex": lambda price: f"{price['flex_percent']}%",
        "priority": lambda price: f"{price['priority_percent']}%",
        "currency": "currency",
        "id": "id",
    }
    print_list(prices, columns, as_json)


@app.command()
def withdraw(
    price_id: Annotated[str, typer.Argument(help="The price's identifier, prc_...")], as_json: AsJson = False
) -> None:
    """Withdraw a price that has not yet taken effect."""
    with connected(as_json) as client:
        price = client.delete(client.path("prices", price_id))
    tell(price, f"withdrew price {price['id']}", as_json)


def _amount_in(name: str) -> Callable[[Document], str]:
    from loramux.platform.amounts import money_text

    return lambda price: money_text(price[name])
