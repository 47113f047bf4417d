"""`loramux adapters`: bring adapters to the server and see which there are."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from loramux.admin.commands.options import AnyTenant, AsJson, Tenant
from loramux.admin.commands.output import REFUSED, connected, fail, print_json, print_table, shown_time

if TYPE_CHECKING:
    from loramux.admin.client import Document
    from loramux.admin.push import Progress

app = typer.Typer(no_args_is_help=True, help="Push and list adapters.")


@app.command()
def push(
    directory: Annotated[Path, typer.Argument(help="What PEFT's save_pretrained wrote.", exists=True, file_okay=False)],
    tenant: Tenant,
    name: Annotated[str, typer.Option(help="The adapter's name within the tenant.", show_default=False)],
    timeout_s: Annotated[float, typer.Option("--timeout", help="Seconds to wait for the verdict.")] = 300.0,
    as_json: AsJson = False,
) -> None:
    """Upload a PEFT directory as the adapter's next version and wait until it is ready."""
    from loramux.admin.push import PushRefused, num_bytes_of, push_adapter

    try:
        with connected(as_json) as client, _progress(num_bytes_of(directory), as_json) as progress:
            pushed = push_adapter(client, directory, tenant, name, timeout_s, progress)
    except PushRefused as error:
        fail(f"rejected ({error.code}): {error.message}", REFUSED, error.envelope() if as_json else None)
    if as_json:
        print_json({"model": pushed.model, "version": pushed.version, "digest": pushed.digest})
    else:
        print(f"{pushed.model} version {pushed.version} is ready (rank {pushed.max_rank}, {pushed.digest[:12]})")


@app.command("list")
def list_adapters(tenant: AnyTenant = None, as_json: AsJson = False) -> None:
    """List adapters with the versions that their aliases name."""
    with connected(as_json) as client:
        adapters = list(client.items("adapters", tenant=tenant))
    if as_json:
        print_json({"object": "list", "data": adapters})
        return
    print_table(
        ("model", "id", "aliases", "created"),
        [
            (
                adapter["model"],
                adapter["id"],
                shown_aliases(adapter),
                shown_time(adapter["created_at"]),
            )
            for adapter in adapters
        ],
    )


def shown_aliases(adapter: Document) -> str | None:
    """`default=3 beta=3(90%)+4(10%)`: the versions of each alias, where there are several with their parts."""
    return " ".join(f"{name}={shown_targets(targets)}" for name, targets in adapter["aliases"].items()) or None


def shown_targets(targets: Sequence[Document]) -> str:
    if len(targets) == 1:
        return str(targets[0]["version"])
    total = sum(target["weight"] for target in targets)
    return "+".join(f"{target['version']}({target['weight'] / total:.0%})" for target in targets)


@contextmanager
def _progress(num_bytes: int, as_json: bool) -> Iterator[Progress]:
    """A progress bar on a terminal, silence elsewhere."""
    if as_json or not sys.stderr.isatty():
        yield lambda _what, _num_bytes: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, TextColumn, TransferSpeedColumn
    from rich.progress import Progress as Bars

    columns = (TextColumn("{task.description:>7}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    with Bars(*columns, console=Console(stderr=True), transient=True) as bars:
        task = bars.add_task("read", total=num_bytes)
        yield lambda what, done: bars.update(task, description=what, advance=done)
