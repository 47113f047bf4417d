"""`loramux jobs`: queued, running and finished validations of uploads."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

import typer

from loramux.admin.commands.options import AnyTenant, AsJson
from loramux.admin.commands.output import Columns, connected, print_json, print_list, print_table, time_in

app = typer.Typer(no_args_is_help=True, help="List and show validation jobs.")


class State(StrEnum):
    """A job's progress."""

    QUEUED = "queued"
    RUNNING = "running"
    SUCCEEDED = "succeeded"
    FAILED = "failed"


@app.command("list")
def list_jobs(
    tenant: AnyTenant = None,
    state: Annotated[State | None, typer.Option(help="Only jobs in this state (default: unfinished jobs).")] = None,
    as_json: AsJson = False,
) -> None:
    """List validation jobs, newest first."""
    with connected(as_json) as client:
        jobs = client.whole_list("jobs", tenant=tenant, state=state and state.value)
    columns: Columns = {
        "id": "id",
        "version": lambda job: f"{job['model']}@{job['version']}",
        "state": "state",
        "error": lambda job: job["error"] and job["error"]["code"],
        "made": time_in("created_at"),
        "finished": time_in("finished_at"),
    }
    print_list(jobs, columns, as_json)


@app.command()
def show(
    job_id: Annotated[str, typer.Argument(help="The job's identifier, job_...")],
    as_json: AsJson = False,
) -> None:
    """Show one validation job in any state."""
    with connected(as_json) as client:
        job = client.get(client.path("jobs", job_id))
    if as_json:
        print_json(job)
        return
    rows = [(name, job[name]) for name in ("id", "state", "server_id")]
    rows.insert(0, ("version", f"{job['model']}@{job['version']}"))
    if job["error"]:
        rows += [(f"error {name}", value) for name, value in job["error"].items()]
    print_table(("fact", "value"), rows)
