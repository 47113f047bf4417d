"""Lets web pages of other origins call the OpenAI API (CORS, https://fetch.spec.whatwg.org/#http-cors-protocol)."""

from __future__ import annotations

from collections.abc import Collection

from starlette.datastructures import Headers
from starlette.middleware.cors import CORSMiddleware
from starlette.responses import Response
from starlette.types import ASGIApp

from loramux.platform.errors import InvalidRequest
from loramux.platform.requests.error_responses import error_response

MAX_AGE_S = 600
"""How long a browser can reuse the answer to a preflight request, in seconds."""


class CrossOrigin(CORSMiddleware):
    """Answers preflight requests, and adds the headers that let pages of `origins` read the responses.

    `origins` are strings such as `https://app.example.com`, or `*` for every origin. Cookies are never allowed, because
    the API does not use them. Pages must send a key like any other client.
    """

    def __init__(self, app: ASGIApp, origins: Collection[str]) -> None:
        super().__init__(
            app,
            allow_origins=origins,
            allow_methods=("GET", "POST", "DELETE"),
            # OpenAI's clients send headers with the names and versions of their platform.
            allow_headers=("*",),
            expose_headers=("*",),
            allow_private_network=True,
            max_age=MAX_AGE_S,
        )

    def preflight_response(self, request_headers: Headers) -> Response:
        response = super().preflight_response(request_headers)
        if response.status_code == 200:
            return response
        return error_response(
            InvalidRequest(
                "pages of this origin may not make this call: see the setting cors_origins",
                param="Origin",
                code="origin_not_allowed",
                headers={"vary": response.headers["vary"]},
            )
        )
