"""The OpenAPI document of a listener: FastAPI's description of the routes, plus the parts that all routes share.


    @router.post("", status_code=201, openapi_extra=takes(NewThing), responses=errors(409))
    async def create_thing(request: Request, services: Services, caller: Writer) -> ThingDocument:
        '''Create a thing. The first sentence is the summary.'''

Handlers read bodies themselves, after authenticating the caller, so `takes` has to describe them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from types import UnionType
from typing import Any, TypeAlias, Union

from fastapi import FastAPI
from fastapi.routing import iter_route_contexts
from pydantic import BaseModel, TypeAdapter

from loramux.platform.requests.openapi_examples import ERROR_EXAMPLES, example_of

Json: TypeAlias = dict[str, Any]
Responses: TypeAlias = dict[int | str, Json]

GENERATION_ERRORS = (404, 409, 429, 503)
"""Error statuses of generation requests, in addition to those that `describe` derives."""
METHODS = ("get", "put", "post", "delete", "patch")
_COMPONENTS = "#/components/schemas/"
_ENVELOPE: Json = {
    "type": "object",
    "required": ["error"],
    "additionalProperties": False,
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type", "param", "code"],
            "additionalProperties": False,
            "properties": {
                "message": {"type": "string", "description": "A human-readable sentence."},
                "type": {"type": "string"},
                "param": {"type": ["string", "null"], "description": "The offending field."},
                "code": {"type": "string", "description": "A stable, machine-readable code."},
            },
        }
    },
}
_IDEMPOTENCY_KEY: Json = {
    "name": "Idempotency-Key",
    "in": "header",
    "required": False,
    "description": "For 24 hours, a repeated call with the same key returns the first successful response and is not "
    "executed again.",
    "schema": {"type": "string", "pattern": "^[!-~]{1,255}$"},
}


@dataclass(frozen=True, slots=True)
class JsonBody:
    """A JSON body that conforms to one of `models`. `example` is None if `describe` makes one."""

    models: tuple[type[BaseModel], ...]
    example: Any

    def described(self) -> Json:
        forms: Any = Union[self.models]  # noqa: UP007 - the models are known only now
        schema = TypeAdapter[Any](forms).json_schema(ref_template=_COMPONENTS + "{model}")
        content: Json = {"schema": schema} if self.example is None else {"schema": schema, "example": self.example}
        is_required = len(self.models) > 1 or bool(schema.get("required"))
        return {"required": is_required, "content": {"application/json": content}}


def takes(model: type[BaseModel], *others: type[BaseModel], example: Any = None) -> Json:
    """For `openapi_extra`: a JSON body that the handler reads. It conforms to one of the models.

    `example` is a body in place of the one that `describe` makes. A model's field should have no examples if others of
    its fields have deep types: schemathesis then combines examples of all of them, and does not end within minutes.
    """
    return {"requestBody": JsonBody((model, *others), example)}


def takes_bytes() -> Json:
    """For `openapi_extra`: a body of raw bytes."""
    schema = {"type": "string", "format": "binary"}
    return {"requestBody": {"required": True, "content": {"application/octet-stream": {"schema": schema}}}}


def answers_bytes() -> Responses:
    """For `responses`: the response is a file."""
    return {200: {"content": {"application/octet-stream": {"schema": {"type": "string", "format": "binary"}}}}}


def answers_vectors(document: type) -> Responses:
    """For `responses`: vectors, as a JSON document or as bytes."""
    return {200: {"model": document, **_vectors_as_bytes()}}


_EVENT: Json = {
    "type": "object",
    "description": "One event of the stream.",
    "properties": {"id": {"type": "string"}, "event": {"type": "string"}, "data": {"type": "string"}},
    "required": ["data"],
}
"""The schema of each event of a stream of server-sent events: https://html.spec.whatwg.org/#server-sent-events"""


def answers(document: type | UnionType, event: str = "", *, has_vectors: bool = False) -> Responses:
    """For `responses`: generated output, as a JSON document or as a stream of events, the first of the type `event`.
    With `has_vectors`, a response can also consist of vectors as bytes.
    """
    example = {"data": '{"object": "chat.completion.chunk"}'}
    if event:
        example = {"event": event, "data": f'{{"type": "{event}"}}'}
    stream: Json = {"schema": _EVENT, "example": example}
    answer = _vectors_as_bytes() if has_vectors else {"content": {}}
    answer["content"]["text/event-stream"] = stream
    return {200: {"model": document, **answer}}


def _vectors_as_bytes() -> Json:
    described: Json = {
        "description": "If `encoding_format` is `bytes`: where each vector is, and the rest of the document, as JSON.",
        "required": False,
        "schema": {"type": "string"},
    }
    content: Json = {"application/octet-stream": {"schema": {"type": "string", "format": "binary"}}}
    return {"content": content, "headers": {"metadata": described}}


def answers_events(kind: str) -> Responses:
    """For `responses`: a stream of events of some types, such as `kind`."""
    example = {"id": "7", "event": kind, "data": f'{{"object": "event", "type": "{kind}", "sequence": 7}}'}
    return {200: {"content": {"text/event-stream": {"schema": _EVENT, "example": example}}}}


def answers_rows(document: type | None = None) -> Responses:
    """For `responses`: a report as CSV, newline-delimited JSON or, with `document`, a JSON document."""
    rows: Json = {"schema": {"type": "string"}, "example": "start_us,end_us,tenant,requests\n"}
    answer: Json = {"content": {"text/csv": rows, "application/x-ndjson": rows}}
    return {200: answer if document is None else {**answer, "model": document}}


def errors(*statuses: int) -> Responses:
    """For `responses`: errors in addition to those that `describe` derives from the route."""
    return {status: {"description": ERROR_EXAMPLES[status][0]} for status in statuses}


def describe(app: FastAPI, *, description: str, public: frozenset[str], is_idempotent: bool = False) -> Json:
    """Build the document.

    Paths in `public` need no key. With `is_idempotent`, POST operations on other paths accept an Idempotency-Key.
    """
    _describe_bodies(app)
    document: Json = app.openapi()
    document["info"]["description"] = description
    components = document.setdefault("components", {})
    schemas = components.setdefault("schemas", {})
    for unused in ("HTTPValidationError", "ValidationError"):
        schemas.pop(unused, None)
    schemas["Error"] = _ENVELOPE
    components["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer", "description": "An API key."}}
    for path, operation, method in operations(document):
        is_public = path in public
        operation["security"] = [] if is_public else [{"key": []}]
        _name(operation)
        _hoist_body(operation, schemas)
        parameters = operation.get("parameters", [])
        has_precondition = any(one["name"] == "If-Match" for one in parameters)
        for one in parameters:
            # A header with this spelling comes from a dependency in `etags.py`, which requires it.
            one["required"] = one["required"] or one["name"] == "If-Match"
        repeats = is_idempotent and method == "post" and not is_public
        if repeats:
            operation["parameters"] = [*parameters, _IDEMPOTENCY_KEY]
        found = _common_errors(operation, is_public, repeats, has_precondition)
        _describe_answers(operation, found, schemas)
    _add_examples(document, schemas)
    return document


def _describe_bodies(app: FastAPI) -> None:
    """Replace what `takes` returned by the bodies' schemas.

    `takes` does not make them, because that is slow and most servers are never asked for the document.
    """
    for route in iter_route_contexts(app.routes):
        extra: Json = getattr(route, "openapi_extra", None) or {}
        if isinstance(body := extra.get("requestBody"), JsonBody):
            extra["requestBody"] = body.described()


def operations(document: Json) -> Iterator[tuple[str, Json, str]]:
    """Yield each operation in a document as its path, its operation object and its method."""
    for path, item in document["paths"].items():
        for method in METHODS:
            if method in item:
                yield path, item[method], method


def _name(operation: Json) -> None:
    text = " ".join(operation.get("description", "").split())
    first, stop, _ = text.partition(". ")
    operation["summary"] = (first + stop).rstrip(". ")
    operation["description"] = text


def _hoist_body(operation: Json, schemas: Json) -> None:
    """Move a body's models to the components, where FastAPI puts the response models."""
    for content in operation.get("requestBody", {}).get("content", {}).values():
        schema = content["schema"]
        schemas.update(schema.pop("$defs", {}))
        if "title" not in schema:
            continue
        schemas[schema["title"]] = schema
        content["schema"] = {"$ref": _COMPONENTS + schema["title"]}


def _common_errors(operation: Json, is_public: bool, repeats: bool, has_precondition: bool) -> set[int]:
    """Return an operation's error statuses, including those that follow from its parameters and body."""
    found = {int(status) for status in operation["responses"] if status.isdigit() and int(status) >= 400}
    # FastAPI adds 422 for invalid input. This server returns 400.
    found.discard(422)
    parameters = operation.get("parameters", [])
    has_body = "requestBody" in operation
    if not is_public:
        # Anthropic's surface answers 529 in place of 503.
        found |= {401, 403, 429} if 529 in found else {401, 403, 429, 503}
    if parameters or has_body or repeats:
        found.add(400)
    if any(one["in"] == "path" or one["name"] in ("tenant", "replica") for one in parameters):
        found.add(404)
    if has_body or repeats:
        found |= {413, 415}
    if repeats:
        found |= {404, 409, 422}
    if has_precondition:
        found |= {412, 428}
    return found


def _describe_answers(operation: Json, statuses: set[int], schemas: Json) -> None:
    answers = operation["responses"]
    answers.pop("422", None)
    for status in sorted(statuses):
        kept = answers.get(str(status), {})
        if "content" in kept and kept.get("content", {}).get("application/json", {}).get("schema"):
            # Some responses with an error status, for example from the health checks, have their own body.
            continue
        meaning, error = ERROR_EXAMPLES[status]
        content = {"schema": {"$ref": _COMPONENTS + "Error"}, "example": {"error": error}}
        answers[str(status)] = {"description": meaning, "content": {"application/json": content}}
    for status, answer in answers.items():
        answer.setdefault("headers", {})["x-request-id"] = {
            "description": "The identifier of this request in logs and usage.",
            "required": True,
            "schema": {"type": "string", "pattern": "^req_[0-9a-f]{32}$"},
        }
        if status == "204":
            answer.pop("content", None)


def _add_examples(document: Json, schemas: Json) -> None:
    """Give every body, response and parameter an example that conforms to its schema."""
    for _, operation, _ in operations(document):
        for part in (operation.get("requestBody", {}), *operation["responses"].values()):
            for content in part.get("content", {}).values():
                schema = content.get("schema", {})
                if "example" not in content and "examples" not in content:
                    content["example"] = example_of(schema, schemas)
        for parameter in operation.get("parameters", []):
            if "example" not in parameter:
                parameter["example"] = example_of(parameter["schema"], schemas, parameter["name"])
