"""`loramux prices`: what tokens cost, from when, for whom."""

from __future__ import annotations

from decimal import Decimal, InvalidOperation
from typing import Annotated, Any

import typer

from loramux.admin.commands.options import AnyTenant, AsJson
from loramux.admin.commands.output import connected, print_json, print_table, shown_time

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
    if as_json:
        print_json(price)
    else:
        print(f"{price['id']} holds from {shown_time(price['effective_at'])} for {price['scope']}")


@app.command("list")
def list_prices(tenant: AnyTenant = None, as_json: AsJson = False) -> None:
    """List prices; with a tenant, its own and the list's."""
    with connected(as_json) as client:
        prices = list(client.items("prices", tenant=tenant))
    if as_json:
        print_json({"object": "list", "data": prices})
        return
    print_table(
        ("from", "tenant", "scope", "prompt", "cached", "completion", "currency", "id"),
        [
            (
                shown_time(price["effective_at"]),
                price["tenant_id"],
                price["scope"],
                *(f"{Decimal(price[name]) / NANOS:f}" for name in ("prompt", "cached", "completion")),
                price["currency"],
                price["id"],
            )
            for price in prices
        ],
    )


@app.command()
def withdraw(
    price_id: Annotated[str, typer.Argument(help="The price's identifier, prc_...")], as_json: AsJson = False
) -> None:
    """Take back a price that is still to come."""
    from loramux.admin.client.client import path_part

    with connected(as_json) as client:
        price = client.delete(f"prices/{path_part(price_id)}")
    if as_json:
        print_json(price)
    else:
        print(f"withdrew price {price['id']}")


def _nanos(amount: str) -> int:
    """An amount of the currency in billionths of it; raises BadParameter where it is none, or not whole."""
    try:
        nanos = Decimal(amount) * NANOS
        if nanos.is_finite() and nanos == nanos.to_integral_value() and abs(nanos) < 10**18:
            return int(nanos)
    except InvalidOperation:
        pass
    raise typer.BadParameter("a price is a decimal number with at most nine places, such as 0.15")
