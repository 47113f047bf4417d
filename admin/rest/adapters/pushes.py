"""`/adapters/{id}/push`: a version from the bytes of its files in one request, in service when the request returns."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Collection, Iterable, Iterator
from functools import partial
from typing import Annotated, Any, Literal

import anyio
import anyio.to_thread
from fastapi import APIRouter, Query, Request, Response

from loramux.adapter_store.formats.files.file_names import FURTHER_FILES, UPLOAD_FILES
from loramux.adapter_store.registry.records import Adapter, AdapterVersion
from loramux.adapter_store.registry.registry import check_slug
from loramux.admin.rest.access import Caller, Developer, Services
from loramux.admin.rest.adapters.adapters import find_adapter
from loramux.admin.rest.adapters.aliases import AliasDocument, check_may_move, describe_alias
from loramux.admin.rest.adapters.uploads import body_chunks, declared_length
from loramux.admin.rest.adapters.versions import VersionDocument, describe_version
from loramux.admin.rest.adapters.warm_and_drain import WARM_TIMEOUT_S, load_charge, warm
from loramux.admin.rest.services import AdminServices
from loramux.admin.server.transfer_slots import TransferSlots
from loramux.engine.protocol.messages import AdapterState
from loramux.platform.batches.form_data import FormParser, Part
from loramux.platform.bodies.request_body import content_encoding
from loramux.platform.errors import Conflict, InvalidRequest, PermissionDenied
from loramux.platform.requests.openapi import errors

router = APIRouter(prefix="/adapters/{adapter_id}/push", tags=["versions"])

LARGE_PUSH_BYTES = 256 << 20
"""Pushes of more bytes are validated one at a time, so that they cannot occupy all turns."""

ELSEWHERE_TIMEOUT_S = 5.0
"""Maximum time, in seconds, that a push waits for other servers to load the version."""

_BINARY = {"type": "string", "format": "binary"}
_FORM: dict[str, Any] = {
    "requestBody": {
        "required": True,
        "content": {
            "multipart/form-data": {
                "schema": {
                    "type": "object",
                    "required": list(UPLOAD_FILES),
                    "additionalProperties": False,
                    "properties": dict.fromkeys((*UPLOAD_FILES, *FURTHER_FILES), _BINARY),
                }
            }
        },
    }
}

AliasName = Annotated[str | None, Query(max_length=63, description="The alias to point at the version.")]
Wait = Annotated[
    Literal["ready", "resident"],
    Query(
        description="`resident`: the engine has loaded the version before the alias moves and the call returns. Other "
        "servers that hold the alias's earlier version load it too, within 5 s."
    ),
]
Running = Annotated[
    Literal["finish", "stop"],
    Query(description="What happens to running requests on the versions that the alias no longer points at."),
]
Untrained = Annotated[
    bool, Query(description="Accept weights without any effect, such as those before the first step.")
]


class PushedDocument(VersionDocument):
    """A ready version. `model` is its own name in requests. `alias` is null if no alias was to move. `stopped` is the
    number of requests that were cancelled.
    """

    model: str
    alias: AliasDocument | None
    stopped: int


@router.put("", openapi_extra=_FORM, responses=errors(409, 429, 503))
async def push(
    adapter_id: str,
    request: Request,
    response: Response,
    services: Services,
    caller: Developer,
    alias: AliasName = None,
    wait: Wait = "ready",
    running: Running = "finish",
    untrained: Untrained = False,
) -> PushedDocument:
    """Create a version from a form whose parts are named like the files, and return when it is ready.

    With `alias`, the alias then points at the version alone. Running requests finish on the old version, unless
    `running` is `stop`: then they are cancelled, and the tokens generated so far are charged. Only an administrator may
    move `default` or stop requests, and a tenant's key stops only its own tenant's. If two pushes overlap, the alias
    points at the version of the later one. The request needs a Content-Length. Its bytes count against `adapter_bytes`
    from the beginning.

    A version with the same files is returned again. A version that is rejected answers 400 with the code of its
    validation, and leaves the alias as it is. If the call is refused after the version has become ready, the version
    stays, and the call can be repeated. Repeated with `running` as `stop`, it also cancels the requests that are still
    running on the versions that the alias pointed at before. The header Server-Timing says how long each stage took.
    """
    adapter = await find_adapter(services, caller, adapter_id)
    if alias is not None:
        check_slug(alias, "alias")
        check_may_move(caller, alias)
    if running == "stop" and not caller.is_administrator:
        raise PermissionDenied("only an administrator may stop running requests", param="running")
    if running == "stop" and alias is None:
        raise InvalidRequest("specify the alias whose requests to stop", param="alias")
    before = [] if alias is None else await _targets(services, adapter, alias)
    loading: list[asyncio.Task[AdapterState]] = []

    def load(digest: str) -> None:
        # Without waiting for the store's acknowledgement. Errors are reported by the load below.
        task = asyncio.create_task(services.engine.loads.load(digest, charge, WARM_TIMEOUT_S))
        task.add_done_callback(lambda task: task.cancelled() or task.exception())
        loading.append(task)

    loop, charge = asyncio.get_running_loop(), load_charge(caller, adapter.id)
    when_loadable = (lambda digest: loop.call_soon_threadsafe(load, digest)) if wait == "resident" else None
    # How long the store takes would tell a tenant whether another one has stored the same bytes.
    times = StageTimes(hidden=() if caller.principal.tenant_id is None else ("store",))
    version = await _published(services, caller, adapter, request, not untrained, when_loadable, times)
    if wait == "resident":
        if not await _is_loaded(loading):
            await warm(services, caller, adapter.id, [version.number])
        await _load_elsewhere(services, version, before)
        times.end("load")
    document: PushedDocument = {
        **describe_version(version),
        "model": f"{adapter.tenant_slug}/{adapter.name}@{version.number}",
        "alias": None,
        "stopped": 0,
    }
    if alias is None:
        response.headers["server-timing"] = times.header()
        return document
    actor = caller.principal.key_id
    advance = services.adapters.aliases.advance
    moved, replaced = await services.call(advance, adapter.id, alias, version.number, before, actor)
    document["alias"] = describe_alias(adapter.id, moved)
    if running == "stop" and replaced:
        document["stopped"] = await _stop(services, caller, [target.version_id for target in replaced])
    times.end("alias")
    response.headers["server-timing"] = times.header()
    return document


async def _is_loaded(loading: list[asyncio.Task[AdapterState]]) -> bool:
    """Wait for the load that began before the store's acknowledgement, if any, and return whether it succeeded."""
    if not loading:
        return False
    await asyncio.wait(loading)
    (load,) = loading
    return not load.cancelled() and load.exception() is None and load.result().state == "resident"


async def _load_elsewhere(services: AdminServices, version: AdapterVersion, before: Iterable[int]) -> None:
    """Have the other servers that hold the alias's versions of `before` load the new version too."""
    load = services.engine.load_elsewhere
    if load is None:
        return
    get_version = services.adapters.registry.get_version
    earlier = [await services.call(get_version, version.adapter_id, number) for number in before]
    predecessors = [one.digest for one in earlier if one is not None and one.digest is not None]
    assert version.digest is not None
    await load(version.digest, predecessors, ELSEWHERE_TIMEOUT_S)


class StageTimes:
    """The durations of a push's stages, for the header Server-Timing."""

    def __init__(self, hidden: Collection[str] = ()) -> None:
        self._hidden = hidden
        self._last_s = time.monotonic()
        self._stages: list[str] = []

    def end(self, stage: str) -> None:
        """The stage began with the end of the stage before it."""
        now_s = time.monotonic()
        if stage not in self._hidden:
            self._stages.append(f"{stage};dur={(now_s - self._last_s) * 1000:.1f}")
        self._last_s = now_s

    def header(self) -> str:
        return ", ".join(self._stages)


async def _targets(services: AdminServices, adapter: Adapter, alias: str) -> list[int]:
    aliases = (await services.call(services.adapters.aliases.of, [adapter.id]))[adapter.id]
    return [target.number for target in aliases[alias].targets] if alias in aliases else []


async def _published(
    services: AdminServices,
    caller: Caller,
    adapter: Adapter,
    request: Request,
    needs_effect: bool,
    when_loadable: Callable[[str], object] | None,
    times: StageTimes,
) -> AdapterVersion:
    """Receive the form and wait for the verdict. Raises ApiError unless the version can be served."""
    num_bytes = declared_length(request)
    if num_bytes is None:
        raise InvalidRequest("send the Content-Length", param="Content-Length", code="missing_content_length")
    content_encoding(request)
    parser = FormParser(request.headers.get("content-type", ""))
    items = _items(parser, body_chunks(request.stream()))
    pushes, tenant_id = services.adapters.ingest.pushes, adapter.tenant_id
    caller.release_call_slot()
    # Slots, not threads, limit concurrent pushes, because only a wait for a slot can time out.
    thread = anyio.CapacityLimiter(1)
    async with services.slots.pushes.held_slot(tenant_id):
        received = await anyio.to_thread.run_sync(pushes.receive, adapter.id, items, num_bytes, limiter=thread)
        times.end("receive")
        try:
            publish = partial(
                pushes.publish, received, needs_effect=needs_effect, when_loadable=when_loadable, passed=times.end
            )
            # After a refusal, the client would have to send all bytes again. The slots for pushes limit this queue.
            async with _turns(services, num_bytes).held_slot(tenant_id, is_patient=True):
                times.end("wait")
                version = await anyio.to_thread.run_sync(publish, limiter=thread)
        finally:
            with anyio.CancelScope(shield=True):
                await anyio.to_thread.run_sync(pushes.discard, received, limiter=thread)
    if version.state == "rejected":
        error = version.report.get("error", {})
        message = f"version {version.number} was rejected: {error.get('message')}"
        raise InvalidRequest(message, code=error.get("code"), param=error.get("param"))
    if version.state != "ready":
        raise Conflict(
            f"version {version.number} already has these files and is {version.state}",
            code=f"version_{version.state}",
        )
    return version


def _turns(services: AdminServices, num_bytes: int) -> TransferSlots:
    return services.slots.push_turns if num_bytes <= LARGE_PUSH_BYTES else services.slots.large_push_turns


async def _stop(services: AdminServices, caller: Caller, version_ids: list[str]) -> int:
    """Cancel the requests on these versions that the caller may cancel: not those of tenants with a grant, unless the
    caller is an operator. Requests on other servers end at their next checkpoint.
    """
    cancel = services.engine.requests.cancel_versions
    stopped = await services.call(cancel, version_ids, caller.principal.tenant_id)
    for request_id in stopped:
        services.engine.live.cancel(request_id)
    return len(stopped)


def _items(parser: FormParser, chunks: Iterable[bytes]) -> Iterator[str | bytes]:
    """Yield the name of each part of a form, and then its bytes."""
    for chunk in chunks:
        for item in parser.feed(chunk):
            yield item.name if isinstance(item, Part) else item
    if not parser.is_complete:
        raise InvalidRequest("the form ends early", code="invalid_form")
