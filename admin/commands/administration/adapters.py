"""`loramux adapters`: the commands for adapters and their versions."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from loramux.admin.commands.administration.adapter_merge import merge
from loramux.admin.commands.administration.adapter_push import push
from loramux.admin.commands.administration.adapter_service import archive, disable, enable, promote, restore, rollback
from loramux.admin.commands.administration.adapter_views import print_version, print_versions, shown_aliases
from loramux.admin.commands.administration.purge import purge_adapter
from loramux.admin.commands.options import AnyTenant, AsJson, VersionedModel
from loramux.admin.commands.output import (
    Columns,
    connected,
    connected_to,
    error_document,
    fail,
    print_json,
    print_list,
    tell,
    time_in,
)
from loramux.admin.commands.transfer_progress import transfer_progress
from loramux.admin.exit_codes import REFUSED

app = typer.Typer(no_args_is_help=True, help="Push and list adapters, and choose which versions serve requests.")


@app.command()
def pull(
    model: Annotated[
        str,
        typer.Argument(
            metavar="TENANT/ADAPTER[@VERSION]", help="Without @VERSION, the version that the bare name selects."
        ),
    ],
    directory: Annotated[Path, typer.Argument(help="Directory for the files.", file_okay=False)],
    force: Annotated[bool, typer.Option("--force", help="Overwrite existing files.")] = False,
    as_json: AsJson = False,
) -> None:
    """Download a version's files exactly as they were uploaded."""
    from loramux.admin.client.pull import PullRefused, pull_version

    try:
        with connected_to(model, as_json) as (client, named), transfer_progress(None, as_json) as progress:
            pulled = pull_version(client, named, directory, may_replace=force, progress=progress)
    except (PullRefused, OSError) as error:
        fail(str(error), REFUSED, error_document(str(error), "pull_refused") if as_json else None)
    digests = {"digest": pulled.digest, "version_digest": pulled.version_digest}
    document = {"model": pulled.model, "version": pulled.version, **digests}
    tell(document, f"{pulled.model} is in {pulled.directory}", as_json)


@app.command("list")
def list_adapters(tenant: AnyTenant = None, as_json: AsJson = False) -> None:
    """List adapters and the versions that their aliases point at."""
    with connected(as_json) as client:
        adapters = client.whole_list("adapters", tenant=tenant)
    columns: Columns = {"model": "model", "id": "id", "aliases": shown_aliases, "created": time_in("created_at")}
    print_list(adapters, columns, as_json)


@app.command()
def show(
    model: Annotated[
        str, typer.Argument(metavar="TENANT/ADAPTER[@VERSION]", help="An adapter, or one of its versions.")
    ],
    as_json: AsJson = False,
) -> None:
    """Show an adapter with its versions, or one version with its validation report."""
    with connected_to(model, as_json) as (client, named):
        if named.version is not None:
            version = client.get(named.version_path())
            print_json(version) if as_json else print_version(named.document, version)
            return
        versions = list(client.items(f"{named.path}/versions"))
        evals = [one for one in client.get(f"{named.path}/evals", limit=100)["data"] if one["state"] == "done"]
    if as_json:
        print_json({**named.document, "versions": versions, "evals": evals})
    else:
        print_versions(named.document, versions, evals)


app.command()(push)
app.command()(merge)
app.command()(promote)
app.command()(rollback)
app.command()(disable)
app.command()(enable)
app.command()(archive)
app.command()(restore)


@app.command()
def pin(model: VersionedModel, as_json: AsJson = False) -> None:
    """Load a version and keep it in the page pool until 'unpin', even across restarts."""
    _place(model, "pin", as_json)


@app.command()
def unpin(model: VersionedModel, as_json: AsJson = False) -> None:
    """Make a version evictable again. It stays loaded until its pages are needed."""
    _place(model, "unpin", as_json)


@app.command()
def preload(model: VersionedModel, as_json: AsJson = False) -> None:
    """Load a version before its first request arrives. The version can be evicted later."""
    _place(model, "preload", as_json)


app.command("purge")(purge_adapter)


def _place(model: str, verb: str, as_json: bool) -> None:
    from loramux.admin.client.client import loading_timeout_s

    with connected_to(model, as_json, needs_version=True) as (client, named):
        placement = client.post(f"{named.version_path()}/{verb}", {}, loading_timeout_s(1))
    is_held = placement["state"] != "absent" and placement["num_pages"] is not None
    pages = f" on {placement['num_pages']} pages" if is_held else ""
    pinned = ", pinned" if placement["pinned"] else ""
    tell(placement, f"{model} is {placement['state']}{pages}{pinned}", as_json)
