"""`loramux doctor`: reports problems and how to fix them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from loramux.admin.commands.options import AsJson, ConfigFile, DatabaseUrl, DataDir, given_amount
from loramux.admin.commands.output import error_document, fail, print_json, print_text
from loramux.admin.exit_codes import REFUSED, WRONG_CALL

if TYPE_CHECKING:
    from loramux.admin.doctor.findings import Finding
    from loramux.admin.doctor.memory_plan import WorkersPlan

MARKS = {"ok": "[green]ok[/green]", "warning": "[yellow]warning[/yellow]", "failed": "[bold red]FAILED[/bold red]"}


def doctor(
    model: Annotated[str | None, typer.Option(help="Also check this base model: a directory or a pulled URL.")] = None,
    config: ConfigFile = None,
    data_dir: DataDir = None,
    database_url: DatabaseUrl = None,
    blob_url: Annotated[
        str | None, typer.Option(help="file://DIR or s3://BUCKET/PREFIX (default: in --data-dir).")
    ] = None,
    plan: Annotated[
        str | None,
        typer.Option(
            help="Instead of checking, show how much memory this base model takes in each format. Like --model, it "
            "takes a directory or a pulled URL."
        ),
    ] = None,
    data_parallel_size: Annotated[
        int | None, typer.Option(min=1, max=64, help="With --plan: the number of engines of the server (default: 1).")
    ] = None,
    tensor_parallel_size: Annotated[
        int | None,
        typer.Option(
            min=1, max=64, help="With --plan: the number of workers that share the model in each engine (default: 1)."
        ),
    ] = None,
    device: Annotated[
        str | None, typer.Option(help="With --plan: cpu or cuda, also of another machine (default: this machine's).")
    ] = None,
    pool_bytes: Annotated[
        str | None, typer.Option(help="With --plan: the size of an engine's page pool, such as 100GiB.")
    ] = None,
    kv_host_bytes: Annotated[
        str | None, typer.Option(help="With --plan: the setting of this name, such as 8GiB.", metavar="SIZE")
    ] = None,
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
        from loramux.platform.amounts import BYTES_UNIT

        if device not in (None, "cpu", "cuda"):
            raise typer.BadParameter("must be cpu or cuda", param_hint="--device")
        num_bytes = None if pool_bytes is None else given_amount(pool_bytes, BYTES_UNIT, "--pool-bytes")
        host_bytes = 0 if kv_host_bytes is None else given_amount(kv_host_bytes, BYTES_UNIT, "--kv-host-bytes")
        path = local_model_path(plan, config, data_dir, as_json)
        _plan(path, data_parallel_size or 1, tensor_parallel_size or 1, device, num_bytes, host_bytes, as_json)
        return
    only_planned = {
        "--data-parallel-size": data_parallel_size,
        "--tensor-parallel-size": tensor_parallel_size,
        "--device": device,
        "--pool-bytes": pool_bytes,
        "--kv-host-bytes": kv_host_bytes,
    }
    if given := [option for option, value in only_planned.items() if value is not None]:
        raise typer.BadParameter(f"{given[0]} needs --plan")
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

    from loramux.admin.client.safe_text import safe_text

    console = Console(highlight=False, soft_wrap=True)
    mark = Text.from_markup(MARKS[finding.grade.value])
    mark.pad_right(8 - len(mark))
    console.print(Text.assemble(mark, f" {finding.check}: {safe_text(finding.message)}"))
    if finding.mend is not None:
        console.print(Text(f"         to fix it: {safe_text(finding.mend)}"))


def _plan(
    model: Path,
    num_engines: int,
    num_workers: int,
    device: str | None,
    pool_bytes: int | None,
    kv_host_bytes: int,
    as_json: bool,
) -> None:
    from loramux.admin.doctor.memory_plan import plan_memory, plan_tokens, plan_workers
    from loramux.engine.device.machine_limits import free_memory
    from loramux.engine.loop.config import DEFAULT_HOST_TIER_BYTES, resolve_device
    from loramux.engine.pages.pool_size import in_gib
    from loramux.engine.protocol.errors import ConfigNotUsable, EngineError

    own_device = resolve_device("auto")
    device = device or own_device
    # A server on another device is probably planned for another machine.
    available = free_memory() if device == own_device else None
    try:
        plans = plan_memory(model, device, pool_bytes, num_workers=num_workers, kv_host_bytes=kv_host_bytes)
        tokens = plan_tokens(model, device, pool_bytes, num_workers=num_workers)
        workers = plan_workers(model, device, num_workers) if num_workers > 1 else None
    except EngineError as error:
        code = "wrong_settings" if isinstance(error, ConfigNotUsable) else "model_not_supported"
        fail(str(error), REFUSED, error_document(str(error), code) if as_json else None)
    if as_json:
        data = [
            {
                "format": plan.format,
                "weights_bytes": plan.weights,
                "pool_bytes": plan.pool,
                "process_bytes": plan.process,
                "worker_bytes": plan.worker,
                "kv_host_bytes": plan.kv_host,
                "total_bytes": plan.total_of(num_engines),
                "main_memory_bytes": plan.main_memory(device, num_engines),
                "problem": plan.problem,
            }
            for plan in plans
        ]
        sizes = {"num_engines": num_engines, "num_workers": num_workers, "available_bytes": available}
        exchanges = None if workers is None else asdict(workers)
        about = {"object": "memory_plan", "device": device, **sizes, "pool_tokens": tokens, "workers": exchanges}
        print_json({**about, "data": data})
        return
    size = "its default size (set pool_bytes to change it)" if pool_bytes is None else in_gib(pool_bytes)
    print_text(f"{model} on {device}; the pool has {size}")
    if num_engines > 1:
        place = ", on a GPU of its own" if device == "cuda" else ""
        print_text(
            f"each of the {num_engines} engines has the weights and a pool{place}; the total is that of all engines"
        )
    if num_workers > 1:
        print_text(
            f"weights: those of each of the {num_workers} workers; worker: its weights and its share of the pool"
        )
    worker, host = (("worker",) if num_workers > 1 else ()), (("host K/V",) if kv_host_bytes else ())
    columns = ("weights", *worker, "pool", *host, "process", "total")
    print_text(f"{'format':<28}{''.join(f'{name:>12}' for name in columns)}")
    for plan in plans:
        of_worker = (plan.worker,) if num_workers > 1 else ()
        in_host = (plan.kv_host,) if kv_host_bytes else ()
        total = plan.total_of(num_engines)
        figures = (plan.weights, *of_worker, plan.pool, *in_host, plan.process, total)
        row = "".join(f"{in_gib(size):>12}" for size in figures)
        print_text(f"{plan.format:<28}{row if plan.problem is None else f'  {plan.problem}'}")
    room = ", ".join(f"{number:,} with --kv-dtype {name}" for name, number in tokens.items())
    print_text(f"tokens that fit into a pool without adapters: {room}")
    if available is not None:
        needed = {plan.format: plan.main_memory(device, num_engines) for plan in plans if plan.problem is None}
        if sums := [f"{in_gib(size)} for {name}" for name, size in needed.items() if size > available]:
            print_text(
                f"too little main memory: this machine has {in_gib(available)} available, and with a host tier of "
                f"{in_gib(DEFAULT_HOST_TIER_BYTES)} in each engine, the sum is {', '.join(sums)}"
            )
    if workers is not None:
        _show_workers(workers, device)


def _show_workers(plan: WorkersPlan, device: str) -> None:
    from loramux.admin.doctor.memory_plan import ADAPTER_RANK, NUM_ADAPTERS
    from loramux.engine.pages.pool_size import in_gib

    print_text(f"each worker has the whole embedding, {in_gib(plan.embedding_bytes)}")
    print_text(
        f"a decode step adds up outputs {plan.num_sums} times, {plan.sum_bytes / 1024:.1f} KiB for each sequence, and "
        f"joins the logits once, {plan.join_bytes / 1024:.1f} KiB for each sequence"
    )
    print_text(
        f"{NUM_ADAPTERS} adapters of rank {ADAPTER_RANK} on all linear layers add no exchange; they take "
        f"{in_gib(plan.adapter_bytes)} in each worker's share of the pool, or {in_gib(plan.whole_adapter_bytes)} in a "
        "pool that is not divided"
    )
    if device == "cuda":
        print_text("tensor parallelism has not been run on GPUs yet, so this plan is only computed")
