"""`/adapters/{id}/aliases`: set, list, roll back and delete aliases. Versions are loaded before an alias moves."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Annotated, Literal

from fastapi import APIRouter, Header, Request, Response
from typing_extensions import TypedDict

from loramux.adapter_store.registry.aliases import KEPT, KEPT_OVERFLOW, KEPT_SHARE
from loramux.adapter_store.registry.evals import PPM
from loramux.adapter_store.registry.records import (
    DEFAULT_ALIAS,
    Adapter,
    Alias,
    AliasAction,
    AliasChange,
    CanaryRule,
    RequiredEval,
)
from loramux.admin.rest.access import Caller, Developer, Reader, Services, Writer, known_names
from loramux.admin.rest.adapters.adapters import TargetDocument, describe_targets, find_adapter
from loramux.admin.rest.adapters.warm_and_drain import warm
from loramux.admin.rest.bodies import AliasTargets, Rollback, read_json, read_optional_json
from loramux.admin.rest.listing import ListDocument, Paging, list_document, paged, seconds, whole_list
from loramux.admin.rest.services import AdminServices
from loramux.platform.accounts.model_names import AdapterName, ModelNotFound, parse_adapter_name
from loramux.platform.errors import InvalidRequest, PermissionDenied
from loramux.platform.requests.openapi import errors, takes

router = APIRouter(prefix="/adapters/{adapter_id}/aliases", tags=["aliases"])

_REVISION = re.compile(r'"(0|[1-9][0-9]{0,9})"')
IfMatch = Annotated[str | None, Header(description="The alias's ETag; if the alias has moved, the call fails.")]


class EvalDemandDocument(TypedDict):
    """The score that a version needs in an eval of this file before it gets more of the alias's requests. `judge` is
    the judge of this eval, or null.
    """

    sha256: str
    name: str
    min_score: float
    judge: str | None


class CanaryDocument(TypedDict):
    """The bounds of the `versions` that got more requests at the last move. `verdict` says why the versions failed. If
    the alias still has them, no earlier revision without them could be served.
    """

    max_error_rate: float | None
    max_first_token_s: float | None
    min_requests: int
    versions: list[int]
    verdict: str | None


class AliasDocument(TypedDict):
    """A name for versions of an adapter. `revision` counts the alias's changes and is its ETag. `overflow` is the
    model that answers requests to the alias which would be refused. `share_base_cache` is the number of each prompt's
    last tokens that the adapter computes, or null if it computes whole prompts. The versions in `not_sharing` ignore
    it.
    """

    object: Literal["alias"]
    adapter_id: str
    name: str
    revision: int
    targets: list[TargetDocument]
    require_eval: EvalDemandDocument | None
    canary: CanaryDocument | None
    overflow: str | None
    share_base_cache: int | None
    not_sharing: list[int]
    updated_at: int


class AliasChangeDocument(TypedDict):
    """An alias's versions and `share_base_cache` at one revision. `actor` is the key that moved the alias, or
    `system`, and `actor_name` the key's name.
    """

    id: str
    object: Literal["alias_change"]
    name: str
    revision: int
    action: AliasAction
    actor: str
    actor_name: str
    targets: list[TargetDocument]
    share_base_cache: int | None
    created_at: int


@router.get("")
async def list_aliases(adapter_id: str, services: Services, caller: Reader) -> ListDocument[AliasDocument]:
    """List an adapter's aliases, with the versions and weights of each."""
    adapter = await find_adapter(services, caller, adapter_id)
    aliases = (await services.call(services.adapters.aliases.of, [adapter.id]))[adapter.id]
    return whole_list([describe_alias(adapter.id, alias) for alias in aliases.values()])


@router.get("/{name}")
async def get_alias(
    adapter_id: str, name: str, response: Response, services: Services, caller: Reader
) -> AliasDocument:
    """Get one alias. Its ETag is its revision."""
    adapter = await find_adapter(services, caller, adapter_id)
    return _answer(response, adapter.id, await services.call(services.adapters.aliases.get, adapter.id, name))


@router.put("/{name}", openapi_extra=takes(AliasTargets), responses=errors(409, 412, 429))
async def set_alias(
    adapter_id: str,
    name: str,
    request: Request,
    response: Response,
    services: Services,
    caller: Developer,
    if_match: IfMatch = None,
) -> AliasDocument:
    """Point an alias at one ready version, or split its requests among several versions by weight.

    The versions are loaded into the engine first, unless `warm` is false. Running requests finish on the old versions.
    A tenant's loads count against `cold_loads_per_minute`. If that quota refuses a load, the alias does not move. Only
    an administrator may move `default`, the alias behind an adapter's bare name.

    With `require_eval`, the alias gives a version more requests only if the version has passed the eval. Only an
    administrator may change a demand, or `overflow` or `share_base_cache` while there is one. With `canary`, the alias
    is rolled back if a version that gets more requests fails or is slow. With `overflow`, another model answers
    requests that would be refused because the engine is overloaded or the adapter cannot be loaded. With
    `share_base_cache`, the base computes the beginnings of prompts, so that adapters share their K and V; the answers
    are then approximations. The call replaces the whole alias or creates it, so If-Match is optional here.
    """
    adapter = await find_adapter(services, caller, adapter_id)
    check_may_move(caller, name)
    body = await read_json(request, AliasTargets)
    weights, demand = body.weights(), body.demand()
    canary = None if body.canary is None else body.canary.rule()
    overflow = await _overflow(services, caller, adapter, name, body)
    await _check_may_demand(services, caller, adapter.id, name, body, overflow)
    revision = _revision(if_match)
    if body.warm:
        await warm(services, caller, adapter.id, weights)
    actor = caller.principal.key_id
    move = partial(
        services.adapters.aliases.set,
        required_eval=demand,
        canary=canary,
        overflow=overflow,
        share_base_cache=body.num_own_tokens(),
    )
    alias = await services.call(move, adapter.id, name, weights, actor, revision)
    return _answer(response, adapter.id, alias)


@router.post("/{name}/rollback", openapi_extra=takes(Rollback), responses=errors(412, 429))
async def roll_back(
    adapter_id: str,
    name: str,
    request: Request,
    response: Response,
    services: Services,
    caller: Developer,
    if_match: IfMatch = None,
) -> AliasDocument:
    """Undo the alias's last move, or return to the given `revision`. A second rollback undoes the first.

    The versions and `share_base_cache` are restored, and the other settings stay. Revisions that changed only these,
    such as the bounds of a canary, are passed over. No body is needed. With If-Match, the call is refused if the alias
    has changed since the caller read it, so that only one of two concurrent rollbacks succeeds. Loads count against the
    quota, as when an alias is set.
    """
    adapter = await find_adapter(services, caller, adapter_id)
    check_may_move(caller, name)
    body = await read_optional_json(request, Rollback)
    expected = _revision(if_match)
    if body.warm:
        targets = await services.call(services.adapters.aliases.targets_at, adapter.id, name, body.revision)
        await warm(services, caller, adapter.id, [target.number for target in targets])
    actor = caller.principal.key_id
    alias = await services.call(services.adapters.aliases.rollback, adapter.id, name, actor, body.revision, expected)
    return _answer(response, adapter.id, alias)


@router.get("/{name}/history")
@paged
async def list_history(
    adapter_id: str, name: str, services: Services, caller: Reader, paging: Paging
) -> ListDocument[AliasChangeDocument]:
    """List the alias's history, newest first: the versions it pointed at, and the key that moved it."""
    adapter = await find_adapter(services, caller, adapter_id)
    page = await services.call(services.adapters.aliases.history, adapter.id, name, *paging)
    names = await known_names(services, caller, [change.actor for change in page.data])
    return list_document(page, lambda change: _describe_change(change, names))


@router.delete("/{name}", status_code=204, responses=errors(412))
async def delete_alias(
    adapter_id: str, name: str, services: Services, caller: Writer, if_match: IfMatch = None
) -> Response:
    """Delete an alias other than `default`. With If-Match, the call is refused if the alias has moved."""
    adapter = await find_adapter(services, caller, adapter_id)
    await services.call(services.adapters.aliases.remove, adapter.id, name, _revision(if_match))
    return Response(status_code=204)


def check_may_move(caller: Caller, name: str) -> None:
    if name == DEFAULT_ALIAS and not caller.is_administrator:
        raise PermissionDenied("only an administrator may move the default alias: move another alias")


async def _check_may_demand(
    services: AdminServices, caller: Caller, adapter_id: str, name: str, body: AliasTargets, overflow: str | None
) -> None:
    """Raise PermissionDenied if the alias demands an eval, and the call would change or bypass the demand."""
    demand, num_own = body.demand(), body.num_own_tokens()
    if caller.is_administrator or (demand is KEPT and num_own == KEPT_SHARE and overflow == KEPT_OVERFLOW):
        return
    present = (await services.call(services.adapters.aliases.of, [adapter_id]))[adapter_id].get(name)
    if present is None or present.required_eval is None:
        return
    if demand is not KEPT and demand != present.required_eval:
        raise PermissionDenied("only an administrator may change the eval that the alias demands")
    # The eval measured the version without the option, and no other model.
    if num_own not in (KEPT_SHARE, present.share_base_cache):
        raise PermissionDenied("the alias demands an eval: only an administrator may change share_base_cache")
    if overflow not in (KEPT_OVERFLOW, present.overflow):
        raise PermissionDenied("the alias demands an eval: only an administrator may change overflow")


async def _overflow(
    services: AdminServices, caller: Caller, adapter: Adapter, name: str, body: AliasTargets
) -> str | None:
    """Return the overflow with the name of its tenant. Raises InvalidRequest or ModelNotFound."""
    asked = body.named_overflow()
    if not asked or asked == services.engine.self_check.served_name:
        return asked
    parsed = parse_adapter_name(asked)
    if parsed is None:
        raise ModelNotFound(asked, "overflow")
    tenant = parsed.tenant or adapter.tenant_slug
    own = AdapterName(adapter.tenant_slug, adapter.name, alias=name)
    if replace(parsed, tenant=tenant, alias=parsed.alias or DEFAULT_ALIAS) == own:
        raise InvalidRequest("an alias cannot be its own overflow", param="overflow", code="invalid_overflow")
    found = await services.call(
        partial(
            services.adapters.registry.resolve,
            tenant,
            parsed.adapter,
            version=parsed.version,
            digest_prefix=parsed.digest_prefix,
            alias=parsed.alias,
            caller_id=adapter.tenant_id,
        )
    )
    if found is None or not caller.principal.may_name(found.adapter_id):
        raise ModelNotFound(asked, "overflow")
    return asked if parsed.tenant else f"{tenant}/{asked}"


def _revision(if_match: str | None) -> int | None:
    if if_match is None or if_match == "*":
        return None
    found = _REVISION.fullmatch(if_match.strip())
    if found is None:
        raise InvalidRequest('If-Match must be an ETag of this alias, such as "3"', param="If-Match")
    return int(found[1])


def _answer(response: Response, adapter_id: str, alias: Alias) -> AliasDocument:
    response.headers["etag"] = f'"{alias.revision}"'
    return describe_alias(adapter_id, alias)


def describe_alias(adapter_id: str, alias: Alias) -> AliasDocument:
    return {
        "object": "alias",
        "adapter_id": adapter_id,
        "name": alias.name,
        "revision": alias.revision,
        "targets": describe_targets(alias.targets),
        "require_eval": _describe_demand(alias.required_eval),
        "canary": None if alias.canary is None else _describe_canary(alias.canary),
        "overflow": alias.overflow,
        "share_base_cache": alias.share_base_cache,
        "not_sharing": list(alias.not_sharing),
        "updated_at": seconds(alias.updated_us),
    }


def _describe_demand(demand: RequiredEval | None) -> EvalDemandDocument | None:
    if demand is None:
        return None
    score = demand.min_ppm / PPM
    return {"sha256": demand.sha256, "name": demand.name, "min_score": score, "judge": demand.judge}


def _describe_canary(rule: CanaryRule) -> CanaryDocument:
    return {
        "max_error_rate": rule.max_error_rate,
        "max_first_token_s": rule.max_first_token_s,
        "min_requests": rule.min_requests,
        "versions": list(rule.versions),
        "verdict": rule.verdict,
    }


def _describe_change(change: AliasChange, names: Mapping[str, str]) -> AliasChangeDocument:
    return {
        "id": change.id,
        "object": "alias_change",
        "name": change.name,
        "revision": change.revision,
        "action": change.action,
        "actor": change.actor,
        "actor_name": names.get(change.actor, change.actor),
        "targets": describe_targets(change.targets),
        "share_base_cache": change.share_base_cache,
        "created_at": seconds(change.created_us),
    }
