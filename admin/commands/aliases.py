"""`loramux aliases`: the names of an adapter's versions, and what they named before."""

from __future__ import annotations

from typing import Annotated

import typer

from loramux.admin.commands.adapter_views import shown_targets
from loramux.admin.commands.options import Alias, AsJson, Model
from loramux.admin.commands.output import connected, print_json, print_table, shown_time

app = typer.Typer(no_args_is_help=True, help="List aliases and their history; 'adapters promote' moves them.")


@app.command("list")
def list_aliases(model: Model, as_json: AsJson = False) -> None:
    """List an adapter's aliases with the versions that they name."""
    from loramux.admin.client.named_adapter import find_named

    with connected(as_json) as client:
        aliases = client.get(f"{find_named(client, model).path}/aliases")
    if as_json:
        print_json(aliases)
        return
    print_table(
        ("alias", "versions", "revision", "moved"),
        [
            (alias["name"], shown_targets(alias["targets"]), alias["revision"], shown_time(alias["updated_at"]))
            for alias in aliases["data"]
        ],
    )


@app.command()
def history(model: Model, alias: Alias = "default", as_json: AsJson = False) -> None:
    """Show what an alias has named, newest first, and which key moved it."""
    from loramux.admin.client.client import path_part
    from loramux.admin.client.named_adapter import find_named

    with connected(as_json) as client:
        path = f"{find_named(client, model).path}/aliases/{path_part(alias)}/history"
        changes = list(client.items(path))
    if as_json:
        print_json({"object": "list", "data": changes})
        return
    print_table(
        ("revision", "versions", "action", "by", "at"),
        [
            (
                change["revision"],
                shown_targets(change["targets"]),
                change["action"],
                change["actor"],
                shown_time(change["created_at"]),
            )
            for change in changes
        ],
    )


@app.command()
def delete(
    model: Model,
    alias: Annotated[str, typer.Option("--alias", help="Any but default.", show_default=False)],
    as_json: AsJson = False,
) -> None:
    """Forget an alias and its history."""
    from loramux.admin.client.client import path_part
    from loramux.admin.client.named_adapter import find_named

    with connected(as_json) as client:
        named = find_named(client, model)
        client.delete(f"{named.path}/aliases/{path_part(alias)}")
    if as_json:
        print_json({"object": "alias", "name": alias, "deleted": True})
        return
    print(f"{named.document['model']} has no alias {alias} any more")
