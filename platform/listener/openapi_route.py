"""A listener's app, whose `/openapi.json` only authenticated callers can read."""

from __future__ import annotations

import asyncio
import threading
from dataclasses import dataclass
from importlib.metadata import version
from typing import Any

from fastapi import APIRouter, FastAPI, Request
from fastapi.params import Depends
from fastapi.routing import APIRoute
from starlette.responses import Response

from loramux.platform.requests.error_responses import json_response
from loramux.platform.requests.openapi import describe


def operation_id(route: APIRoute) -> str:
    return route.name


def listener_app(title: str) -> FastAPI:
    """Return an app without routes. FastAPI's own routes for the document, which are public, are off. So is its own
    telemetry, which takes time for each call.
    """
    return FastAPI(
        title=title,
        version=version("loramux"),
        openapi_url=None,
        docs_url=None,
        redoc_url=None,
        generate_unique_id_function=operation_id,
        telemetry={"tracing": False, "metrics": False, "logs": False},
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class ListenerDocument:
    """The parts of a listener's OpenAPI document that do not come from its routes."""

    description: str
    public: frozenset[str]
    """Paths that need no key."""
    readers: str
    """A sentence that says who can read the document."""
    is_idempotent: bool = False
    """Whether POST operations that need a key accept an Idempotency-Key."""

    def of(self, app: FastAPI) -> dict[str, Any]:
        return describe(app, description=self.description, public=self.public, is_idempotent=self.is_idempotent)

    def router(self, caller: Depends) -> APIRouter:
        """Return a router that serves the document to callers that the dependency `caller` admits."""
        router = APIRouter()

        @router.get(
            "/openapi.json",
            tags=["server"],
            response_model=dict[str, Any],
            description=f"This document. {self.readers}",
            dependencies=[caller],
        )
        async def get_openapi_document(request: Request) -> Response:
            body = getattr(request.app.state, "openapi_body", None)
            if body is None:
                body = await asyncio.to_thread(described, request.app)
            return Response(body, media_type="application/json")

        # Describing all routes takes half a second. Meanwhile, other requests go on.
        describing = threading.Lock()

        def described(app: FastAPI) -> bytes:
            with describing:
                if not hasattr(app.state, "openapi_body"):
                    app.state.openapi_body = json_response(self.of(app)).body
                body: bytes = app.state.openapi_body
                return body

        return router
