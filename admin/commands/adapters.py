"""`loramux adapters`: push, pull and list adapters."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from loramux.admin.commands.adapter_merge import merge
from loramux.admin.commands.adapter_placement import pin, preload, unpin
from loramux.admin.commands.adapter_service import archive, disable, enable, promote, restore, rollback
from loramux.admin.commands.adapter_views import print_version, print_versions, shown_aliases, shown_targets
from loramux.admin.commands.options import AnyTenant, AsJson, Tenant
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

DEFAULT_ALIAS = "default"

app = typer.Typer(no_args_is_help=True, help="Push and list adapters, and choose which versions serve requests.")


@app.command()
def push(
    source: Annotated[
        str, typer.Argument(metavar="DIRECTORY|s3://BUCKET/PREFIX", help="Output of PEFT's save_pretrained.")
    ],
    tenant: Tenant,
    name: Annotated[str, typer.Option(help="The adapter's name within the tenant.", show_default=False)],
    timeout_s: Annotated[float, typer.Option("--timeout", help="Seconds to wait for validation.")] = 300.0,
    no_template: Annotated[
        bool, typer.Option("--no-template", help="Leave out the directory's chat_template.jinja.")
    ] = False,
    no_generation_config: Annotated[
        bool, typer.Option("--no-generation-config", help="Leave out the directory's generation_config.json.")
    ] = False,
    tool_parser: Annotated[
        str | None,
        typer.Option(help="auto, off or a parser's name: how the version's tool calls are read.", show_default=False),
    ] = None,
    reasoning_parser: Annotated[
        str | None,
        typer.Option(
            help="auto, off or a parser's name: how the version's reasoning is told apart.", show_default=False
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Upload a PEFT directory as the adapter's next version and wait until it is ready.

    A chat_template.jinja, a generation_config.json and a parsers.json in the directory become part of the version. The
    options for parsers take precedence over parsers.json. The server itself reads an s3:// source, which its operator
    must allow, with all of its files.
    """
    from loramux.adapter_store.formats.answer_parsers import AnswerParsers, problem_with_parser
    from loramux.admin.client.named_adapter import find_named
    from loramux.admin.client.push import (
        GENERATION_NAME,
        TEMPLATE_NAME,
        PushRefused,
        num_bytes_of,
        push_adapter,
        register_source,
    )

    left_out = {TEMPLATE_NAME: no_template, GENERATION_NAME: no_generation_config}
    without = [file_name for file_name, is_left_out in left_out.items() if is_left_out]
    is_remote = source.startswith("s3://")
    directory = Path(source)
    if not is_remote and not directory.is_dir():
        raise typer.BadParameter(f"there is no directory {source}", param_hint="DIRECTORY")
    parsers = AnswerParsers(tool_parser, reasoning_parser).document()
    for setting, value in parsers.items():
        problem = problem_with_parser(setting, value)
        if problem is not None:
            hint = {"tool_call_parser": "--tool-parser", "reasoning_parser": "--reasoning-parser"}[setting]
            raise typer.BadParameter(problem, param_hint=hint)
    if is_remote and without:
        raise typer.BadParameter("the server reads all files of an s3:// source", param_hint="--no-template")
    if is_remote and parsers:
        raise typer.BadParameter("put a parsers.json into the s3:// source", param_hint="--tool-parser")
    try:
        num_bytes = None if is_remote else num_bytes_of(directory, without)
        with connected(as_json) as client, transfer_progress(num_bytes, as_json) as progress:
            if is_remote:
                pushed = register_source(client, source, tenant, name, timeout_s)
            else:
                pushed = push_adapter(client, directory, tenant, name, timeout_s, progress, without, parsers)
            default = find_named(client, pushed.model).document["aliases"].get(DEFAULT_ALIAS, ())
    except PushRefused as error:
        fail(f"rejected ({error.code}): {error.message}", REFUSED, error.envelope() if as_json else None)
    if as_json:
        digests = {"digest": pushed.digest, "version_digest": pushed.version_digest}
        print_json({"model": pushed.model, "version": pushed.version, **digests})
    else:
        print(
            f"{pushed.model} version {pushed.version} is ready (rank {pushed.max_rank}, {pushed.version_digest[:12]})"
        )
        if [target["version"] for target in default] != [pushed.version]:
            still = (
                f"its bare name still selects version {shown_targets(default)}" if default else "no alias selects it"
            )
            print(f"{still}: loramux adapters promote {pushed.model}@{pushed.version}")


@app.command()
def pull(
    model: Annotated[
        str, typer.Argument(metavar="TENANT/ADAPTER[@VERSION]", help="Default: the version that the bare name selects.")
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
    if as_json:
        print_json({**named.document, "versions": versions})
    else:
        print_versions(named.document, versions)


app.command()(merge)
app.command()(promote)
app.command()(rollback)
app.command()(disable)
app.command()(enable)
app.command()(archive)
app.command()(restore)
app.command()(pin)
app.command()(unpin)
app.command()(preload)
