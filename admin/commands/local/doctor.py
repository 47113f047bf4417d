"""`loramux doctor`: reports problems and how to fix them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from loramux.admin.commands.options import AsJson, ConfigFile, DatabaseUrl, DataDir
from loramux.admin.commands.output import error_document, fail, print_json
from loramux.admin.exit_codes import REFUSED, WRONG_CALL

if TYPE_CHECKING:
    from loramux.admin.doctor.findings import Finding

MARKS = {"ok": "[green]ok[/green]", "warning": "[yellow]warning[/yellow]", "failed": "[bold red]FAILED[/bold red]"}


def doctor(
    model: Annotated[
        str | None, typer.Option(help="Also check this base model: a directory or a pulled URL.", show_default=False)
    ] = None,
    config: ConfigFile = None,
    data_dir: DataDir = None,
    database_url: DatabaseUrl = None,
    blob_url: Annotated[
        str | None, typer.Option(help="file://DIR or s3://BUCKET/PREFIX (default: in --data-dir).", show_default=False)
    ] = None,
    plan: Annotated[
        str | None,
        typer.Option(
            help="Instead of checking, show how much memory this base model takes in each format. Like --model, it "
            "takes a directory or a pulled URL.",
            show_default=False,
        ),
    ] = None,
    data_parallel_size: Annotated[
        int, typer.Option(min=1, max=64, help="With --plan: the number of engines of the server.")
    ] = 1,
    kv_host_bytes: Annotated[
        str, typer.Option(help="With --plan: the setting of this name, such as 8GiB.", metavar="SIZE")
    ] = "0",
    as_json: AsJson = False,
) -> None:
    """Check this machine, the connection to the server and the server's components. Show how to fix each problem.

    With a server's settings (flags, LORAMUX_* or --config), the command also checks the data directory, the sandbox,
    the database and the object store from this machine. Use this when the server does not start. The exit code is 1 if
    a check failed.
    """
    from loramux.admin.commands.local.model_argument import local_model_path
    from loramux.admin.doctor.doctor import HostSettings
    from loramux.admin.doctor.findings import is_healthy
    from loramux.admin.server.settings import SettingsError, load_settings

    if plan is not None:
        _plan(local_model_path(plan, config, data_dir, as_json), data_parallel_size, _num_bytes(kv_host_bytes), as_json)
        return
    overrides = {
        "model": model,
        "config": config,
        "data_dir": data_dir,
        "database_url": database_url,
        "blob_url": blob_url,
    }
    try:
        settings = load_settings(HostSettings, overrides)
    except SettingsError as error:
        fail(str(error), WRONG_CALL, error_document(str(error), "wrong_settings") if as_json else None)
    # Without settings and a data directory, the server is probably on another machine.
    is_host = bool(settings.model_fields_set) or settings.data_dir.exists()
    findings = []
    for finding in _findings(settings if is_host else None):
        findings.append(finding)
        if not as_json:
            _show(finding)
    is_well = is_healthy(tuple(findings))
    if as_json:
        print_json({"object": "doctor", "healthy": is_well, "findings": [finding.document() for finding in findings]})
    if not is_well:
        raise typer.Exit(REFUSED)


def _findings(settings: object) -> Iterator[Finding]:
    from loramux.admin.client.client import AdminClient, ServerUnreachable
    from loramux.admin.commands.root import chosen_profile
    from loramux.admin.doctor.doctor import SERVER_TIMEOUT_S, HostSettings, check_here, check_host, check_server
    from loramux.admin.doctor.findings import Finding, Grade

    yield from check_here()
    if isinstance(settings, HostSettings):
        yield from check_host(settings)
    try:
        client = AdminClient.from_environment(chosen_profile.get(), timeout_s=SERVER_TIMEOUT_S)
    except ServerUnreachable as error:
        is_asked = chosen_profile.get() is not None
        # The machine of a server need not be configured as a client, so this is only a warning there.
        grade = Grade.FAILED if is_asked or settings is None else Grade.WARNING
        yield Finding(check="server", grade=grade, message="no server is configured", mend=str(error))
        return
    with client:
        yield from check_server(client)


def _show(finding: Finding) -> None:
    from rich.console import Console
    from rich.text import Text

    console = Console(highlight=False, soft_wrap=True)
    mark = Text.from_markup(MARKS[finding.grade.value])
    mark.pad_right(8 - len(mark))
    console.print(Text.assemble(mark, f" {finding.check}: {finding.message}"))
    if finding.mend is not None:
        console.print(Text(f"         to fix it: {finding.mend}"))


def _num_bytes(size: str) -> int:
    from pydantic import ByteSize, TypeAdapter, ValidationError

    try:
        return TypeAdapter(ByteSize).validate_python(size)
    except ValidationError as error:
        raise typer.BadParameter(f"{size!r} is not a size such as 8GiB or 500MB") from error


def _plan(model: Path, num_engines: int, kv_host_bytes: int, as_json: bool) -> None:
    from loramux.admin.doctor.memory_plan import plan_memory, plan_tokens
    from loramux.engine.loop.config import resolve_device
    from loramux.engine.pages.pool_size import in_gib
    from loramux.engine.protocol.errors import ModelNotSupported

    device = resolve_device("auto")
    try:
        plans = plan_memory(model, device, kv_host_bytes=kv_host_bytes)
        tokens = plan_tokens(model, device)
    except ModelNotSupported as error:
        fail(str(error), REFUSED, error_document(str(error), "model_not_supported") if as_json else None)
    if as_json:
        data = [
            {
                "format": plan.format,
                "weights_bytes": plan.weights,
                "pool_bytes": plan.pool,
                "process_bytes": plan.process,
                "kv_host_bytes": plan.kv_host,
                "total_bytes": plan.total_of(num_engines),
                "problem": plan.problem,
            }
            for plan in plans
        ]
        about = {"device": device, "num_engines": num_engines, "pool_tokens": tokens}
        print_json({"object": "memory_plan", **about, "data": data})
        return
    print(f"{model} on {device}; the pool has its default size (set pool_bytes to change it)")
    if num_engines > 1:
        place = ", on a GPU of its own" if device == "cuda" else ""
        print(f"each of the {num_engines} engines has the weights and a pool{place}; the total is that of all engines")
    host = ("host K/V",) if kv_host_bytes else ()
    print(f"{'format':<28}" + "".join(f"{name:>12}" for name in ("weights", "pool", *host, "process", "total")))
    for plan in plans:
        in_host = (plan.kv_host,) if kv_host_bytes else ()
        figures = (plan.weights, plan.pool, *in_host, plan.process, plan.total_of(num_engines))
        sizes = "".join(f"{in_gib(size):>12}" for size in figures)
        print(f"{plan.format:<28}{sizes if plan.problem is None else f'  {plan.problem}'}")
    room = ", ".join(f"{number:,} with --kv-dtype {name}" for name, number in tokens.items())
    print(f"tokens that fit into a pool without adapters: {room}")
