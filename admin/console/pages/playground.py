"""Sends questions to one or two versions, side by side, at the tenant's expense."""

from __future__ import annotations

from typing import Any, Literal

import msgspec
from pydantic import BaseModel, ConfigDict, Field
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from loramux.admin.console.rest_calls import RestError
from loramux.admin.console.visit import Visit
from loramux.platform.accounts.model_names import INFERENCE_SCOPES
from loramux.platform.bodies.request_body import parse_body, read_body
from loramux.platform.errors import InvalidRequest, PermissionDenied, Unavailable

KEY_LIFETIME_S = 3600
MAX_BODY_BYTES = 256 * 1024
MAX_TURNS = 200


class _Sent(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)


class Turn(_Sent):
    """An earlier message of the conversation."""

    role: Literal["user", "assistant"]
    content: str


class Question(_Sent):
    """A question to one of the two models that the page can compare."""

    tenant: str = Field(max_length=64)
    model: str = Field(max_length=200)
    message: str
    history: list[Turn] = Field(default=[], max_length=MAX_TURNS)
    """The turns before the message, oldest first."""
    system: str
    max_tokens: int = Field(ge=1)
    temperature: float = Field(ge=0, le=2)
    json_schema: str = ""
    """JSON schema for the answer, as text. Empty for a free-form answer."""
    tools: str = ""
    """A JSON list of functions that the model may call, as text. Empty for none."""


async def show(visit: Visit) -> Response:
    principal = visit.session.principal
    tenant = visit.query("tenant") or principal.tenant_slug
    models: list[str] = []
    if tenant is not None:
        try:
            models = [model["id"] for model in (await visit.rest.get("/models", tenant=tenant))["data"]]
        except RestError as error:
            if error.status != 404:
                raise
    return visit.page(
        "playground.html",
        tenant=tenant,
        models=models,
        # The base is the first model. It is worth comparing with, but an adapter is what the tenant came for.
        first=visit.query("a") or next((model for model in models if "/" in model), models[0] if models else ""),
        second=visit.query("b") or "",
        has_gateway=visit.site.services.gateway is not None,
    )


async def stream(visit: Visit) -> Response:
    """Ask the gateway in this process, with a tenant key that is valid for an hour or until the session ends."""
    # A person who loses the right to create keys must not go on with a key from before.
    if not visit.may_change:
        raise PermissionDenied("the playground needs an administrator's key or role")
    question = parse_body(await read_body(visit.request, MAX_BODY_BYTES), Question)
    gateway = visit.site.services.gateway
    if gateway is None:
        raise Unavailable("this server does not serve model calls")
    messages = [{"role": "system", "content": question.system}] if question.system.strip() else []
    messages += [{"role": turn.role, "content": turn.content} for turn in question.history]
    messages.append({"role": "user", "content": question.message})
    body = {
        "model": question.model,
        "messages": messages,
        "max_tokens": question.max_tokens,
        "temperature": question.temperature,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    if question.json_schema.strip():
        body["structured_outputs"] = {"json": question.json_schema}
    if question.tools.strip():
        try:
            body["tools"] = msgspec.json.decode(question.tools)
        except (msgspec.DecodeError, RecursionError) as error:
            raise InvalidRequest(f"the tools are not JSON: {error}", param="tools") from error
    secret = await _key(visit, question.tenant)
    return _Asked(gateway, visit.request, msgspec.json.encode(body), secret)


async def _key(visit: Visit, tenant: str) -> str:
    """Return the session's key for the tenant's models.

    The first question creates the key. A question in the last minute before its expiry, or after its end, replaces it.
    """
    principal = visit.session.principal
    slug = principal.tenant_slug or tenant
    if not slug:
        raise InvalidRequest("enter the tenant that pays for the answer", param="tenant")
    held = visit.session.playground_keys.get(slug)
    now_s = visit.site.services.database.now_us() // 1_000_000
    if held is not None and held.expires_s - 60 > now_s:
        services = visit.site.services
        if await services.call(services.accounts.api_keys.authenticate, held.secret) is not None:
            return held.secret
    body: dict[str, Any] = {
        "tenant": slug,
        "name": "console playground",
        "scopes": sorted(INFERENCE_SCOPES),
        "expires_in_s": KEY_LIFETIME_S,
    }
    made = await visit.rest.post("/api_keys", body)
    visit.session.keep_playground_key(slug, made["id"], made["secret"], now_s + KEY_LIFETIME_S)
    return str(made["secret"])


class _Asked(Response):
    """Streams the gateway's response unchanged to the browser. A disconnect cancels the request."""

    def __init__(self, gateway: Any, request: Request, body: bytes, secret: str) -> None:
        super().__init__()
        self._gateway = gateway
        self._request = request
        self._body: bytes | None = body
        self._secret = secret

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        path = "/v1/chat/completions"
        headers = [(b"content-type", b"application/json"), (b"authorization", f"Bearer {self._secret}".encode())]
        asked = {
            "type": "http",
            "asgi": scope["asgi"],
            "http_version": "1.1",
            "method": "POST",
            "scheme": scope["scheme"],
            "path": path,
            "raw_path": path.encode(),
            "query_string": b"",
            "root_path": "",
            "headers": headers,
            "client": scope.get("client"),
            "server": scope.get("server"),
            "state": {},
        }

        async def receive_body() -> Message:
            if self._body is not None:
                body, self._body = self._body, None
                return {"type": "http.request", "body": body, "more_body": False}
            return await self._request.receive()

        await self._gateway(asked, receive_body, send)
