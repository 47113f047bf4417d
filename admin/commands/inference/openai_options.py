"""The options with which a command finds an OpenAI API."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from loramux.admin.commands.output import error_document, fail
from loramux.admin.exit_codes import UNREACHABLE

if TYPE_CHECKING:
    from loramux.admin.client.openai_server import OpenAIServer

OpenAIUrl = Annotated[
    str | None,
    typer.Option(
        "--url",
        help="Address of the OpenAI API (default: OPENAI_BASE_URL, or http://127.0.0.1:8000/v1 for a loramux key).",
    ),
]
ApiKey = Annotated[
    str | None,
    typer.Option(
        "--api-key",
        help="A key (default: OPENAI_API_KEY). Other users of this machine can see it in the list of processes.",
    ),
]


def openai_server(url: str | None, api_key: str | None, as_json: bool = False) -> OpenAIServer:
    """Return the server that a command calls. Exits if none is configured."""
    from loramux.admin.client.openai_server import find_openai_server
    from loramux.admin.client.server_address import NoServerNamed
    from loramux.admin.commands.root import chosen_profile

    try:
        return find_openai_server(url, api_key, chosen_profile.get())
    except NoServerNamed as error:
        fail(str(error), UNREACHABLE, error_document(str(error), "no_server") if as_json else None)
