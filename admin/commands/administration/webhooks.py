"""`loramux webhooks`: addresses to which a tenant's events are delivered."""

from __future__ import annotations

from typing import Annotated

import typer

from loramux.admin.commands.options import AnyTenant, AsJson
from loramux.admin.commands.output import Columns, connected, fail, print_json, print_list, print_text, tell, time_in
from loramux.admin.exit_codes import REFUSED

app = typer.Typer(no_args_is_help=True, help="Deliver events to URLs: create, list, delete and test webhooks.")

WebhookId = Annotated[str, typer.Argument(help="The webhook's identifier, whk_...")]


@app.command()
def create(
    url: Annotated[str, typer.Argument(help="Where events are sent, an https URL.")],
    tenant: AnyTenant = None,
    types: Annotated[
        list[str] | None, typer.Option("--type", help="Only this type of event; repeatable (default: all).")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Deliver a tenant's events to a URL. The secret that signs deliveries is shown only once."""
    with connected(as_json) as client:
        webhook = client.post("webhooks", {"url": url, "tenant": tenant, "types": types or None})
    if as_json:
        print_json(webhook)
        return
    print_text(f"{webhook['id']} delivers the events of {webhook['tenant']}")
    print_text(f"secret  {webhook['secret']}  (shown this once)")


@app.command("list")
def list_webhooks(tenant: AnyTenant = None, as_json: AsJson = False) -> None:
    """List webhooks, newest first."""
    with connected(as_json) as client:
        webhooks = client.whole_list("webhooks", tenant=tenant)
    columns: Columns = {
        "id": "id",
        "tenant": "tenant",
        "url": "url",
        "types": lambda webhook: "all" if webhook["types"] is None else ", ".join(webhook["types"]),
        "state": "state",
        "delivered": time_in("delivered_at"),
        "failures": "failures",
        "last error": "last_error",
    }
    print_list(webhooks, columns, as_json)


@app.command()
def delete(webhook_id: WebhookId, as_json: AsJson = False) -> None:
    """Delete a webhook."""
    with connected(as_json) as client:
        deleted = client.delete(client.path("webhooks", webhook_id))
    tell(deleted, f"{webhook_id} is deleted", as_json)


@app.command("test")
def send_test(webhook_id: WebhookId, as_json: AsJson = False) -> None:
    """Send one event of the type webhook.test now. Exits with 1 if it is not delivered."""
    with connected(as_json) as client:
        outcome = client.post(client.path("webhooks", webhook_id, "test"), {})
    if not outcome["delivered"]:
        fail(outcome["error"], REFUSED, outcome if as_json else None)
    tell(outcome, f"delivered: the target answered with {outcome['status']}", as_json)
