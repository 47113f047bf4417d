"""`GET /v1/models`, and `GET` and `DELETE /v1/models/{id}`: the models that the caller may name in a request.

Clients of Anthropic's API send the header `anthropic-version`, and receive Anthropic's form.
"""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from loramux.migrations.audit import Actor, act_as
from loramux.platform.accounts.model_names import ResolvedModel
from loramux.platform.messages_api.api_version import HEADER, check_version
from loramux.platform.messages_api.message_documents import MessageModel, MessageModelPage
from loramux.platform.messages_api.model_list import model_document, model_page
from loramux.platform.openai_api.openapi_schemas import DeletedModel, ModelDocument, ModelList
from loramux.platform.requests.authentication import Caller, Services
from loramux.platform.requests.error_responses import json_response, request_id_of
from loramux.platform.requests.openapi import errors
from loramux.platform.requests.services import GatewayServices

router = APIRouter(tags=["models"])


# Without this route, the path with a slash at its end would name a model.
@router.get("/v1/models/", include_in_schema=False)
@router.get("/v1/models", response_model=ModelList | MessageModelPage)
async def list_models(request: Request, caller: Caller, services: Services) -> Response:
    """List the models that the caller may name in a request: the base, and adapters as `tenant/adapter`. With the
    header `anthropic-version`, the list has Anthropic's form and its pages (`limit`, `after_id`, `before_id`).
    """
    models = await services.call(services.callers.resolver.list_models, caller)
    if HEADER in request.headers:
        check_version(request.headers)
        listed = [_message_model(services, model, _listed_name(model)) for model in models]
        return json_response(model_page(listed, request.query_params))
    data = [_body(services, model, _listed_name(model)) for model in models]
    return json_response({"object": "list", "data": data})


# A model's name can contain a slash.
@router.get("/v1/models/{name:path}", response_model=ModelDocument | MessageModel, responses=errors(409))
async def retrieve_model(name: str, request: Request, caller: Caller, services: Services) -> Response:
    """Retrieve one model by any name that a request can use. `root` is the version that the name resolves to. With the
    header `anthropic-version`, the model has Anthropic's form.
    """
    model = await services.call(services.callers.resolver.resolve, caller, name)
    if HEADER in request.headers:
        check_version(request.headers)
        return json_response(_message_model(services, model, name))
    return json_response(_body(services, model, name))


@router.delete("/v1/models/{name:path}", response_model=DeletedModel, responses=errors(409))
async def delete_model(name: str, request: Request, caller: Caller, services: Services) -> Response:
    """Take an adapter, or one version of it, out of service. Running requests finish. The call needs a key with the
    scope `tenant:admin` and archives the model instead of deleting it: the admin API can put it back into service.
    """
    # The audit log attributes the change to the key.
    act_as(Actor(caller.key_id, None if request.client is None else request.client.host, request_id_of(request)))
    await services.call(services.callers.archive.archive, caller, name)
    return json_response({"id": name, "object": "model", "deleted": True})


def _listed_name(model: ResolvedModel) -> str:
    adapter = model.adapter
    return model.name if adapter is None else f"{adapter.tenant_slug}/{adapter.adapter_name}"


def _body(services: GatewayServices, model: ResolvedModel, name: str) -> dict[str, Any]:
    adapter = model.adapter
    return {
        "id": name,
        "object": "model",
        "created": _created_s(services, model),
        "owned_by": "loramux" if adapter is None else adapter.tenant_slug,
        "root": model.name,
        "parent": None if adapter is None else services.model.served_name,
        "max_model_len": services.max_model_len,
        "quantization": services.quantization,
        "task": "generation" if adapter is None or adapter.task is None else adapter.task.kind,
    }


def _message_model(services: GatewayServices, model: ResolvedModel, name: str) -> dict[str, Any]:
    return model_document(name, _created_s(services, model), services.max_model_len)


def _created_s(services: GatewayServices, model: ResolvedModel) -> int:
    """Return the creation time. A version's identifier is a UUIDv7, which begins with the time in milliseconds."""
    adapter = model.adapter
    if adapter is None:
        return services.model.created_s
    return int(adapter.version_id.partition("_")[2][:12], 16) // 1000
