"""Reads request bodies, with limits on size and time, as strict JSON that is validated against a model."""

from __future__ import annotations

import asyncio
import zlib
from collections.abc import Awaitable, Callable, Iterable, Iterator
from itertools import zip_longest
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails
from starlette.requests import ClientDisconnect, Request

from loramux.adapter_store.formats.files.strict_json import InvalidJson, parse_strict_json
from loramux.platform.bodies import unsupported_fields
from loramux.platform.bodies.strict_model import StrictModel
from loramux.platform.errors import InvalidRequest, PayloadTooLarge, UnsupportedEncoding

M = TypeVar("M", bound=BaseModel)
T = TypeVar("T")

BODY_TIMEOUT_S = 60.0
"""Timeout for receiving a whole body, in seconds."""
BODY_STALL_S = 10.0
"""Longest pause while a client sends a body, in seconds."""
MAX_PARSED_AT_ONCE = 64 * 1024
"""Largest body parsed on the event loop, in bytes. Parsing it takes under a millisecond. Larger bodies are parsed on a
thread.
"""

DECOMPRESSED_AT_ONCE = 64 * 1024
"""Number of bytes decompressed before other requests get a turn, which takes a fraction of a millisecond."""

GZIP = frozenset({"gzip", "x-gzip"})
"""Names of the only content coding that is supported (RFC 9110, section 8.4.1.3)."""

_GZIP_WINDOW = 31
"""zlib's `wbits` for a gzip stream with a window of any size."""

_CODES = {"missing": "missing_required_parameter", "extra_forbidden": "unknown_parameter"}


async def read_body(request: Request, max_bytes: int) -> bytes:
    """Read the whole body, once per request. A body with the content coding gzip is decompressed.

    Raises UnsupportedEncoding for other content codings, PayloadTooLarge as soon as the body exceeds the limit before
    or after it is decompressed, or InvalidRequest if it arrives too slowly, is incomplete or is not gzip.
    """
    encoding = content_encoding(request, GZIP)
    too_large = PayloadTooLarge(f"the body must not exceed {max_bytes} bytes")
    declared = request.headers.get("content-length", "")
    # Count the digits first, so that a number with thousands of digits is not parsed.
    if declared.isdecimal() and (len(declared) > 18 or int(declared) > max_bytes):
        raise too_large
    chunks, size = [], 0
    loop = asyncio.get_running_loop()
    try:
        async with asyncio.timeout(min(BODY_STALL_S, BODY_TIMEOUT_S)) as limit:
            end_s = loop.time() + BODY_TIMEOUT_S
            is_whole = False
            while not is_whole:
                message = await request.receive()
                if message["type"] == "http.disconnect":
                    raise ClientDisconnect
                chunk, is_whole = message.get("body", b""), not message.get("more_body", False)
                size += len(chunk)
                if size > max_bytes:
                    raise too_large
                chunks.append(chunk)
                # Most bodies arrive whole, and need no further timer.
                if not is_whole:
                    limit.reschedule(min(loop.time() + BODY_STALL_S, end_s))
    except TimeoutError:
        raise InvalidRequest(
            f"the body took more than {BODY_TIMEOUT_S:g} s, or stalled for {BODY_STALL_S:g} s", code="body_timeout"
        ) from None
    except ClientDisconnect:
        raise InvalidRequest("the body ended early", code="incomplete_body") from None
    body = b"".join(chunks)
    if not encoding:
        return body
    try:
        return await _decompressed(body, max_bytes, too_large)
    except zlib.error:
        raise InvalidRequest("the body is not gzip, or is incomplete", code="invalid_gzip") from None


def content_encoding(request: Request, supported: frozenset[str] = frozenset()) -> str:
    """Return the body's content coding, or "" if it has none. Raises UnsupportedEncoding."""
    encoding = request.headers.get("content-encoding", "").strip().lower()
    if encoding in ("", "identity"):
        return ""
    if encoding not in supported:
        instead = "send it with the content coding gzip, or without any" if supported else "send it without any"
        raise UnsupportedEncoding(
            f"the body cannot have the content coding {encoding[:64]!r}: {instead}",
            param="Content-Encoding",
            headers={"accept-encoding": "gzip" if supported else "identity"},
        )
    return encoding


async def _decompressed(body: bytes, max_bytes: int, too_large: PayloadTooLarge) -> bytes:
    """Decompress a gzip stream, in short steps. Raises zlib.error."""
    stream, parts, size = zlib.decompressobj(_GZIP_WINDOW), [], 0
    while not stream.eof:
        part = stream.decompress(body, DECOMPRESSED_AT_ONCE)
        body = stream.unconsumed_tail
        if not part and not body and not stream.eof:
            raise zlib.error("the stream is incomplete")
        parts.append(part)
        size += len(part)
        # A few bytes can expand to gigabytes.
        if size > max_bytes:
            raise too_large
        await asyncio.sleep(0)
    if stream.unused_data:
        raise zlib.error("the stream is followed by other bytes")
    return b"".join(parts)


async def parse_body_on(
    compute: Callable[[Callable[[], T]], Awaitable[T]], body: bytes, parse: Callable[[dict[str, Any]], T]
) -> T:
    """Parse a JSON object and call `parse` on it. If the body is long, `compute` runs both on a thread."""

    def parsed() -> T:
        return parse(parse_object(body))

    return parsed() if len(body) <= MAX_PARSED_AT_ONCE else await compute(parsed)


def parse_body(body: bytes, model: type[M]) -> M:
    return validated(parse_object(body), model)


def parse_object(body: bytes) -> dict[str, Any]:
    try:
        document = parse_strict_json(body)
    except InvalidJson as error:
        raise InvalidRequest(f"the body is not valid JSON: {error}", code="invalid_json") from None
    if not isinstance(document, dict):
        raise InvalidRequest("the body must be a JSON object", code="invalid_json")
    return document


def validated(document: dict[str, Any], model: type[M]) -> M:
    """Validate a parsed body. Raises InvalidRequest with the offending field's name."""
    try:
        return model.model_validate(document)
    except ValidationError as error:
        found = error.errors(include_url=False, include_context=False, include_input=False)
        # A field of another server often takes the place of the one that is missing.
        replacing = (one for one in found if one["type"] == "extra_forbidden" and _is_unsupported(one["loc"], model))
        first = next(replacing, found[0]) if found[0]["type"] == "missing" else found[0]
        raise _refusal(first, model, document) from None


def _refusal(error: ErrorDetails, model: type[BaseModel], document: dict[str, Any]) -> InvalidRequest:
    kind = error["type"]
    param = _path(_fields(error["loc"], document, is_missing=kind == "missing"))
    if kind == "extra_forbidden" and _is_unsupported(error["loc"], model):
        reason = unsupported_fields.REASONS.get(param)
        message = f"{param} is not supported: {reason}" if reason else f"{param} is not supported"
        return InvalidRequest(message, param=param, code="unsupported_parameter")
    if kind == "missing":
        message = f"{param} is required"
    elif kind == "extra_forbidden":
        near = unsupported_fields.NEAR.get(param)
        message = f"{param} is not a parameter of this call"
        if near in model.model_fields:
            message += f": use `{near}`"
    else:
        message = f"{param}: {error['msg'].removeprefix('Value error, ')}"
    code = _CODES.get(kind, "invalid_type" if kind.endswith("_type") else "invalid_value")
    return InvalidRequest(message, param=param, code=code)


def _is_unsupported(location: tuple[int | str, ...], model: type[BaseModel]) -> bool:
    """Return whether another server has the field."""
    if not issubclass(model, StrictModel):
        return False
    return location[-1] in (model.NEUTRAL if len(location) == 1 else unsupported_fields.NESTED)


def _fields(location: tuple[int | str, ...], document: Any, *, is_missing: bool) -> Iterator[int | str]:
    """Yield the parts of an error's location that are keys and indices of the document.

    Where a field has several types, pydantic adds the name of the type to the location. It can also be a key.
    """
    parts = location[:-1] if is_missing else location
    for part, after in zip_longest(parts, parts[1:]):
        is_tag = _has(document, "type") and document["type"] == part and _has(document, after)
        if _has(document, part) and not (is_tag and not _has(document[part], after)):
            yield part
            document = document[part]
    if is_missing:
        yield location[-1]


def _has(document: Any, part: int | str | None) -> bool:
    if isinstance(document, list):
        return isinstance(part, int) and part < len(document)
    return isinstance(document, dict) and part in document


def _path(location: Iterable[int | str]) -> str:
    """Format `("messages", 0, "role")` as `messages[0].role`, truncating long names."""
    path = ""
    for part in location:
        if isinstance(part, int):
            path += f"[{part}]"
        else:
            name = part[:100]
            path += f".{name}" if path else name
    return path
