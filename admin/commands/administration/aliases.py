"""`loramux aliases`: names for an adapter's versions, and their history."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from loramux.admin.commands.administration.adapter_views import shown_sharing, shown_targets
from loramux.admin.commands.options import Alias, AsJson, Model
from loramux.admin.commands.output import Columns, connected_to, print_list, tell, time_in

if TYPE_CHECKING:
    from loramux.admin.client.client import Document

app = typer.Typer(no_args_is_help=True, help="List aliases and their history; 'adapters promote' moves them.")


@app.command("list")
def list_aliases(model: Model, as_json: AsJson = False) -> None:
    """List an adapter's aliases and the versions that they point at."""
    with connected_to(model, as_json) as (client, named):
        aliases = client.get(f"{named.path}/aliases")
    columns: Columns = {
        "alias": "name",
        "versions": _versions,
        "revision": "revision",
        "moved": time_in("updated_at"),
        "demands": _demand,
        "canary": _canary,
        "overflow": "overflow",
        "base's cache": _share_base_cache,
    }
    print_list(aliases, columns, as_json)


@app.command()
def history(model: Model, alias: Alias = "default", as_json: AsJson = False) -> None:
    """Show an alias's history, newest first: the versions it pointed at, and the key that moved it."""
    with connected_to(model, as_json) as (client, named):
        changes = client.whole_list(f"{named.path}/{client.path('aliases', alias, 'history')}")
    columns: Columns = {
        "revision": "revision",
        "versions": _versions,
        "action": "action",
        "base's cache": _share_base_cache,
        "by": "actor_name",
        "at": time_in("created_at"),
    }
    print_list(changes, columns, as_json)


@app.command()
def delete(
    model: Model,
    alias: Annotated[str, typer.Option("--alias", help="Any alias except default.", show_default=False)],
    as_json: AsJson = False,
) -> None:
    """Delete an alias and its history."""
    with connected_to(model, as_json) as (client, named):
        client.delete(f"{named.path}/{client.path('aliases', alias)}")
    document = {"object": "alias", "name": alias, "deleted": True}
    tell(document, f"deleted alias {alias} of {named.document['model']}", as_json)


def _versions(named: Document) -> str:
    return shown_targets(named["targets"])


def _demand(alias: Document) -> str | None:
    wanted = alias["require_eval"]
    if not wanted:
        return None
    judge = wanted.get("judge")
    return f"{wanted['name']} {wanted['min_score']:.3f}" + (f" judged by {judge}" if judge else "")


def _share_base_cache(alias: Document) -> str | None:
    num_own, others = alias["share_base_cache"], alias.get("not_sharing")
    if num_own is None:
        return None
    # A version that an alias with the option has moved to since can be one that ignores it.
    return shown_sharing(num_own) + (f", except {', '.join(map(str, others))}" if others else "")


def _canary(alias: Document) -> str | None:
    canary = alias["canary"]
    if canary is None:
        return None
    if canary["verdict"] is None:
        return "watching"
    is_rolled_back = not {one["version"] for one in alias["targets"]} & set(canary["versions"])
    return f"{'rolled back' if is_rolled_back else 'failed'}: {canary['verdict']}"
