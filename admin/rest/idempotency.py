"""`Idempotency-Key`: a POST repeated with the same key runs only once and returns the first call's response.

Every POST route that declares a caller from `access.py` is covered, without any code in the route. A call that is
refused or fails is not stored, so its key can be used again.
"""

from __future__ import annotations

import hashlib
import json
import re

import structlog
from fastapi import Request
from sqlalchemy.exc import SQLAlchemyError
from starlette.datastructures import Headers
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from loramux.admin.rest.bodies import body_of
from loramux.admin.rest.services import AdminServices
from loramux.admin.server.idempotency_keys import Claim, IdempotencyKeys, StoredAnswer
from loramux.platform.errors import InvalidRequest

HEADER = "idempotency-key"
REPLAYED = "idempotent-replayed"
_KEY = re.compile(r"[\x21-\x7e]{1,255}")
_KEPT_HEADERS = ("content-type", "etag", "location")
_SECRET_FIELDS = ("secret",)
"""Fields that are shown only once. They are not stored, and are null when the response is repeated."""

_EXPIRES_US = "idempotent_answer_expires_us"

log = structlog.get_logger()


def keep_answer_until(request: Request, expires_us: int) -> None:
    """Store this call's response only until `expires_us`, when secrets in it, such as presigned URLs, expire.

    A call repeated after that time runs again.
    """
    setattr(request.state, _EXPIRES_US, expires_us)


class Replayed(Exception):
    """The call has already been made. `answer` is the stored response."""

    def __init__(self, answer: StoredAnswer) -> None:
        super().__init__("this call has already been made")
        self.answer = answer


async def begin(request: Request, services: AdminServices, principal: str) -> None:
    """Claim the idempotency key of a POST, if the call has one, for the principal.

    Raises Replayed if this call has already been made, and InvalidRequest for an invalid header. Also raises the errors
    of `IdempotencyKeys.claim`.
    """
    key = request.headers.get(HEADER)
    if request.method != "POST" or key is None:
        return
    if len(request.headers.getlist(HEADER)) > 1 or _KEY.fullmatch(key) is None:
        raise InvalidRequest(
            "an Idempotency-Key is a single string of 1 to 255 visible ASCII characters",
            param="Idempotency-Key",
            code="invalid_idempotency_key",
        )
    sent = hashlib.sha256()
    for part in (request.url.path.encode(), request.url.query.encode(), await body_of(request)):
        sent.update(len(part).to_bytes(8, "big") + part)
    claimed = await services.call(services.idempotency_keys.claim, principal, key, sent.digest())
    if isinstance(claimed, StoredAnswer):
        raise Replayed(claimed)
    request.state.idempotency_claim = claimed


async def answer_again(_: Request, error: Exception) -> Response:
    """The exception handler for Replayed."""
    assert isinstance(error, Replayed)
    answer = error.answer
    return Response(answer.body, answer.status, {**answer.headers, REPLAYED: "true"})


class IdempotentAnswers:
    """ASGI middleware that stores the response to a successful call with a claimed key before sending it to the client.
    If the call was refused or failed, it releases the key.
    """

    def __init__(self, app: ASGIApp, services: AdminServices) -> None:
        self._app = app
        self._services = services

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] != "POST":
            await self._app(scope, receive, send)
            return
        start: Message | None = None
        body = b""

        async def send_kept(message: Message) -> None:
            nonlocal start, body
            claim: Claim | None = scope["state"].get("idempotency_claim")
            if claim is None:
                await send(message)
            elif message["type"] == "http.response.start":
                start = message
            elif message["type"] == "http.response.body":
                body += message.get("body", b"")
                if not message.get("more_body", False):
                    assert start is not None
                    await self._end(claim, start, body, scope["state"].get(_EXPIRES_US))
                    await send(start)
                    await send({"type": "http.response.body", "body": body})

        try:
            await self._app(scope, receive, send_kept)
        except Exception:
            claim = scope["state"].get("idempotency_claim")
            if claim is not None:
                await self._call(self._services.idempotency_keys.release, claim)
            raise

    async def _end(self, claim: Claim, start: Message, body: bytes, expires_us: int | None) -> None:
        keys: IdempotencyKeys = self._services.idempotency_keys
        if not 200 <= start["status"] < 300:
            await self._call(keys.release, claim)
            return
        headers = Headers(raw=start["headers"])
        kept = {name: headers[name] for name in _KEPT_HEADERS if name in headers}
        answer = StoredAnswer(start["status"], kept, _without_secrets(body))
        await self._call(keys.complete, claim, answer, expires_us)

    async def _call(self, function: object, *args: object) -> None:
        try:
            await self._services.call(function, *args)  # type: ignore[arg-type]
        except SQLAlchemyError as error:
            # The key stays claimed. For RUNNING_US, repeated calls are told that the first one is still running. After
            # that, and until the key expires, they are told that its outcome is unknown.
            log.warning("an idempotency key could not be written", error=str(error))


def _without_secrets(body: bytes) -> bytes:
    if not any(f'"{name}"'.encode() in body for name in _SECRET_FIELDS):
        return body
    document = json.loads(body)
    return json.dumps({**document, **{name: None for name in _SECRET_FIELDS if name in document}}).encode()
