"""`loramux cluster`: the replicas that a Ray cluster runs for `loramux serve --cluster`."""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import redirect_stdout
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer

from loramux.admin.commands.local.serve import Model, ServedName
from loramux.admin.commands.options import AsJson, ConfigFile, DataDir
from loramux.admin.commands.output import error_document, fail, tell
from loramux.admin.exit_codes import REFUSED, WRONG_CALL

if TYPE_CHECKING:
    from loramux.admin.server.settings import ClusterSettings

app = typer.Typer(no_args_is_help=True, help="Start, show or stop engines in a Ray cluster.")
ResultT = TypeVar("ResultT")

Cluster = Annotated[str | None, typer.Option(help="local, or HOST:PORT of the cluster's head (default: local).")]


@app.command()
def up(
    context: typer.Context,
    model: Model = None,
    config: ConfigFile = None,
    data_dir: DataDir = None,
    cluster: Cluster = None,
    replicas: Annotated[int | None, typer.Option(help="Number of engines (default: 1).")] = None,
    max_replicas: Annotated[
        int | None, typer.Option(help="Let the number grow with the work, up to this number.")
    ] = None,
    dtype: Annotated[str | None, typer.Option(help="auto, float32 or bfloat16 (default: auto).")] = None,
    quantization: Annotated[str | None, typer.Option(help="int8, int4 or fp8, as for 'loramux serve'.")] = None,
    device: Annotated[str | None, typer.Option(help="auto, cpu or cuda (default: auto).")] = None,
    tensor_parallel_size: Annotated[
        int | None, typer.Option(help="Number of processes that divide each engine's base among them (default: 1).")
    ] = None,
    blob_url: Annotated[
        str | None, typer.Option(help="file://DIR or s3://BUCKET/PREFIX (default: in --data-dir).")
    ] = None,
    served_name: ServedName = None,
    as_json: AsJson = False,
) -> None:
    """Start engines in a Ray cluster, or replace them one after the other if their settings have changed.

    With --cluster local, a cluster of this machine is started first. Start 'loramux serve --cluster' with the same
    settings.
    """
    from loramux.admin.errors import StartRefused
    from loramux.admin.server.settings import LOCAL_CLUSTER, Settings, SettingsError, load_settings
    from loramux.admin.serving.cluster_deployment import bring_up

    own = ("replicas", "max_replicas", "as_json")
    given = {name: value for name, value in context.params.items() if name not in own}
    given |= {"cluster_replicas": replicas, "cluster_max_replicas": max_replicas}
    try:
        settings = load_settings(Settings, given)
        if settings.cluster is None:
            settings = settings.model_copy(update={"cluster": LOCAL_CLUSTER})
        # With --json, the progress and the log do not belong to the output.
        with redirect_stdout(sys.stderr if as_json else sys.stdout):
            address = bring_up(settings)
    except (SettingsError, StartRefused) as error:
        fail(str(error), WRONG_CALL, error_document(str(error), "cluster_unavailable") if as_json else None)
    name = settings.resolved_served_name
    sentence = (
        f"the cluster at {address} runs {name}\n"
        f"start a server with the same settings: loramux serve --cluster {settings.cluster}"
    )
    tell({"object": "cluster", "state": "running", "address": address, "served_name": name}, sentence, as_json)


@app.command()
def status(
    config: ConfigFile = None, data_dir: DataDir = None, cluster: Cluster = None, as_json: AsJson = False
) -> None:
    """Show the state of the engines, as Ray Serve reports it. Exit with 1 unless all of them run."""
    from loramux.admin.serving.cluster_deployment import read_status

    found = _called(read_status, config=config, data_dir=data_dir, cluster=cluster, as_json=as_json)
    numbers = ", ".join(f"{number} {state.lower()}" for state, number in sorted(found.replicas.items()))
    line = f"{found.address}: {found.state.lower()}" + (f", {numbers}" if numbers else "")
    document = {
        "object": "cluster",
        "address": found.address,
        "state": found.state,
        "message": found.message,
        "replicas": dict(found.replicas),
    }
    tell(document, f"{line}\n{found.message}" if found.message else line, as_json)
    if found.state != "RUNNING":
        raise typer.Exit(REFUSED)


@app.command()
def down(config: ConfigFile = None, data_dir: DataDir = None, cluster: Cluster = None, as_json: AsJson = False) -> None:
    """Stop the engines. A cluster that 'loramux cluster up' has started is stopped, too."""
    from loramux.admin.serving.cluster_deployment import take_down

    sentence = _called(take_down, config=config, data_dir=data_dir, cluster=cluster, as_json=as_json)
    tell({"object": "cluster", "state": "stopped"}, sentence, as_json)


def _called(call: Callable[[ClusterSettings], ResultT], *, as_json: bool, **given: Any) -> ResultT:
    from loramux.admin.errors import StartRefused
    from loramux.admin.server.settings import ClusterSettings, SettingsError, load_settings

    try:
        return call(load_settings(ClusterSettings, given))
    except (SettingsError, StartRefused) as error:
        fail(str(error), WRONG_CALL, error_document(str(error), "cluster_unavailable") if as_json else None)
