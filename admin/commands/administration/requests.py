"""`loramux requests`: list the requests in flight, and cancel one."""

from __future__ import annotations

from typing import Annotated

import typer

from loramux.admin.commands.options import AnyTenant, AsJson
from loramux.admin.commands.output import Columns, connected, print_list, tell

app = typer.Typer(no_args_is_help=True, help="List the requests in flight, and cancel one.")


@app.command("list")
def list_requests(tenant: AnyTenant = None, as_json: AsJson = False) -> None:
    """List the requests in flight on every gateway, newest first."""
    with connected(as_json) as client:
        requests = client.whole_list("requests", tenant=tenant)
    columns: Columns = {
        "id": "id",
        "tenant": "tenant",
        "model": "model",
        "endpoint": "endpoint",
        "state": "state",
        "prompt": "prompt_tokens",
        "completion": "completion_tokens",
        "reserved": "reserved_tokens",
        "age": lambda request: f"{request['age_s']:.1f} s",
    }
    print_list(requests, columns, as_json)


@app.command()
def cancel(
    request_id: Annotated[str, typer.Argument(help="The request's identifier, req_...")],
    as_json: AsJson = False,
) -> None:
    """Cancel a request, which ends within five seconds. Its client gets an error, and the tokens generated so far are
    charged.
    """
    with connected(as_json) as client:
        request = client.post(client.path("requests", request_id, "cancel"), {})
    tell(request, f"{request['id']} is {request['state']}", as_json)
