"""The OpenAI listener."""

from __future__ import annotations

from functools import cache
from importlib.metadata import version

from fastapi import APIRouter, Depends, FastAPI
from starlette.responses import Response
from typing_extensions import TypedDict

from loramux.platform.batches import batches, files
from loramux.platform.batches.services import BatchServices
from loramux.platform.listener import invocations, models
from loramux.platform.listener.cross_origin import CrossOrigin
from loramux.platform.listener.direct_routes import DirectRoutes
from loramux.platform.listener.error_forms import error_form
from loramux.platform.listener.health import HEALTH_PATHS, add_health
from loramux.platform.listener.openapi_route import ListenerDocument, listener_app, operation_id
from loramux.platform.listener.root_path import RootPath
from loramux.platform.listener.trace_middleware import TraceMiddleware
from loramux.platform.messages_api import messages
from loramux.platform.openai_api import batch_chat, chat, completions, load, stored_chats, tokenization
from loramux.platform.pooling_api import classification, cohere_embeddings, embeddings, pooling, scores
from loramux.platform.requests.authentication import Caller, authenticated
from loramux.platform.requests.error_responses import ErrorResponses, install_error_handling, json_response
from loramux.platform.requests.services import GatewayServices
from loramux.platform.responses_api import conversations, responses, stored_responses
from loramux.platform.runtime_adapters import routes as runtime_routes
from loramux.platform.runtime_adapters.runtime_adapters import RuntimeAdapters
from loramux.platform.telemetry.http_metrics import HttpMetrics, counting_endpoints

ENDPOINTS = {
    "/v1/completions": "completions",
    "/v1/chat/completions": "chat",
    "/v1/embeddings": "embeddings",
    "/v1/embed": "embeddings",
    "/v2/embed": "embeddings",
    "/classify": "classify",
    "/v1/classify": "classify",
    "/score": "score",
    "/v1/score": "score",
    "/rerank": "rerank",
    "/v1/rerank": "rerank",
    "/v2/rerank": "rerank",
    "/pooling": "pooling",
    "/v1/files": "files",
    "/v1/batches": "batches",
    "/v1/responses": "responses",
    "/v1/responses/input_tokens": "input_tokens",
    "/v1/conversations": "conversations",
    "/v1/messages": "messages",
    "/v1/messages/count_tokens": "count_tokens",
    "/v1/chat/completions/batch": "chat",
    "/invocations": "invocations",
    "/v1/models": "models",
    "/v1/load_lora_adapter": "load_adapter",
    "/load_lora_adapter": "load_adapter",
    "/v1/unload_lora_adapter": "unload_adapter",
    "/unload_lora_adapter": "unload_adapter",
    "/tokenize": "tokenize",
    "/detokenize": "detokenize",
}

ADMIN_LISTENER = "the admin API, the console and /metrics are on the server's other port, 8001 by default"
"""Where the paths in ADMIN_PATHS are, in the error of a client with the wrong port."""

ADMIN_PATHS = ("/admin/v1/", "/console/", "/metrics/")

OPENAI_DOCUMENT = ListenerDocument(
    description="""The OpenAI-compatible API of loramux.

Send `Authorization: Bearer KEY`. The `model` field names the base or an adapter: `[tenant/]adapter[@version | :alias]`.
OpenAI fields that this server does not support are refused by name; none is ignored if it would change the answer.
With `stream: true`, the response is a stream of server-sent events that ends with `data: [DONE]`; a stream that fails
ends with an error instead. Every error has the same envelope, `{"error": {"message", "type", "param", "code"}}`, and
every response has an `x-request-id`.

A stream of `/v1/responses` consists of that API's numbered events and has no `[DONE]`.
`/v1/messages` speaks Anthropic's Messages API, with Anthropic's headers, streams and errors.""",
    public=HEALTH_PATHS,
    readers="Any API key gives access to this document.",
)


class ServerVersionDocument(TypedDict):
    """The version of the server's software."""

    version: str


version_router = APIRouter()


@version_router.get("/version", tags=["server"], response_model=ServerVersionDocument)
async def server_version(caller: Caller) -> Response:
    """Report the version of the server's software."""
    return json_response({"version": version("loramux")})


@cache
def _routes(loads_adapters: bool) -> APIRouter:
    """Return an app's routes, which contain no app state. FastAPI builds them at an app's first request, which takes
    80 ms, so apps share them.
    """
    routes = APIRouter(generate_unique_id_function=operation_id)
    surfaces = (
        completions,
        chat,
        batch_chat,
        stored_chats,
        invocations,
        responses,
        stored_responses,
        conversations,
        messages,
    )
    pooled = (embeddings, cohere_embeddings, classification, scores, pooling)
    for surface in (*surfaces, *pooled, models, tokenization, load, files, batches):
        routes.include_router(surface.router)
    if loads_adapters:
        routes.include_router(runtime_routes.router)
    routes.include_router(version_router)
    routes.include_router(OPENAI_DOCUMENT.router(Depends(authenticated)))
    return routes


def create_openai_app(
    services: GatewayServices,
    kept: BatchServices | None,
    runtime_adapters: RuntimeAdapters | None = None,
    is_additional: bool = False,
) -> FastAPI:
    """Create the app. `services.run.maintenance.run()` must run alongside it.

    Without `kept`, the app has no blob store, and the routes for files and batches refuse all calls. Without
    `runtime_adapters`, it has no routes that load adapters. If it `is_additional`, a gateway besides the server, these
    routes say where to send the calls.
    """
    # Only the health routes are public.
    app = listener_app("loramux")
    app.state.services, app.state.batches, app.state.runtime_adapters = services, kept, runtime_adapters
    app.router.routes.extend(_routes(runtime_adapters is not None or is_additional).routes)
    add_health(app, services.database, services.engine, services.trouble)
    errors = ErrorResponses(form_of=error_form, elsewhere=dict.fromkeys(ADMIN_PATHS, ADMIN_LISTENER))
    handlers = {
        "/v1/completions": completions.create_completion,
        "/v1/chat/completions": chat.create_chat_completion,
        "/v1/embeddings": embeddings.create_embeddings,
        "/v1/responses": responses.create_response,
        "/v1/messages": messages.create_message,
    }
    # Middleware that is added later wraps middleware that was added earlier.
    app.add_middleware(DirectRoutes, handlers=handlers, errors=errors)
    count = counting_endpoints(services.metrics.api, ENDPOINTS, services.settings.logs_answers)
    app.add_middleware(HttpMetrics, count=count)
    if services.tracing is not None:
        app.add_middleware(TraceMiddleware, tracing=services.tracing, paths=frozenset(ENDPOINTS))
    install_error_handling(app, errors)
    if services.settings.cors_origins:
        app.add_middleware(CrossOrigin, origins=services.settings.cors_origins)
    if services.settings.root_path:
        app.add_middleware(RootPath, root=services.settings.root_path)
    return app
