"""`loramux audit`: administrative changes."""

from __future__ import annotations

import json
from itertools import islice
from typing import TYPE_CHECKING, Annotated

import typer

from loramux.admin.commands.options import AnyTenant, AsJson
from loramux.admin.commands.output import Columns, connected, print_list, time_in

if TYPE_CHECKING:
    from loramux.admin.client.client import Document

MAX_SHOWN = 100


def audit(
    tenant: AnyTenant = None,
    actor: Annotated[str | None, typer.Option(help="A key's identifier, or the word operator.")] = None,
    action: Annotated[str | None, typer.Option(help="For example alias.set, or alias.*.")] = None,
    target: Annotated[str | None, typer.Option(help="Identifier of the changed object.")] = None,
    start: Annotated[int | None, typer.Option(help="Unix time in seconds.")] = None,
    end: Annotated[int | None, typer.Option(help="Unix time in seconds, exclusive.")] = None,
    limit: Annotated[int, typer.Option(min=1, max=1_000_000, help="Maximum number of entries.")] = 100,
    as_json: AsJson = False,
) -> None:
    """List administrative changes, newest first."""
    wanted = {"tenant": tenant, "actor": actor, "action": action, "target": target, "start": start, "end": end}
    with connected(as_json) as client:
        entries = list(islice(client.items("audit_log", **wanted), limit))
    columns: Columns = {
        "when": time_in("created_at"),
        "who": "actor_name",
        "from": "address",
        "action": "action",
        "target": "target_name",
        "change": _changes,
    }
    print_list({"object": "list", "data": entries}, columns, as_json)


def _changes(entry: Document) -> str:
    """Return an entry's changes as text, truncated after `MAX_SHOWN` characters. `--json` prints them in full."""
    from loramux.admin.client.safe_text import safe_text
    from loramux.platform.amounts import field_name, field_text

    changes = [
        (name, *(safe_text(json.dumps(field_text(value, name), ensure_ascii=False)) for value in pair))
        for name, pair in entry["changes"].items()
    ]
    text = ", ".join(f"{field_name(name)}: {old} -> {new}" for name, old, new in changes)
    return text if len(text) <= MAX_SHOWN else f"{text[:MAX_SHOWN]}..."
