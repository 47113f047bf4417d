"""`/adapters/{id}/aliases`: names for versions, moved one at a time, warmed before they move, and rolled back."""

from __future__ import annotations

import re
from typing import Annotated

from fastapi import APIRouter, Header, Request, Response

from loramux.adapter_store.records import Alias, AliasChange
from loramux.admin.rest.access import Reader, Services, Writer
from loramux.admin.rest.adapters import describe_targets, find_adapter
from loramux.admin.rest.bodies import AliasTargets, Rollback, read_json, read_optional_json
from loramux.admin.rest.listing import After, Before, Document, Limit, ListDocument, list_document, seconds
from loramux.admin.rest.warm_and_drain import warm
from loramux.platform.errors import InvalidRequest

router = APIRouter(prefix="/adapters/{adapter_id}/aliases")

_REVISION = re.compile(r'"(0|[1-9][0-9]{0,9})"')
IfMatch = Annotated[str | None, Header(description="The alias's ETag: refuse the change if it has moved since.")]


@router.get("")
async def list_aliases(adapter_id: str, services: Services, caller: Reader) -> Document:
    """The versions that each alias names, with their weights."""
    adapter = await find_adapter(services, caller, adapter_id)
    aliases = (await services.call(services.aliases.of, [adapter.id]))[adapter.id]
    return {"object": "list", "data": [_describe(adapter.id, alias) for alias in aliases.values()], "has_more": False}


@router.get("/{name}")
async def get_alias(adapter_id: str, name: str, response: Response, services: Services, caller: Reader) -> Document:
    """One alias; its ETag is its revision."""
    adapter = await find_adapter(services, caller, adapter_id)
    return _answer(response, adapter.id, await services.call(services.aliases.get, adapter.id, name))


@router.put("/{name}")
async def set_alias(
    adapter_id: str,
    name: str,
    request: Request,
    response: Response,
    services: Services,
    caller: Writer,
    if_match: IfMatch = None,
) -> Document:
    """Point an alias at one ready version, or share it out among several by weight.

    The versions are loaded into the engine first, unless `warm` is false; running requests finish on the old ones.
    """
    adapter = await find_adapter(services, caller, adapter_id)
    body = await read_json(request, AliasTargets)
    weights = body.weights()
    revision = _revision(if_match)
    if body.warm:
        await warm(services, adapter.id, weights)
    alias = await services.call(services.aliases.set, adapter.id, name, weights, caller.principal.key_id, revision)
    return _answer(response, adapter.id, alias)


@router.post("/{name}/rollback")
async def roll_back(
    adapter_id: str, name: str, request: Request, response: Response, services: Services, caller: Writer
) -> Document:
    """Go back to what the alias named before, or at `revision`; the next rollback undoes it. No body is needed."""
    adapter = await find_adapter(services, caller, adapter_id)
    body = await read_optional_json(request, Rollback)
    if body.warm:
        targets = await services.call(services.aliases.targets_at, adapter.id, name, body.revision)
        await warm(services, adapter.id, [target.number for target in targets])
    actor = caller.principal.key_id
    return _answer(
        response, adapter.id, await services.call(services.aliases.rollback, adapter.id, name, actor, body.revision)
    )


@router.get("/{name}/history")
async def list_history(
    adapter_id: str,
    name: str,
    services: Services,
    caller: Reader,
    limit: Limit = 20,
    after: After = None,
    before: Before = None,
) -> ListDocument[Document]:
    """What the alias has named, newest first, and which key moved it."""
    adapter = await find_adapter(services, caller, adapter_id)
    page = await services.call(services.aliases.history, adapter.id, name, limit, after, before)
    return list_document(page, _describe_change)


@router.delete("/{name}", status_code=204)
async def delete_alias(adapter_id: str, name: str, services: Services, caller: Writer) -> Response:
    """Forget an alias; `default` can only be moved."""
    adapter = await find_adapter(services, caller, adapter_id)
    await services.call(services.aliases.remove, adapter.id, name)
    return Response(status_code=204)


def _revision(if_match: str | None) -> int | None:
    if if_match is None or if_match == "*":
        return None
    found = _REVISION.fullmatch(if_match.strip())
    if found is None:
        raise InvalidRequest('If-Match is an ETag of this alias, such as "3"', param="If-Match")
    return int(found[1])


def _answer(response: Response, adapter_id: str, alias: Alias) -> Document:
    response.headers["etag"] = f'"{alias.revision}"'
    return _describe(adapter_id, alias)


def _describe(adapter_id: str, alias: Alias) -> Document:
    return {
        "object": "alias",
        "adapter_id": adapter_id,
        "name": alias.name,
        "revision": alias.revision,
        "targets": describe_targets(alias.targets),
        "updated_at": seconds(alias.updated_us),
    }


def _describe_change(change: AliasChange) -> Document:
    return {
        "id": change.id,
        "object": "alias_change",
        "name": change.name,
        "revision": change.revision,
        "action": change.action,
        "actor": change.actor,
        "targets": describe_targets(change.targets),
        "created_at": seconds(change.created_us),
    }
