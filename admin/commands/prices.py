"""`loramux prices`: what tokens cost, from when, for whom."""

from __future__ import annotations

from collections.abc import Callable
from decimal import Decimal, InvalidOperation
from typing import TYPE_CHECKING, Annotated, Any

import typer

from loramux.admin.commands.options import AnyTenant, AsJson
from loramux.admin.commands.output import Columns, connected, print_list, shown_time, tell, time_in

if TYPE_CHECKING:
    from loramux.admin.client.client import Document

app = typer.Typer(no_args_is_help=True, help="Announce, list and withdraw prices.")

NANOS = 1_000_000_000


@app.command()
def add(
    prompt: Annotated[str, typer.Option(help="For a million prompt tokens, such as 0.15.", show_default=False)],
    completion: Annotated[str, typer.Option(help="For a million completion tokens.", show_default=False)],
    cached: Annotated[
        str | None, typer.Option(help="For a million cached prompt tokens (default: --prompt).", show_default=False)
    ] = None,
    tenant: AnyTenant = None,
    scope: Annotated[str, typer.Option(help="all, base, adapters or an adapter's identifier.")] = "all",
    currency: Annotated[str, typer.Option(help="Three letters; one for all prices.")] = "USD",
    effective_at: Annotated[
        int | None, typer.Option(help="Seconds since 1970 (default: in a moment).", show_default=False)
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Announce a price: the list price, or a tenant's own."""
    body: dict[str, Any] = {
        "tenant": tenant,
        "scope": scope,
        "prompt": _nanos(prompt),
        "cached": None if cached is None else _nanos(cached),
        "completion": _nanos(completion),
        "currency": currency,
        "effective_at": effective_at,
    }
    with connected(as_json) as client:
        price = client.post("prices", {name: value for name, value in body.items() if value is not None})
    tell(price, f"{price['id']} holds from {shown_time(price['effective_at'])} for {price['scope']}", as_json)


@app.command("list")
def list_prices(tenant: AnyTenant = None, as_json: AsJson = False) -> None:
    """List prices; with a tenant, its own and the list's."""
    with connected(as_json) as client:
        prices = client.whole_list("prices", tenant=tenant)
    columns: Columns = {
        "from": time_in("effective_at"),
        "tenant": "tenant_id",
        "scope": "scope",
        "prompt": _amount_in("prompt"),
        "cached": _amount_in("cached"),
        "completion": _amount_in("completion"),
        "currency": "currency",
        "id": "id",
    }
    print_list(prices, columns, as_json)


@app.command()
def withdraw(
    price_id: Annotated[str, typer.Argument(help="The price's identifier, prc_...")], as_json: AsJson = False
) -> None:
    """Take back a price that is still to come."""
    with connected(as_json) as client:
        price = client.delete(client.path("prices", price_id))
    tell(price, f"withdrew price {price['id']}", as_json)


def _amount_in(name: str) -> Callable[[Document], str]:
    return lambda price: f"{Decimal(price[name]) / NANOS:f}"


def _nanos(amount: str) -> int:
    """An amount of the currency in billionths of it; raises BadParameter where it is none, or not whole."""
    try:
        nanos = Decimal(amount) * NANOS
        if nanos.is_finite() and nanos == nanos.to_integral_value() and abs(nanos) < 10**18:
            return int(nanos)
    except InvalidOperation:
        pass
    raise typer.BadParameter("a price is a decimal number with at most nine places, such as 0.15")
