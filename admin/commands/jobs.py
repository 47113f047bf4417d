"""`loramux jobs`: the validations of uploads that run, wait or have ended."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

import typer

from loramux.admin.commands.options import AnyTenant, AsJson
from loramux.admin.commands.output import connected, print_json, print_table, shown_time

app = typer.Typer(no_args_is_help=True, help="See what is being validated.")


class State(StrEnum):
    """How far a job is."""

    QUEUED = "queued"
    RUNNING = "running"
    SUCCEEDED = "succeeded"
    FAILED = "failed"


@app.command("list")
def list_jobs(
    tenant: AnyTenant = None,
    state: Annotated[
        State | None,
        typer.Option(help="Only jobs in this state (default: those that are not finished).", show_default=False),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """List validations, newest first."""
    with connected(as_json) as client:
        jobs = list(client.items("jobs", tenant=tenant, state=state and state.value))
    if as_json:
        print_json({"object": "list", "data": jobs})
        return
    print_table(
        ("id", "version", "state", "error", "made", "finished"),
        [
            (
                job["id"],
                f"{job['model']}@{job['version']}",
                job["state"],
                job["error"] and job["error"]["code"],
                shown_time(job["created_at"]),
                shown_time(job["finished_at"]),
            )
            for job in jobs
        ],
    )


@app.command()
def show(
    job_id: Annotated[str, typer.Argument(help="The job's identifier, job_...", show_default=False)],
    as_json: AsJson = False,
) -> None:
    """Show one validation, also when it has ended."""
    from loramux.admin.client.client import path_part

    with connected(as_json) as client:
        job = client.get(f"jobs/{path_part(job_id)}")
    if as_json:
        print_json(job)
        return
    rows = [(name, job[name]) for name in ("id", "state", "version_id", "server_id")]
    rows.insert(0, ("version", f"{job['model']}@{job['version']}"))
    if job["error"]:
        rows += [(f"error {name}", value) for name, value in job["error"].items()]
    print_table(("fact", "value"), rows)
