"""`loramux requests`: what runs or waits just now, and ending it."""

from __future__ import annotations

from typing import Annotated

import typer

from loramux.admin.commands.options import AnyTenant, AsJson
from loramux.admin.commands.output import connected, print_json, print_table

app = typer.Typer(no_args_is_help=True, help="See the requests in flight, and cancel one.")


@app.command("list")
def list_requests(tenant: AnyTenant = None, as_json: AsJson = False) -> None:
    """List the requests in flight on every gateway, newest first."""
    with connected(as_json) as client:
        requests = list(client.items("requests", tenant=tenant))
    if as_json:
        print_json({"object": "list", "data": requests})
        return
    print_table(
        ("id", "tenant", "model", "endpoint", "state", "prompt", "completion", "reserved", "age"),
        [
            (
                request["id"],
                request["tenant"],
                request["model"],
                request["endpoint"],
                request["state"],
                request["prompt_tokens"],
                request["completion_tokens"],
                request["reserved_tokens"],
                f"{request['age_s']:.1f} s",
            )
            for request in requests
        ],
    )


@app.command()
def cancel(
    request_id: Annotated[str, typer.Argument(help="The request's identifier, req_...", show_default=False)],
    as_json: AsJson = False,
) -> None:
    """End a request within five seconds; its client is told so, and the tokens so far are paid for."""
    from loramux.admin.client.client import path_part

    with connected(as_json) as client:
        request = client.post(f"requests/{path_part(request_id)}/cancel", {})
    if as_json:
        print_json(request)
    else:
        print(f"{request['id']} is {request['state']}")
