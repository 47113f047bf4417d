"""vLLM's and SGLang's calls that load and unload adapters while the server runs, and what trainers call around them."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from functools import partial
from typing import Annotated, Literal, cast

from fastapi import APIRouter, Depends, Request
from pydantic import Field
from starlette.responses import PlainTextResponse, Response
from typing_extensions import TypedDict

from loramux.adapter_store.errors import StoreError
from loramux.kernels.layout import MAX_RANK
from loramux.migrations.audit import Actor, act_as
from loramux.platform.accounts.principals import Principal
from loramux.platform.bodies.request_body import parse_body, read_body
from loramux.platform.bodies.strict_model import StrictModel
from loramux.platform.errors import NotOnThisGateway
from loramux.platform.requests.authentication import Caller, Services, authenticated
from loramux.platform.requests.error_responses import json_response, request_id_of
from loramux.platform.requests.openapi import errors, takes
from loramux.platform.runtime_adapters.runtime_adapters import LoadedAdapter, RuntimeAdapters, load_error

router = APIRouter()

MAX_BODY_BYTES = 16 * 1024
_ERRORS = errors(404, 409, 429, 503)

Name = Annotated[str, Field(min_length=1, max_length=200)]


class LoadAdapter(StrictModel):
    """`lora_path` is an absolute path on the server's machine, or a URL. With `load_inplace`, a name that is in service
    gets a new version; otherwise such a name is refused. The other fields have no effect.
    """

    lora_name: Name
    lora_path: Annotated[str, Field(min_length=1, max_length=1000)]
    load_inplace: bool = False
    base_model_name: str | None = None
    is_3d_lora_weight: bool = False


class LoadAdapterOfSglang(StrictModel):
    """`lora_path` is an absolute path on the server's machine, or a URL. `pinned` can only be false, because only an
    operator pins adapters.
    """

    lora_name: Name
    lora_path: Annotated[str, Field(min_length=1, max_length=1000)]
    pinned: Literal[False] = False


class UnloadAdapter(StrictModel):
    """`lora_int_id` has no effect."""

    lora_name: Name
    lora_int_id: int | None = None


class LoadedDocument(TypedDict):
    """SGLang's answer. `loaded_adapters` contains the tenant's adapters, and the model that each name stands for."""

    success: bool
    error_message: str | None
    loaded_adapters: dict[str, str]


class ModelInfoDocument(TypedDict):
    dtype: str
    max_model_len: int


class AdapterInfoDocument(TypedDict):
    max_lora_rank: int
    max_loras: int


class ParallelInfoDocument(TypedDict):
    data_parallel_size: int


class ServerConfigDocument(TypedDict):
    model_config: ModelInfoDocument
    lora_config: AdapterInfoDocument
    parallel_config: ParallelInfoDocument


class ServerInfoDocument(TypedDict):
    """The parts of vLLM's configuration from which trainers learn what the server can do. `max_loras` is the maximum
    number of adapters in the engine at a time; any number can be served.
    """

    vllm_config: ServerConfigDocument


class PauseDocument(TypedDict):
    """Nothing is ever paused: a request in progress keeps its version, and a version never changes."""

    status: Literal["running"]


async def adapters_of(request: Request, caller: Caller) -> RuntimeAdapters:
    # The audit log attributes the changes to the key.
    act_as(Actor(caller.key_id, None if request.client is None else request.client.host, request_id_of(request)))
    adapters = cast(RuntimeAdapters | None, request.app.state.runtime_adapters)
    if adapters is None:
        raise NotOnThisGateway(
            "an additional gateway does not load adapters: call the server's own port, if it has load_sources"
        )
    return adapters


Adapters = Annotated[RuntimeAdapters, Depends(adapters_of)]


@router.post(
    "/v1/load_lora_adapter", tags=["models"], openapi_extra=takes(LoadAdapter), response_model=str, responses=_ERRORS
)
async def load_lora_adapter(request: Request, adapters: Adapters, services: Services) -> Response:
    """Load an adapter from one of the sources that the operator allows, and serve it under a name (vLLM's call). It
    becomes a version, is validated like an upload, and is in the engine when the call returns.
    """
    body = parse_body(await read_body(request, MAX_BODY_BYTES), LoadAdapter)
    authenticate = partial(authenticated, request, services)
    await _load(adapters, authenticate, body.lora_name, body.lora_path, replaces=body.load_inplace)
    return PlainTextResponse(f"Success: LoRA adapter '{body.lora_name}' added successfully.")


@router.post(
    "/v1/unload_lora_adapter",
    tags=["models"],
    openapi_extra=takes(UnloadAdapter),
    response_model=str,
    responses=errors(404),
)
async def unload_lora_adapter(request: Request, caller: Caller, adapters: Adapters) -> Response:
    """Take an adapter out of service (vLLM's call). Requests in progress finish. Nothing is deleted."""
    body = parse_body(await read_body(request, MAX_BODY_BYTES), UnloadAdapter)
    await adapters.unload(caller, body.lora_name)
    return PlainTextResponse(f"Success: LoRA adapter '{body.lora_name}' removed successfully.")


@router.post(
    "/load_lora_adapter",
    tags=["models"],
    openapi_extra=takes(LoadAdapterOfSglang),
    response_model=LoadedDocument,
    responses=_ERRORS,
)
async def load_adapter_of_sglang(request: Request, caller: Caller, adapters: Adapters, services: Services) -> Response:
    """Load an adapter and serve it under a new name (SGLang's call)."""
    body = parse_body(await read_body(request, MAX_BODY_BYTES), LoadAdapterOfSglang)
    authenticate = partial(authenticated, request, services)
    await _load(adapters, authenticate, body.lora_name, body.lora_path, replaces=False)
    return await _loaded(adapters, caller)


@router.post(
    "/unload_lora_adapter",
    tags=["models"],
    openapi_extra=takes(UnloadAdapter),
    response_model=LoadedDocument,
    responses=errors(404),
)
async def unload_adapter_of_sglang(request: Request, caller: Caller, adapters: Adapters) -> Response:
    """Take an adapter out of service (SGLang's call)."""
    body = parse_body(await read_body(request, MAX_BODY_BYTES), UnloadAdapter)
    await adapters.unload(caller, body.lora_name)
    return await _loaded(adapters, caller)


@router.get("/server_info", tags=["server"], response_model=ServerInfoDocument)
async def server_info(adapters: Adapters, services: Services) -> Response:
    """Report the dtype and limits of the engine in the form of vLLM's configuration, which trainers read."""
    info = services.engine.info
    dtype = "auto" if info is None else f"torch.{info.dtype}"
    return json_response(
        {
            "vllm_config": {
                "model_config": {"dtype": dtype, "max_model_len": services.max_model_len},
                "lora_config": {"max_lora_rank": MAX_RANK, "max_loras": adapters.max_resident},
                "parallel_config": {"data_parallel_size": 1},
            }
        }
    )


@router.post("/pause", tags=["server"], response_model=PauseDocument)
async def pause(caller: Caller) -> Response:
    """Answer trainers that pause a server before they replace weights. Nothing is paused, because nothing is replaced:
    requests in progress keep their version.
    """
    return json_response({"status": "running"})


@router.post("/resume", tags=["server"], response_model=PauseDocument)
async def resume(caller: Caller) -> Response:
    """Answer trainers that resume a server after they have replaced weights."""
    return json_response({"status": "running"})


async def _load(
    adapters: RuntimeAdapters, authenticate: Callable[[], Awaitable[Principal]], name: str, path: str, *, replaces: bool
) -> LoadedAdapter:
    try:
        return await adapters.load(authenticate, name, path, replaces=replaces)
    except StoreError as error:
        raise load_error(error) from error


async def _loaded(adapters: RuntimeAdapters, caller: Principal) -> Response:
    loaded = await adapters.loaded(caller)
    return json_response({"success": True, "error_message": None, "loaded_adapters": loaded})
