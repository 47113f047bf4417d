"""`loramux watch`: what happens to adapters and budgets, as it happens."""

from __future__ import annotations

import sys
from itertools import islice
from typing import TYPE_CHECKING, Annotated, Any

import typer

from loramux.admin.commands.options import AnyTenant, AsJson
from loramux.admin.commands.output import connected, json_text, print_text, shown_time

if TYPE_CHECKING:
    from loramux.admin.client.client import Document


def watch(
    model: Annotated[str | None, typer.Argument(metavar="TENANT/ADAPTER", help="Only events of this adapter.")] = None,
    tenant: AnyTenant = None,
    types: Annotated[
        list[str] | None, typer.Option("--type", help="Only this type, such as alias.moved; repeatable.")
    ] = None,
    after: Annotated[
        int | None, typer.Option(min=0, help="Begin after this number (default: with the next event).")
    ] = None,
    count: Annotated[int | None, typer.Option(min=1, help="Stop after this many events (default: never).")] = None,
    as_json: AsJson = False,
) -> None:
    """Print events as they happen, one per line. With --json, each line is a JSON object."""
    from loramux.admin.client.followed_events import follow
    from loramux.admin.client.named_adapter import find_named

    def note_broken(reason: str) -> None:
        print_text(f"loramux: {reason}; trying again", file=sys.stderr)

    with connected(as_json) as client:
        adapter_id = None if model is None else find_named(client, model).document["id"]
        if model is not None and tenant is None:
            tenant = model.partition("/")[0]
        wanted: dict[str, Any] = {"tenant": tenant, "adapter": adapter_id, "types": ",".join(types) if types else None}
        for event in islice(follow(client, after, note_broken, **wanted), count):
            print_text(json_text(event) if as_json else _line(event), flush=True)


def _line(event: Document) -> str:
    from loramux.admin.client.event_text import event_text

    if event["type"] == "events.expired":
        return f"the events after number {event['after']} are no longer kept"
    subject = event["model"] or event["tenant"] or event["tenant_id"]
    words = (shown_time(event["created_at"]), event["sequence"], event["type"], subject, event_text(event))
    return "  ".join(str(word) for word in words).replace("\n", " ")
